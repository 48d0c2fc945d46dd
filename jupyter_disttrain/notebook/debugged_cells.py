"""Name the files of cells that are debugged, and find the lines at which they can stop.

Covers: which cells are for ranks, their files in the notebook and on ranks, the statement at a line.
Does not cover: requests (``debug_requests``).

ipykernel names the file of a cell by a hash of its text, in a folder of the process. Ranks get another text: the line
of the magic is a comment there.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ipykernel import compiler

if TYPE_CHECKING:
    from collections.abc import Iterable


def magic_call(code: str) -> tuple[str, str, str] | None:
    """Return the name, the line and the body of a cell for ranks, from IPython's transformed code."""
    try:
        body = ast.parse(code).body
    except SyntaxError:
        return None
    if len(body) != 1 or not isinstance(body[0], ast.Expr) or not isinstance(body[0].value, ast.Call):
        return None
    call = body[0].value
    texts = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    is_magic = isinstance(call.func, ast.Attribute) and call.func.attr == "run_cell_magic" and len(texts) == 3  # noqa: PLR2004
    if not is_magic or texts[0] not in ("distributed", "rank"):
        return None
    return texts[0], texts[1], texts[2]


def text_of(path: str) -> str:
    """Return the text of a file; empty if it can't be read, e.g. because it is on another host."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def write_cell(code: str) -> str:
    """Write a cell's text where ipykernel does, and return the path."""
    path = Path(compiler.get_file_name(code))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text(code, encoding="utf-8")
    return str(path)


def file_on_ranks(code: str) -> str:
    """Return the name of the file by which ranks know a cell's code; their folders differ."""
    return Path(compiler.get_file_name(code)).name


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
