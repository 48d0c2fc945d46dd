"""Restore switches of torch that an interrupt can leave in the wrong state.

Covers: gradients, autocast and anomaly detection, which code switches for a while and back again; modes, transforms and
the hook of ``torch.compile``, which code enters and leaves.
Does not cover: interrupts that are deferred (``deferral``).

``torch.no_grad()`` and every optimizer's step turn gradients off, and on again at their end, in Python code. An
interrupt during that end skips it, and without gradients no model on the rank trains any more. In the same way
``torch.compile`` and ``torch.device("meta")`` enter modes in which operators make tensors without data.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..cell_started import CellStarted

AUTOCAST = ("cpu", "cuda")  # devices whose autocast is checked


class TorchFlags:
    """The state of the switches before a cell."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}

    def note(self, _cell: CellStarted) -> None:
        """Record the state before a cell."""
        self._found = {name: read() for name, read, _ in (*_switches(), *_depths())}

    def put_back(self) -> list[str]:
        """Restore the recorded state; return messages about the switches that had another."""
        reports = []
        for name, read, write in _switches():
            before = self._found.get(name)
            if before is not None and read() != before:
                write(before)
                state = "on" if before else "off"
                reports.append(
                    f"{name} is {state} again, as before the cell: the interrupt had skipped the code that turns it "
                    f"{state}"
                )
        for name, depth, leave in _depths():
            left: dict[str, None] = {}
            while name in self._found and depth() > self._found[name]:
                left[leave()] = None
            reports += [f"{each} was exited, as before the cell: the interrupt had skipped its exit" for each in left]
        return reports


def _switches() -> Iterator[tuple[str, Callable[[], bool], Callable[[bool], Any]]]:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    yield "torch's gradient mode", torch.is_grad_enabled, torch.set_grad_enabled
    yield "torch's anomaly detection", torch.is_anomaly_enabled, torch.set_anomaly_enabled
    for device in AUTOCAST:
        yield (
            f"torch.autocast({device!r})",
            partial(torch.is_autocast_enabled, device),
            partial(torch.set_autocast_enabled, device),
        )


def _depths() -> Iterator[tuple[str, Callable[[], int], Callable[[], str]]]:
    """Yield for each kind of mode: its name, its depth, a function that leaves the innermost one and returns its name.

    None of this is public in torch: a version that lacks one of these functions must not break every cell.
    """
    torch: Any = sys.modules.get("torch")
    core: Any = getattr(torch, "_C", None)
    functorch: Any = getattr(core, "_functorch", None)
    compiler: Any = getattr(getattr(core, "_dynamo", None), "eval_frame", None)
    if hasattr(core, "_len_torch_dispatch_stack"):
        pop = core._pop_torch_dispatch_stack  # noqa: SLF001
        yield "modes", core._len_torch_dispatch_stack, lambda: type(pop(None)).__name__  # noqa: SLF001
    if hasattr(core, "_len_torch_function_stack"):
        pop_function = core._pop_torch_function_stack  # noqa: SLF001
        yield "function modes", partial(_function_modes, torch), lambda: type(pop_function()).__name__
    if hasattr(functorch, "get_dynamic_layer_stack_depth"):
        depth, leave_to = functorch.get_dynamic_layer_stack_depth, functorch.pop_dynamic_layer_stack_and_undo_to_depth
        yield "transforms", depth, lambda: leave_to(depth() - 1) or "a transform of torch.func"
    if hasattr(compiler, "set_eval_frame"):
        yield "torch.compile", partial(_is_compiling, compiler), partial(_leave_compiler, compiler)


def _function_modes(torch: Any) -> int:
    """Return how many function modes are active beside that of ``torch.set_default_device``, which is the outermost."""
    count: int = torch._C._len_torch_function_stack()  # noqa: SLF001
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # noqa: SLF001
    return count - 1 if count and torch._C._get_function_stack_at(0) is default else count  # noqa: SLF001


def _is_compiling(compiler: Any) -> int:
    hook = compiler.set_eval_frame(None)
    compiler.set_eval_frame(hook)
    return int(hook is not None)


def _leave_compiler(compiler: Any) -> str:
    compiler.set_eval_frame(None)
    return "torch.compile"
