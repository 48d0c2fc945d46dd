"""How far training has come, without a call in the user's code.

Covers: steps of optimizers, samples and waits of DataLoaders; the loop that knows how long it is.
Does not cover: rates over time (``cluster.telemetry``).
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SEVERAL = (list, tuple)
Loop = tuple[int, int, float]
NOWHERE: Loop = (0, 0, math.nan)
LEFT_SECONDS, LEFT_ROUNDS = 5.0, 10.0  # without a batch, and in rounds as they were: then the loop was left


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass through a DataLoader; times are those of ``time.monotonic``."""

    done: int = 0
    total: int = 0
    since: float = 0.0
    last: float = 0.0  # when it gave out a batch
    before: int = 0  # batches that were given out before ``since``: another loader's pass may lie between
    iterator: int = 0  # its id

    def as_loop(self) -> Loop:
        """Return how far it has come."""
        if not self.total:
            return NOWHERE
        rounds = self.done - self.before - 1
        round_s = (self.last - self.since) / max(1, rounds)
        if time.monotonic() - self.last > max(LEFT_SECONDS, LEFT_ROUNDS * round_s):
            return NOWHERE
        return self.done, self.total, round_s * (self.total - self.done) if rounds > 0 else math.nan


class Progress:
    """Counts what torch does in cells. Totals since the rank started; a cell reads them too."""

    def __init__(self) -> None:
        self.steps = 0
        self.samples = 0
        self.data_wait_s = 0.0
        self._stepped: set[int] = set()  # optimizers since the last step that was counted, by id
        self._counts_batches = False
        self._pass = Pass()
        self._began_s = 0.0  # the cell, by the wall clock

    def begin_cell(self) -> None:
        """Count the optimizers of this cell anew, and hook into what has been imported meanwhile."""
        self._stepped.clear()
        self._pass = Pass()
        self._began_s = time.time()
        if not self._counts_batches and "torch.utils.data.dataloader" in sys.modules:
            self._counts_batches = True
            self._count_batches()

    def count_steps(self) -> None:
        """Be told by torch of every step of every optimizer."""
        from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: PLC0415

        register_optimizer_step_post_hook(self._on_step)

    def _on_step(self, optimizer: Any, _args: Any, _options: Any) -> None:
        """Count a step; of several optimizers that take turns, as in a GAN, one step each counts as one."""
        if not self._stepped or id(optimizer) in self._stepped:
            self._stepped.clear()
            self.steps += 1
        self._stepped.add(id(optimizer))

    def _count_batches(self) -> None:
        from torch.utils.data.dataloader import _BaseDataLoaderIter  # noqa: PLC0415

        cls: Any = _BaseDataLoaderIter
        original = cls.__next__

        @functools.wraps(original)
        def timed(iterator: Any) -> Any:
            start = time.perf_counter()
            self._pass, before = Pass(), self._pass  # it may be at its end
            batch = original(iterator)
            self.data_wait_s += time.perf_counter() - start
            self.samples += _size(batch)
            done = iterator._num_yielded  # noqa: SLF001
            now = time.monotonic()
            goes_on = done > 1 and before.iterator == id(iterator)
            since, earlier = (before.since, before.before) if goes_on else (now, done - 1)
            self._pass = Pass(done, _length(iterator), since, now, earlier, id(iterator))
            return batch

        cls.__next__ = timed

    @property
    def loop(self) -> Loop:
        """How often the loop that runs has gone round, how often it will, and the seconds left; NaN if not known.

        The outermost bar of tqdm; where there is none, the pass through a DataLoader; else ``NOWHERE``.
        """
        bar, batches = _outermost_bar(self._began_s), self._pass.as_loop()
        if bar is None:
            return batches
        told = _as_loop(bar)
        # A bar around a DataLoader counts only when it is drawn, which may be seldom.
        is_behind = told[1] == batches[1] and told[0] < batches[0] and _is_loader(getattr(bar, "iterable", None))
        return batches if is_behind else told


def _is_loader(value: Any) -> bool:
    module = sys.modules.get("torch.utils.data.dataloader")
    return module is not None and isinstance(value, module.DataLoader)


def _outermost_bar(since_s: float) -> Any | None:
    """Return the first bar that was begun after a time, and is not at its end."""
    module = sys.modules.get("tqdm.std")
    if module is None:
        return None
    try:
        bars = [bar for bar in list(module.tqdm._instances) if not bar.disable and bar.total and bar.start_t >= since_s]  # noqa: SLF001
    except (RuntimeError, AttributeError):
        return None  # one begins or ends at this moment
    bars = [bar for bar in bars if bar.n < bar.total]  # one at its end may not have been closed
    return min(bars, key=lambda each: float(each.start_t), default=None)


def _as_loop(bar: Any) -> Loop:
    done = bar.n - getattr(bar, "initial", 0)  # in this cell: a run that was taken up again does not begin at 0
    left_s = (time.time() - bar.start_t) / done * (bar.total - bar.n) if done > 0 else math.nan
    return int(bar.n), int(bar.total), left_s


def _length(iterator: Any) -> int:
    """Return how many batches there will be; 0 where nobody knows."""
    try:
        return len(iterator)
    except TypeError:
        return 0


def _size(batch: Any) -> int:
    """Return how many samples a batch holds: the length of the first tensor in it."""
    try:
        while isinstance(batch, (*_SEVERAL, Mapping)) and batch:
            batch = batch[0] if isinstance(batch, _SEVERAL) else next(iter(batch.values()))
        shape = getattr(batch, "shape", None)
        return int(shape[0]) if shape else 1
    except Exception:  # noqa: BLE001  (a batch is of any type, and counting it must not cost the loop)
        return 1
