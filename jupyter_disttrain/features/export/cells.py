"""Convert a cell to a part of a script.

Covers: its names, its imports from ``__future__``, cells for some ranks, code that can't be part of a script.
Does not cover: the script around it (``template``).
"""

from __future__ import annotations

import ast
import re
import symtable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from IPython.core.inputtransformer2 import TransformerManager

from ...errors import UsageError
from ...protocol.ranks import label_ranks
from ...source_imports import imported

if TYPE_CHECKING:
    from ...client.cells.history import CellEntry


RANK = "_disttrain_rank"  # the rank, in a script whose cells may set ``rank``
_OF_NOTEBOOKS = {"matplotlib", "load_ext", "reload_ext", "config", "autoreload", "aimport", "pylab", "precision"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell as Python code."""

    title: str  # the cell's prompt, or the magic it replaces
    source: str
    ranks: tuple[int, ...]
    names: frozenset[str]  # global names that it reads
    sets: frozenset[str]  # global names that it sets
    future: tuple[str, ...]  # its imports from __future__, which have to come first in a script
    makes_group: bool  # calls init_process_group
    imports: frozenset[str]  # top-level modules: "horovod" for horovod.torch

    def text(self, world_size: int) -> str:
        """Return its lines in a script of ``world_size`` ranks."""
        if len(self.ranks) == world_size:
            return f"# {self.title}\n{self.source}"
        return f"# {self.title}, on {label_ranks(self.ranks)}\nif {RANK} in {set(self.ranks)}:\n{indented(self.source)}"


def read_cell(ran: CellEntry) -> Cell:
    """Parse a cell that ran.

    Raises
    ------
    UsageError
        If something in it needs IPython; the message names the cell, the line and what it is.
    """
    title = f"In [{ran.execution_count}]"
    source = _to_python(re.sub(r"\A\s*#%%(distributed|rank)\b.*\n?", "", ran.code), title)
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "get_ipython":
            raise UsageError(f"{title}, line {node.lineno}: get_ipython() is not available in a script; leave it out")
    future = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    calls = {_last_name(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    reads, sets = _names(source)
    for node in reversed(future):
        source = _replaced(source, node, "pass")
    try:
        compile(source, title, "exec", dont_inherit=True)
    except SyntaxError as error:
        if "outside" in error.msg:
            raise UsageError(
                f"{title} awaits outside a function at line {error.lineno}, which a script can't do; use "
                "asyncio.run(...) there"
            ) from None
    return Cell(
        title=title,
        source=source.strip("\n") if tree.body else f"{source.rstrip()}\npass".lstrip(),
        ranks=ran.ranks,
        names=reads,
        sets=sets,
        future=tuple(alias.name for node in future for alias in node.names),
        makes_group="init_process_group" in calls,
        imports=frozenset(name.partition(".")[0] for name in imported(source, "")),
    )


def _to_python(code: str, title: str) -> str:
    """Return a cell's code without magics; refuse those that have an effect."""
    source = TransformerManager().transform_cell(code)
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise UsageError(f"{title} is no Python at line {error.lineno}: {error.msg}") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _last_name(node.func) in _MAGICS]
    for node in sorted(calls, key=lambda call: call.lineno, reverse=True):
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "get_ipython()":
            source = _replaced(source, node, _without_magic(node, f"{title}, line {node.lineno}"))
    return source


# Methods of get_ipython() to which IPython translates magics and shell lines, and how the user wrote these.
_MAGICS = {"run_line_magic": "%", "run_cell_magic": "%%", "system": "!", "getoutput": "!"}


def _without_magic(node: ast.Call, place: str) -> str:
    name, *texts = *(str(getattr(argument, "value", "")) for argument in node.args), ""
    method = _last_name(node.func)
    if name == "time" and method == "run_line_magic":
        with suppress(SyntaxError):
            ast.parse(texts[0])
            return texts[0] or "pass"
    if method == "run_cell_magic" and name == "time" and not texts[0].strip():
        return _to_python(texts[1], place).rstrip("\n")
    if method == "run_line_magic" and name in _OF_NOTEBOOKS:
        return f"None  # %{name} {texts[0]}"  # also valid as a value
    raise UsageError(f"{place}: {_MAGICS[method]}{name} means nothing in a script; write it in Python or leave it out")


def _replaced(source: str, node: ast.expr | ast.stmt, text: str) -> str:
    """Return code with a part of it replaced by ``text``."""
    lines = source.split("\n")
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    before = lines[first].encode()[: node.col_offset].decode()
    after = lines[last].encode()[node.end_col_offset :].decode()
    lines[first : last + 1] = [f"{before}{text}{after}"]
    return "\n".join(lines)


def _last_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _names(source: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the global names that code reads, and those that it sets."""
    reads, sets = set[str](), set[str]()
    tables = [symtable.symtable(source, "cell", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if table.get_type() == "module" or symbol.is_global():
                reads |= {symbol.get_name()} if symbol.is_referenced() else set()
                sets |= {symbol.get_name()} if symbol.is_assigned() or symbol.is_imported() else set()
    return frozenset(reads), frozenset(sets)


def indented(source: str) -> str:
    """Indent code, except for lines inside string literals."""
    strings = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Constant, ast.JoinedStr))]
    inside = {line for node in strings for line in range(node.lineno + 1, (node.end_lineno or 0) + 1)}
    lines = enumerate(source.split("\n"), 1)
    return "\n".join(line if number in inside or not line.strip() else f"    {line}" for number, line in lines)
