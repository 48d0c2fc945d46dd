"""Measure one group of rows of the comparison per module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import again, cells, loop, output, transfer

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.compare.plan import Plan
    from benchmarks.lib.session import Session
    from benchmarks.lib.stats import Measurement

# The measures that share one session per tool; the others start sessions themselves.
IN_SESSION: dict[str, Callable[[Session, Plan], list[Measurement]]] = {
    "pass": cells.passes,
    "first_line": output.first_line,
    "transfer": transfer.both_ways,
    "loop": loop.against_torchrun,
    "again": again.again,
    "lines": output.flood,  # last, since a tool may not survive it
}
ALL = ("start", "memory", *IN_SESSION, "many_ranks")
