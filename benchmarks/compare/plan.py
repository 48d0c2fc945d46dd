"""Define how often each measure is repeated in one run.

Covers: repetitions, numbers of ranks, the environment variables that every tool gets.
Does not cover: the targets (targets).
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.lib.environment import core_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Repetitions of each measure; the baseline is measured as often, alternately."""

    ranks: tuple[int, ...] = (2, 4)
    start_ranks: tuple[int, ...] = (8,)  # with these, only the start of our ranks is measured
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
    peer_loops: int = 3  # a peer's loop has no target of a few percent, and takes as long as ours

    @classmethod
    def quick(cls, ranks: tuple[int, ...]) -> Plan:
        """Return a plan that checks that every measure runs; it has too few repetitions for results to quote."""
        return cls(
            ranks=ranks,
            start_ranks=(),
            starts=1,
            passes=10,
            many_passes=5,
            first_lines=3,
            floods=1,
            transfers=1,
            loops=1,
            peer_loops=1,
        )

    def environment(self, ranks: int) -> dict[str, str]:
        """Return the environment variables that every tool and torchrun get."""
        return {"OMP_NUM_THREADS": str(max(1, core_count() // ranks))}
