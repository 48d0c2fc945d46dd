"""Collect the metrics that a cell logs with ``log_metrics`` and send them to the nanny.

Covers: taking values without delay, sending them in few messages.
Does not cover: when to send (``sampler``), the file (``metrics_writer``), histories over ranks
(``features.telemetry.client``).
"""

from __future__ import annotations

import operator
import os
import sys
import threading
import time
from collections import deque
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ....protocol.metric_blocks import pack
from ....protocol.time_limits import METRICS_END_SECONDS, SEND_SECONDS
from ....rank.nanny.ipc import ATOMIC_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LIMIT = 10_000  # samples kept until they are sent
MOST_PER_SECOND = 50_000  # samples of all ranks together that a client can process besides its other work
MOST_MESSAGES_PER_SECOND = 100  # of all ranks together: one message costs a client less time than two smaller ones
NAMES = 1000  # limit of metric names in one cell: more most likely means that a varying number is part of the name
BATCH = 500  # samples in one message
SMALL_BYTES = ATOMIC_BYTES - 256  # of a message that Linux sends at once, with its frame
LARGEST_STEP = 2**53  # the largest step that JavaScript and Float64 represent exactly

Sample = tuple[float, "int | None", "int | None", dict[str, Any]]  # time, cell, step, values by name

_current: MetricsLog | None = None


def current() -> MetricsLog | None:
    """Return the log of this process; None if it is not a rank."""
    return _current


class MetricsLog:
    """Keep samples until they are sent.

    ``cell`` returns the kernel's record of the current cell, None while it is idle; ``start`` starts the thread that
    calls :meth:`send`, if it does not run yet. A process that ``may_be_killed`` alone sends small messages only, which
    can't stay incomplete on the rank's socket; a forked child is one.
    """

    def __init__(
        self,
        cell: Callable[[], dict[str, Any] | None],
        send: Callable[[bytes], None],
        start: Callable[[], None],
        *,
        may_be_killed: bool = False,
    ) -> None:
        global _current  # noqa: PLW0603  (a process is one rank)
        _current = self
        self._cell, self._send, self._start = cell, send, start
        self._samples: deque[Sample] = deque()
        self._turns = threading.Lock()  # between the sampler and the end of a cell
        os.register_at_fork(after_in_child=self._after_fork)
        self._is_child = False
        self._may_be_killed = may_be_killed
        self._per_second = MOST_PER_SECOND  # samples that this rank may send
        self.pause_s = SEND_SECONDS  # between two messages while a cell runs
        self._number: int | None = None  # number of the cell that logged last
        self._names: set[str] = set()  # of this cell
        self._refuses_names = False
        self._dropped = 0  # samples of this cell

    def log_metrics(self, step: int | None = None, *unnamed: Any, **values: Any) -> None:
        """Log values of this rank, e.g. ``log_metrics(step, loss=loss)``.

        Returns at once: a tensor on a GPU is copied on its stream and read when the copy is done.

        Parameters
        ----------
        step
            The training step, a whole number; None if there is none.
        **values
            Numbers, or tensors with one element. NaN and infinity are allowed.

        Raises
        ------
        ValueError, TypeError
            If a value has no name or is not a number, or the step is not whole; the call then logs nothing.
        """
        if unnamed:
            raise TypeError(f"log_metrics needs a name for each value, e.g. log_metrics({step!r}, loss={unnamed[0]!r})")
        self.log(step, values)

    def log(self, step: int | None, values: Mapping[str, Any]) -> None:
        """Log values like :meth:`log_metrics`; names may be no identifiers, or "step"."""
        if step is not None:
            step = _whole(step)
        held = {name: _hold(name, value) for name, value in values.items()}
        if not self._names >= held.keys():
            held = self._admit(held)
        if len(self._samples) >= LIMIT:
            self._samples.popleft()
            self._dropped += 1
        cell = self._cell()
        if cell is not None:
            self._number = cell["number"]  # kept, because a thread may outlive the cell that started it
        self._samples.append((time.time(), self._number, step, held))
        if self._is_child:
            self.send(patience_s=1.0)  # a forked child, e.g. a DataLoader worker, has no thread that sends

    def _admit(self, held: dict[str, Any]) -> dict[str, Any]:
        """Accept new names; beyond the limit drop their values, with one warning."""
        self._start()
        for name in held:
            try:
                name.encode()
            except UnicodeEncodeError:
                raise ValueError(f"log_metrics can't use the name {name!r}: it can't be encoded as text") from None
            if len(self._names) < NAMES:
                self._names.add(name)
        refused = held.keys() - self._names
        if refused and not self._refuses_names:
            self._refuses_names = True
            sys.stderr.write(
                f"log_metrics: {min(refused)!r} and further new names are dropped, because this cell has logged "
                f"{NAMES} metrics; put a varying number into the step, not into the name\n"
            )
        return {name: value for name, value in held.items() if name not in refused}

    def _after_fork(self) -> None:
        """Drop a forked child's copy of unsent samples, and its lock, which a thread of the parent may have held."""
        self._turns = threading.Lock()
        self._samples = deque()
        self._is_child = self._may_be_killed = True

    def share(self, ranks: int) -> None:
        """Set this rank's share of the samples and messages per second of all ranks."""
        self._per_second = max(200, MOST_PER_SECOND // ranks)
        self.pause_s = max(SEND_SECONDS, ranks / MOST_MESSAGES_PER_SECOND)

    def send(self, patience_s: float = 0.0, most: int | None = None) -> None:
        """Send samples whose values are known; at most as many as the client can process in ``pause_s``."""
        with self._turns:
            deadline = time.monotonic() + patience_s
            left = int(self._per_second * self.pause_s) if most is None else most
            while left > 0 and (count := self._send_batch(deadline)):
                left -= count

    def end_cell(self) -> None:
        """Send a cell's remaining samples; wait up to ``METRICS_END_SECONDS`` for values from a device."""
        self.send(METRICS_END_SECONDS, LIMIT)
        self._names.clear()  # so that a cell with too many names does not affect the next cell
        self._refuses_names = False
        if self._dropped:
            sys.stderr.write(
                f"log_metrics: {self._dropped:,} calls of this cell were dropped, the earliest first, because they "
                f"came faster than {self._per_second:,} per second; log less often, e.g. every 10 steps\n"
            )
            self._dropped = 0

    def _send_batch(self, deadline: float) -> int:
        """Send up to ``BATCH`` samples of one cell; return how many were sent."""
        samples: list[tuple[float, int | None, dict[str, float]]] = []
        taken: list[Sample] = []
        number: int | None = None
        while self._samples and len(samples) < BATCH:
            sample = self._samples.popleft()  # now, because a thread that logs may drop the first sample
            time_s, cell, step, held = sample
            try:
                values = _read(held, deadline)
            except RuntimeError:
                continue  # the device has failed; the cell's own code raises the error
            if values is None or (samples and cell != number):
                self._samples.appendleft(sample)  # later samples wait too, to keep the order
                break
            number = cell
            samples.append((time_s, step, values))
            taken.append(sample)
        if not samples:
            return 0
        data = pack(samples, number)
        while self._may_be_killed and len(data) > SMALL_BYTES and len(samples) > 1:
            half = len(samples) // 2
            self._samples.extendleft(reversed(taken[half:]))
            samples, taken = samples[:half], taken[:half]
            data = pack(samples, number)
        self._send(data)
        return len(samples)


def _whole(step: Any) -> int:
    try:
        number: int | None = operator.index(step)
    except TypeError:
        number = int(step) if isinstance(step, float) and step.is_integer() else None
    if number is None or abs(number) > LARGEST_STEP:
        raise ValueError(f"the step of log_metrics must be a whole number up to 2**53, not {step!r}")
    return number


def _hold(name: str, value: Any) -> Any:
    """Return a value as a float; for a tensor on a GPU start a copy, because reading it would wait for the GPU."""
    if not hasattr(value, "detach"):
        try:
            return float(value)
        except (TypeError, ValueError):
            kind = f"the text {value!r:.40}" if isinstance(value, str) else f"a {type(value).__name__}"
            raise TypeError(f"log_metrics accepts numbers, but {name} is {kind}") from None
    if value.numel() != 1:
        raise ValueError(f"log_metrics accepts single numbers, but {name} has {value.numel()}; log e.g. {name}.mean()")
    if value.is_complex():
        raise TypeError(f"log_metrics accepts real numbers, but {name} is complex; log e.g. {name}.abs()")
    if hasattr(value, "full_tensor"):  # a DTensor, of which this rank may hold only a part
        raise TypeError(
            f"{name} is sharded over ranks, but log_metrics accepts complete values; log {name}.full_tensor()"
        )
    if value.device.type == "cuda":
        return _OnDevice(value)
    return float(value.detach())


class _OnDevice:
    """A number that is being copied from a GPU."""

    def __init__(self, value: Any) -> None:
        torch: Any = import_module("torch")
        self.number = torch.empty((), dtype=value.dtype, device="cpu", pin_memory=True)
        self.number.copy_(value.detach().reshape(()), non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(value.device))

    def is_there(self) -> bool:
        return bool(self._copied.query())

    def __float__(self) -> float:
        return float(self.number)


def _read(held: Mapping[str, Any], deadline: float) -> dict[str, float] | None:
    """Return the values; None if some are still being copied at the deadline."""
    while not all(value.is_there() for value in held.values() if isinstance(value, _OnDevice)):
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.0005)
    return {name: float(value) for name, value in held.items()}
