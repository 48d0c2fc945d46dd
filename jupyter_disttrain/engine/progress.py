"""How far training has come, without a call in the user's code.

Covers: steps of optimizers, samples and waits of DataLoaders; the loop that knows how long it is.
Does not cover: rates over time (``cluster.telemetry``).
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Mapping
from typing import Any

_SEVERAL = (list, tuple)
NOWHERE = (0, 0, 0.0)


class Progress:
    """Counts what torch does in cells. Totals since the rank started; a cell reads them too."""

    def __init__(self) -> None:
        self.steps = 0
        self.samples = 0
        self.data_wait_s = 0.0
        self._by_optimizer: dict[int, int] = {}  # of the cell that runs, by id: the cell keeps them alive
        self._most = 0
        self._counts_batches = False
        self._pass = NOWHERE  # through a DataLoader
        self._began_s = 0.0  # the cell, by the wall clock

    def begin_cell(self) -> None:
        """Count the optimizers of this cell anew, and hook into what has been imported meanwhile."""
        self._by_optimizer.clear()
        self._most = 0
        self._pass = NOWHERE
        self._began_s = time.time()
        if not self._counts_batches and "torch.utils.data.dataloader" in sys.modules:
            self._counts_batches = True
            self._count_batches()

    def count_steps(self) -> None:
        """Be told by torch of every step of every optimizer."""
        from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: PLC0415

        register_optimizer_step_post_hook(self._on_step)

    def _on_step(self, optimizer: Any, _args: Any, _options: Any) -> None:
        """Count a step; of several optimizers, as in a GAN, the one with most steps counts."""
        count = self._by_optimizer.get(id(optimizer), 0) + 1
        self._by_optimizer[id(optimizer)] = count
        if count > self._most:
            self._most = count
            self.steps += 1

    def _count_batches(self) -> None:
        from torch.utils.data.dataloader import _BaseDataLoaderIter  # noqa: PLC0415

        cls: Any = _BaseDataLoaderIter
        original = cls.__next__

        @functools.wraps(original)
        def timed(iterator: Any) -> Any:
            start = time.perf_counter()
            self._pass, before = NOWHERE, self._pass  # it may be at its end
            batch = original(iterator)
            self.data_wait_s += time.perf_counter() - start
            self.samples += _size(batch)
            done = iterator._num_yielded  # noqa: SLF001
            self._pass = done, _length(iterator), before[2] if done > 1 and before[2] else time.monotonic()
            return batch

        cls.__next__ = timed

    @property
    def loop(self) -> tuple[int, int, float]:
        """How often the loop that runs has gone round, how often it will, and when it began, by ``time.monotonic``.

        The outermost bar of tqdm; where there is none, the pass through a DataLoader; else ``NOWHERE``.
        """
        return _outermost_bar(self._began_s) or self._pass


def _outermost_bar(since_s: float) -> tuple[int, int, float] | None:
    """Return how far the first bar has come that was begun after a time and knows its length."""
    module = sys.modules.get("tqdm.std")
    if module is None:
        return None
    try:
        bars = [bar for bar in list(module.tqdm._instances) if not bar.disable and bar.total and bar.start_t >= since_s]  # noqa: SLF001
    except (RuntimeError, AttributeError):
        return None  # one begins or ends at this moment
    if not bars:
        return None
    bar = min(bars, key=lambda each: float(each.start_t))
    return int(bar.n), int(bar.total), time.monotonic() - (time.time() - bar.start_t)


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
