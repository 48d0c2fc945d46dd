"""Measure the progress of training, without a call in the user's code.

Covers: steps of optimizers, samples and waits of DataLoaders; the loop whose length is known.
Does not cover: rates over time (``features.telemetry.client``).
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ....protocol.time_limits import SHORTEST_LOOP_SECONDS, SHORTEST_PART_SECONDS
from ....rank.libraries.import_hooks import on_import

if TYPE_CHECKING:
    from ....rank.cell_started import CellStarted

_SEVERAL = (list, tuple)
MOST_ROUNDS = 2**62  # iterations that a loop can be reported to have
DEEPEST_BATCH = 10  # nesting of lists in a batch
LEFT_SECONDS, LEFT_ROUNDS = 5.0, 10.0  # without a batch, also in rounds of the pass: then the loop was left


@dataclass(frozen=True, slots=True)
class Loop:
    """Progress of a loop whose length is known."""

    done: int = 0  # iterations
    total: int = 0
    left_s: float | None = None  # None: not known yet
    passed_s: float = 0.0

    @property
    def is_long(self) -> bool:
        """Whether it takes long enough, at the speed so far, for its progress to be of use.

        The speed of the first iterations may be that of something that is done once.
        """
        left_s = 0.0 if self.passed_s < SHORTEST_PART_SECONDS else self.left_s or 0.0
        return self.passed_s + left_s >= SHORTEST_LOOP_SECONDS


NOWHERE = Loop()


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass through a DataLoader; times are those of ``time.monotonic``."""

    done: int
    total: int
    since: float
    last: float  # time of the last batch
    iterator: weakref.ref[Any]

    @property
    def round_s(self) -> float:
        """Seconds from batch to batch."""
        return (self.last - self.since) / max(1, self.done - 1)

    def as_loop(self) -> Loop:
        """Return the pass's progress."""
        now = time.monotonic()
        is_left = now - self.last > max(LEFT_SECONDS, LEFT_ROUNDS * self.round_s)
        if not self.total or is_left or self.iterator() is None:
            return NOWHERE
        left_s = self.round_s * (self.total - self.done) if self.done > 1 else None
        return Loop(self.done, self.total, left_s, now - self.since)


class Progress:
    """Counts what torch does in cells. Totals since the rank started; a cell reads them too."""

    def __init__(self) -> None:
        self.steps = 0
        self.samples = 0
        self.data_wait_s = 0.0
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers since the last step that was counted
        self._passes: dict[int, Pass] = {}  # by the iterator's id; the outermost comes first
        self._began_s = 0.0  # wall clock at the cell's start

    def reset(self, _started: CellStarted) -> None:
        """Forget the optimizers and loops of earlier cells."""
        self._stepped.clear()
        self._passes.clear()
        self._began_s = time.time()

    def count(self) -> None:
        """Count steps and batches from now on, or from the import of what makes them."""
        on_import("torch.optim.optimizer", lambda module: module.register_optimizer_step_post_hook(self._on_step))
        on_import("torch.utils.data.dataloader", self._count_batches)

    def _on_step(self, optimizer: Any, _args: Any, _options: Any) -> None:
        """Count a step; of several optimizers that take turns, as in a GAN, one step each counts as one."""
        if not self._stepped or optimizer in self._stepped:
            self._stepped.clear()
            self.steps += 1
        self._stepped.add(optimizer)

    def _count_batches(self, module: Any) -> None:
        cls = module._BaseDataLoaderIter  # noqa: SLF001
        original = cls.__next__

        @functools.wraps(original)
        def timed(iterator: Any) -> Any:
            start = time.perf_counter()
            try:
                batch = original(iterator)
            except StopIteration:
                self._passes.pop(id(iterator), None)
                raise
            self.data_wait_s += time.perf_counter() - start
            self.samples += _size(batch)
            done = iterator._num_yielded  # noqa: SLF001
            now = time.monotonic()
            if done == 1:
                self._passes.pop(id(iterator), None)  # of an earlier iterator
            before = self._passes.get(id(iterator))
            since = now if before is None else before.since
            self._passes[id(iterator)] = Pass(done, _length(iterator), since, now, weakref.ref(iterator))
            return batch

        cls.__next__ = timed

    @property
    def loop(self) -> Loop:
        """The outermost bar of tqdm; where there is none, the outermost pass through a DataLoader; else ``NOWHERE``."""
        bar = _outermost_bar(self._began_s)
        loops = (each.as_loop() for each in list(self._passes.values()))
        batches = next((loop for loop in loops if loop is not NOWHERE), NOWHERE)
        if bar is None:
            return batches
        shown = _as_loop(bar)
        # A bar around a DataLoader counts only when it is drawn, which may be rare.
        is_behind = shown.total == batches.total and shown.done < batches.done
        return batches if is_behind and isinstance(bar.iterable, sys.modules["torch.utils.data"].DataLoader) else shown


def _outermost_bar(since_s: float) -> Any | None:
    """Return the first bar that was started after a time, and is unfinished."""
    module = sys.modules.get("tqdm.std")
    if module is None:
        return None
    try:
        bars = [bar for bar in list(module.tqdm._instances) if not bar.disable and bar.total and bar.start_t >= since_s]  # noqa: SLF001
    except (RuntimeError, AttributeError):
        return None  # a bar starts or ends at this moment
    bars = [bar for bar in bars if bar.n < bar.total]  # a finished one may not have been closed
    return min(bars, key=lambda each: float(each.start_t), default=None)


def _as_loop(bar: Any) -> Loop:
    done = bar.n - getattr(bar, "initial", 0)  # only this cell's iterations: a resumed run does not start at 0
    # ``n`` may be a tensor: a user may pass one to ``update``.
    passed_s = time.time() - bar.start_t
    left_s = float(passed_s / done * (bar.total - bar.n)) if done > 0 else None
    return Loop(min(int(bar.n), MOST_ROUNDS), min(int(bar.total), MOST_ROUNDS), left_s, passed_s)


def _length(iterator: Any) -> int:
    """Return the number of batches; 0 where it is unknown."""
    try:
        return min(len(iterator), MOST_ROUNDS)
    except Exception:  # noqa: BLE001  (a sampler may be the user's, and its length must not break the loop)
        return 0


def _size(batch: Any) -> int:
    """Return the number of samples in a batch: the length of the first tensor in it."""
    try:
        for _ in range(DEEPEST_BATCH):
            if not isinstance(batch, (*_SEVERAL, Mapping)) or not batch:
                break
            batch = batch[0] if isinstance(batch, _SEVERAL) else next(iter(batch.values()))
        shape = getattr(batch, "shape", None)
        return int(shape[0]) if shape else 1
    except Exception:  # noqa: BLE001  (a batch is of any type, and counting it must not break the loop)
        return 1
