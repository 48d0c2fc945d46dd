"""Find the line at which code can stop for a breakpoint.

Does not cover: the files of cells (``notebook.debugged_cells``), stopping there (``rank.tracer``).
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


def line_of_statement(code: str, line: int) -> int:
    """Return the line at which code can stop for a breakpoint: that of the statement there, or of the next one."""
    try:
        tree = ast.parse(code)
    except SyntaxError:  # e.g. of magics
        return line
    spans = list(_spans(tree.body))
    inside = [start for start, end in spans if start <= line <= end]
    after = [start for start, _ in spans if start > line]
    return max(inside) if inside else min(after, default=line)


def _spans(statements: Iterable[Any]) -> Iterable[tuple[int, int]]:
    """Yield the first and the last line of each statement; of a compound one, the lines before its body."""
    for each in statements:
        blocks = [block for name in ("body", "orelse", "finalbody") for block in [getattr(each, name, None)] if block]
        handlers = getattr(each, "handlers", [])
        yield each.lineno, max(each.lineno, blocks[0][0].lineno - 1) if blocks else each.end_lineno
        for block in blocks:
            yield from _spans(block)
        for handler in handlers:
            yield from _spans(handler.body)
        for case in getattr(each, "cases", []):
            yield from _spans(case.body)
