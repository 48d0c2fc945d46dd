"""Torch's switches and random numbers while a script runs.

Covers: as in a new process while it runs, as they were after it.
Does not cover: what an interrupt leaves (``switches``), the process group (``process_group``).
"""

from __future__ import annotations

import functools
import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TORCH_SEED = 67280421310721  # of torch's generators in a new process: c10/core/GeneratorImpl.h, default_rng_seed_val
AUTOCAST = ("cpu", "cuda")  # the devices whose autocast is put back

_usual: dict[str, Any] = {}  # how each switch stood when the rank was started


def note_switches() -> None:
    """Take the switches as they are now for those of a new process."""
    torch = sys.modules.get("torch")
    if torch is not None:
        _usual.update({name: read() for name, read, _ in _switches(torch)})


@contextmanager
def as_in_a_new_process() -> Iterator[None]:
    """Begin with torch as it is in a new process; keep the session's switches and random numbers."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices), ExitStack() as stack:
        torch.manual_seed(TORCH_SEED)
        for name, read, write in _switches(torch):
            before = read()
            stack.callback(_set, read, write, before)
            if name in _usual:
                _set(read, write, _usual[name])
        stack.enter_context(_interop_threads_bear_it(torch))
        if devices:
            stack.callback(torch.cuda.empty_cache)
            stack.callback(torch.cuda.set_device, devices[0])
        yield


@contextmanager
def _interop_threads_bear_it(torch: Any) -> Iterator[None]:
    """Let a script set the number of threads between operations, which torch takes once in a process.

    What the first one sets stays, for nothing can put it back.
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
                    f"torch.set_num_interop_threads({number}) changes nothing: this process has {found} for good; "
                    "run the script with --fresh to have it\n"
                )

    torch.set_num_interop_threads = set_num_interop_threads
    try:
        yield
    finally:
        torch.set_num_interop_threads = original


def _set(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> None:
    if read() != value:
        write(value)


def _switches(torch: Any) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
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
    for name in ("benchmark", "deterministic", "enabled"):
        yield _attribute(torch.backends.cudnn, name)
    yield from _precisions(torch)


def _precisions(torch: Any) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    """Yield how exact products of float32 are: since torch 2.9 a name in each place, which the older two don't bear."""
    if not hasattr(torch.backends, "fp32_precision"):
        yield "matmul", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
        yield _attribute(torch.backends.cudnn, "allow_tf32")
        return
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    for place in (cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn):
        yield _attribute(place, "fp32_precision")


def _attribute(holder: Any, name: str) -> tuple[str, Callable[[], Any], Callable[[Any], Any]]:
    return f"{id(holder)} {name}", partial(getattr, holder, name), partial(setattr, holder, name)


def _default_device(torch: Any) -> Any:
    """Return what ``torch.set_default_device`` was given last; None for nothing."""
    device = torch.get_default_device()
    return None if device.type == "cpu" else device
