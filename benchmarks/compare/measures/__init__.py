"""The measures: one module for each group of rows of the Speed table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import cells, loop, output, transfer

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.compare.plan import Plan
    from benchmarks.lib.session import Session
    from benchmarks.lib.stats import Figures

# What is asked of a session that is up. The others have sessions of their own.
IN_SESSION: dict[str, Callable[[Session, Plan], list[Figures]]] = {
    "pass": cells.passes,
    "first_line": output.first_line,
    "transfer": transfer.both_ways,
    "loop": loop.against_torchrun,
    "lines": output.flood,  # last: it may be what a contender does not survive
}
ALL = ("start", "memory", *IN_SESSION, "many_ranks")
