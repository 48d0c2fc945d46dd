"""How much is measured in one run.

Covers: repetitions, numbers of ranks, the environment that both sides get.
Does not cover: the aims (``targets``).
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Repetitions of each measure; the yardstick gets as many, in turns."""

    ranks: tuple[int, ...] = (2, 4)
    starts: int = 5
    passes: int = 100
    many_ranks: int = 64
    many_passes: int = 30
    first_lines: int = 20
    floods: int = 5
    lines_per_rank: int = 10_000
    transfers: int = 5
    tensor_elements: int = 25_000_000  # float32: 100 MB
    loops: int = 9
    peer_loops: int = 3  # nobody is held to a peer's loop within a few per cent, and each takes as long as ours

    @classmethod
    def quick(cls, ranks: tuple[int, ...]) -> Plan:
        """Return a plan that shows that everything runs; its figures are too few to quote."""
        return cls(
            ranks=ranks, starts=1, passes=10, many_passes=5, first_lines=3, floods=1, transfers=1, loops=1, peer_loops=1
        )

    def environment(self, ranks: int) -> dict[str, str]:
        """Return the variables that every contender and torchrun get alike."""
        cores = len(os.sched_getaffinity(0))
        return {"OMP_NUM_THREADS": str(max(1, cores // ranks))}
