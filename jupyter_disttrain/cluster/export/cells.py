"""A cell as Python that no IPython has to read.

Covers: magics, shell commands, cells for some ranks, what can't be said without IPython.
Does not cover: the script around it (``frame``).
"""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tokenize
from dataclasses import dataclass
from typing import TYPE_CHECKING

from IPython.core.inputtransformer2 import TransformerManager

from ...errors import UsageError
from ...ranks import label_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..journal import Ran

# Magics that only look on while their statement runs, and those that mean nothing outside a notebook.
_WRAPPERS = {"time", "timeit", "prun", "capture", "memit", "mprun", "lprun"}
_OF_NOTEBOOKS = {"matplotlib", "load_ext", "reload_ext", "config", "autoreload", "aimport", "pylab", "precision"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell as Python."""

    title: str  # which it is
    source: str
    ranks: tuple[int, ...]
    names: frozenset[str]  # that it reads
    future: tuple[str, ...]  # its imports from __future__, which have to stand first in a script
    makes_group: bool  # it calls init_process_group
    ends_group: bool

    def text(self, world_size: int) -> str:
        """Return its lines in a script of ``world_size`` ranks."""
        if len(self.ranks) == world_size:
            return f"# {self.title}\n{self.source}"
        which = f"rank == {self.ranks[0]}" if len(self.ranks) == 1 else f"rank in {set(self.ranks)}"
        return f"# {self.title}, on {label_ranks(self.ranks)}\nif {which}:\n{indented(self.source)}"


def read_cell(ran: Ran) -> Cell:
    """Read a cell that ran.

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
            raise UsageError(f"{title}, line {node.lineno}: get_ipython() means nothing in a script; leave it out")
    for node in _at_top(tree):
        if isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)):
            raise UsageError(
                f"{title} awaits outside a function at line {node.lineno}, which a script can't; "
                "write asyncio.run(...) there"
            )
    future = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    calls = {_last_name(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return Cell(
        title=title,
        source=_without(source, future).strip("\n") or "pass",
        ranks=ran.ranks,
        names=frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)),
        future=tuple(alias.name for node in future for alias in node.names),
        makes_group="init_process_group" in calls,
        ends_group="destroy_process_group" in calls,
    )


def _last_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _at_top(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that are in no function."""
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from _at_top(child)


def _without(source: str, statements: list[ast.ImportFrom]) -> str:
    lines = source.split("\n")
    for node in statements:
        for at in range(node.lineno - 1, node.end_lineno or node.lineno):
            lines[at] = ""
    return "\n".join(lines)


def _to_python(code: str, title: str) -> str:
    """Return a cell's code with Python in the place of what only IPython reads."""
    source = TransformerManager().transform_cell(code)
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise UsageError(f"{title} is no Python at line {error.lineno}: {error.msg}") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_of_ipython(node)]
    found = [(node, _replacement(node, title, _stands_alone(tree, node))) for node in calls]
    for node, text in sorted(found, key=lambda each: (each[0].lineno, each[0].col_offset), reverse=True):
        source = _replaced(source, node, text)
    return source


def _is_of_ipython(node: ast.Call) -> bool:
    function = node.func
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Call)
        and getattr(function.value.func, "id", "") == "get_ipython"
    )


def _stands_alone(tree: ast.AST, call: ast.Call) -> bool:
    return any(isinstance(node, ast.Expr) and node.value is call for node in ast.walk(tree))


def _replacement(node: ast.Call, title: str, is_statement: bool) -> str:
    assert isinstance(node.func, ast.Attribute)
    what = node.func.attr
    words = [argument.value if isinstance(argument, ast.Constant) else None for argument in node.args]
    texts = [str(word) for word in words]
    if None in words:
        raise UsageError(f"{title}, line {node.lineno}: get_ipython() means nothing in a script; leave it out")
    if what == "system":
        return f'__import__("subprocess").run({texts[0]!r}, shell=True, check=False)'
    if what == "getoutput":
        run = f'__import__("subprocess").run({texts[0]!r}, shell=True, check=False, capture_output=True, text=True)'
        return f"{run}.stdout.splitlines()"
    if what == "run_cell_magic":
        return _cell_magic(texts, title, node)
    if what == "run_line_magic":
        return _line_magic(texts, title, node, is_statement)
    raise UsageError(f"{title}, line {node.lineno}: get_ipython().{what} means nothing in a script; leave it out")


def _line_magic(texts: list[str], title: str, node: ast.Call, is_statement: bool) -> str:
    name, rest = texts[0], texts[1] if len(texts) > 1 else ""
    if name in _OF_NOTEBOOKS and is_statement:
        return f"pass  # %{name} {rest}".rstrip()
    if name in _WRAPPERS and is_statement:
        statement = re.sub(r"^(\s*-\w+(\s+\d+)?)+\s*", "", rest).strip()
        return statement or "pass"
    if name == "env" and is_statement and "=" in rest:
        key, _, value = rest.partition("=")
        return f'__import__("os").environ[{key.strip()!r}] = {value.strip()!r}'
    if name == "cd" and is_statement:
        return f'__import__("os").chdir({rest.strip()!r})'
    raise UsageError(f"{title}, line {node.lineno}: %{name} means nothing in a script; run the cell without it")


def _cell_magic(texts: list[str], title: str, node: ast.Call) -> str:
    name, line, body = texts
    if name in _WRAPPERS:
        return _to_python(body, title).rstrip("\n")
    if name == "writefile":
        return f'__import__("pathlib").Path({line.strip()!r}).write_text({body!r})'
    if name in ("bash", "sh"):
        return f'__import__("subprocess").run([{name!r}, "-c", {body!r}], check=True)'
    raise UsageError(f"{title}, line {node.lineno}: %%{name} means nothing in a script; run the cell without it")


def _replaced(source: str, node: ast.Call, text: str) -> str:
    lines = source.split("\n")
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    before = lines[first].encode()[: node.col_offset].decode()
    after = lines[last].encode()[node.end_col_offset :].decode()
    if "\n" in text:
        text = textwrap.indent(text, " " * len(before)).lstrip()
    lines[first : last + 1] = [f"{before}{text}{after}"]
    return "\n".join(lines)


def indented(source: str) -> str:
    """Indent code, but not what lies within its texts."""
    inside: set[int] = set()
    starts: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            starts.append(token.start[0])
        elif kind == "FSTRING_END":
            inside.update(range(starts.pop() + 1, token.end[0] + 1))
        elif token.type == tokenize.STRING:
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
    lines = source.split("\n")
    return "\n".join(
        line if number in inside or not line.strip() else f"    {line}" for number, line in enumerate(lines, 1)
    )
