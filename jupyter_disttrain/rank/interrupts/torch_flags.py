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
            is_deeper = name in self._found and depth() > self._found[name]
            left = leave(self._found[name]) if is_deeper else []
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


# None of what follows is public in torch: a version that lacks one of these functions must not break every cell.


def _depths() -> Iterator[tuple[str, Callable[[], int], Callable[[int], list[str]]]]:
    """Yield for each kind of mode: its name, its depth, a function that leaves deeper ones and returns their names."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    core = torch._C  # noqa: SLF001
    functorch: Any = getattr(core, "_functorch", None)
    compiler: Any = getattr(getattr(core, "_dynamo", None), "eval_frame", None)
    if hasattr(core, "_len_torch_dispatch_stack"):
        yield "modes", core._len_torch_dispatch_stack, partial(_leave_modes, core)  # noqa: SLF001
    if hasattr(core, "_len_torch_function_stack"):
        yield "function modes", core._len_torch_function_stack, partial(_leave_function_modes, torch)  # noqa: SLF001
    if hasattr(functorch, "get_dynamic_layer_stack_depth"):
        yield "transforms", functorch.get_dynamic_layer_stack_depth, partial(_leave_transforms, functorch)
    if hasattr(compiler, "set_eval_frame"):
        yield "torch.compile", partial(_is_compiling, compiler), partial(_leave_compiler, compiler)


def _leave_modes(core: Any, depth: int) -> list[str]:
    left = []
    while core._len_torch_dispatch_stack() > depth:  # noqa: SLF001
        left.append(type(core._pop_torch_dispatch_stack(None)).__name__)  # noqa: SLF001
    return left


def _leave_function_modes(torch: Any, depth: int) -> list[str]:
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)  # noqa: SLF001  (of set_default_device)
    core, left = torch._C, []  # noqa: SLF001
    while (now := core._len_torch_function_stack()) > depth:  # noqa: SLF001
        if core._get_function_stack_at(now - 1) is default:  # noqa: SLF001
            break
        left.append(type(core._pop_torch_function_stack()).__name__)  # noqa: SLF001
    return left


def _leave_transforms(functorch: Any, depth: int) -> list[str]:
    functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
    return ["a transform of torch.func"]


def _is_compiling(compiler: Any) -> int:
    hook = compiler.set_eval_frame(None)
    compiler.set_eval_frame(hook)
    return int(hook is not None)


def _leave_compiler(compiler: Any, _depth: int) -> list[str]:
    compiler.set_eval_frame(None)
    return ["torch.compile"]
