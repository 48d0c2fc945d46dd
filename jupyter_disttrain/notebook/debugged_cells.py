"""Name the files of cells that are debugged.

Covers: which cells are for ranks, their files in the notebook and on ranks.
Does not cover: requests (``debug_requests``), the lines at which they can stop
(``features.debugger.breakpoint_lines``).

ipykernel names the file of a cell by a hash of its text, in a folder of the process. Ranks get another text: the line
of the magic is a comment there.
"""

from __future__ import annotations

import ast
from pathlib import Path

from ipykernel import compiler


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
