"""Reset torch's switches and random numbers for a script, and restore them after it.

Covers: as in a new process while it runs, restored after it.
Does not cover: what an interrupt leaves (``rank.interrupts.torch_flags``), the process group
(``rank.process_group.group``).
"""

from __future__ import annotations

import functools
import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Switch = tuple[str, Callable[[], Any], Callable[[Any], Any]]

TORCH_SEED = 67280421310721  # torch's default in a new process: c10/core/GeneratorImpl.h, default_rng_seed_val
AUTOCAST = ("cpu", "cuda")  # devices whose autocast is restored

_usual: dict[str, Any] = {}  # state of each switch when the rank was started


def note_switches() -> None:
    """Record the current switches as those of a new process."""
    torch = sys.modules.get("torch")
    if torch is not None:
        _usual.update({name: read() for name, read, _ in _switches(torch)})


@contextmanager
def as_in_a_new_process() -> Iterator[None]:
    """Start with torch as it is in a new process; keep the session's switches and random numbers."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices), ExitStack() as stack:
        torch.manual_seed(TORCH_SEED)
        before = [(read, write, read()) for _, read, write in _switches(torch)]
        stack.callback(_set_all, before)
        _set_all([(read, write, _usual[name]) for name, read, write in _switches(torch) if name in _usual])
        stack.enter_context(_interop_threads_bear_it(torch))
        if devices:
            stack.callback(torch.cuda.empty_cache)
            stack.callback(torch.cuda.set_device, devices[0])
        yield


@contextmanager
def _interop_threads_bear_it(torch: Any) -> Iterator[None]:
    """Let a script set the number of interop threads, which torch accepts once in a process.

    The first value stays, because nothing can reset it.
    """
    original = torch.set_num_interop_threads

    @functools.wraps(original)
    def set_num_interop_threads(number: int) -> None:
        try:
            original(number)
        except RuntimeError:
            found = torch.get_num_interop_threads()
            if number < 1:
                raise  # it would fail in a new process too
            if number != found:
                sys.stderr.write(
                    f"torch.set_num_interop_threads({number}) has no effect: torch accepts this once per process, and "
                    f"{found} is set; run the script with --fresh to change it\n"
                )

    torch.set_num_interop_threads = set_num_interop_threads
    try:
        yield
    finally:
        torch.set_num_interop_threads = original


def _set_all(values: Iterable[tuple[Callable[[], Any], Callable[[Any], Any], Any]]) -> None:
    for read, write, value in values:
        if read() != value:
            write(value)


def _switches(torch: Any) -> Iterator[Switch]:
    """Yield each of torch's switches: its name, how it is read and set."""
    yield "dtype", torch.get_default_dtype, torch.set_default_dtype
    yield "device", partial(_default_device, torch), torch.set_default_device
    yield "gradients", torch.is_grad_enabled, torch.set_grad_enabled
    yield "anomalies", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly
    yield "determinism", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    yield "threads", torch.get_num_threads, torch.set_num_threads
    for device in AUTOCAST:
        write = partial(torch.set_autocast_enabled, device)
        yield f"autocast {device}", partial(torch.is_autocast_enabled, device), write
        write = partial(torch.set_autocast_dtype, device)
        yield f"autocast dtype {device}", partial(torch.get_autocast_dtype, device), write
    sharing = torch.multiprocessing
    yield "sharing", sharing.get_sharing_strategy, sharing.set_sharing_strategy
    yield _attribute(torch.backends.mkldnn, "enabled")
    for name in ("benchmark", "deterministic", "enabled"):
        yield _attribute(torch.backends.cudnn, name)
    yield from _precisions(torch)


def _precisions(torch: Any) -> Iterator[Switch]:
    """Yield the precision settings of float32 products.

    Since torch 2.9 each place has a setting of its own, beside the older setting for all. The older one can't be read
    while the two contradict each other, and changes some places when it is written, so these come before it and again
    after it.
    """
    older: Switch = "matmul", partial(_precision, torch), partial(_set_precision, torch)
    if not hasattr(torch.backends, "fp32_precision"):
        yield older
        yield _attribute(torch.backends.cudnn, "allow_tf32")
        return
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    places = (cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn)
    by_place = [_attribute(place, "fp32_precision") for place in places]
    yield from (*by_place, older, *by_place)


def _precision(torch: Any) -> str | None:
    """Return the older setting; None where torch reports that it contradicts the newer ones."""
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:
        return None


def _set_precision(torch: Any, precision: str | None) -> None:
    if precision is not None:
        torch.set_float32_matmul_precision(precision)


def _attribute(holder: Any, name: str) -> Switch:
    return f"{id(holder)} {name}", partial(getattr, holder, name), partial(setattr, holder, name)


def _default_device(torch: Any) -> Any:
    """Return the last argument of ``torch.set_default_device``; None for nothing."""
    device = torch.get_default_device()
    return None if device.type == "cpu" else device
