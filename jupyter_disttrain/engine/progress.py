"""How far training has come, without a call in the user's code.

Covers: steps of optimizers, samples and waits of DataLoaders.
Does not cover: rates over time (``cluster.telemetry``).
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Mapping
from typing import Any

_SEVERAL = (list, tuple)


class Progress:
    """Counts what torch does in cells. Totals since the rank started; a cell reads them too."""

    def __init__(self) -> None:
        self.steps = 0
        self.samples = 0
        self.data_wait_s = 0.0
        self._by_optimizer: dict[int, int] = {}  # of the cell that runs, by id: the cell keeps them alive
        self._most = 0
        self._counts_batches = False

    def begin_cell(self) -> None:
        """Count the optimizers of this cell anew, and hook into what has been imported meanwhile."""
        self._by_optimizer.clear()
        self._most = 0
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
            batch = original(iterator)
            self.data_wait_s += time.perf_counter() - start
            self.samples += _size(batch)
            return batch

        cls.__next__ = timed


def _size(batch: Any) -> int:
    """Return how many samples a batch holds: the length of the first tensor in it."""
    try:
        while isinstance(batch, (*_SEVERAL, Mapping)) and batch:
            batch = batch[0] if isinstance(batch, _SEVERAL) else next(iter(batch.values()))
        shape = getattr(batch, "shape", None)
        return int(shape[0]) if shape else 1
    except Exception:  # noqa: BLE001  (a batch is of any type, and counting it must not cost the loop)
        return 1
