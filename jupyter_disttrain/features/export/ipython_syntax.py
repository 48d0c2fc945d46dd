"""Replace IPython syntax in a cell with Python.

Covers: magics and shell lines that have an equivalent in a script; the others raise an error with name and line.
Does not cover: the rest of a cell (``cells``).
"""

from __future__ import annotations

import ast
import os
import re
import textwrap

from IPython.core.inputtransformer2 import TransformerManager

from ...errors import UsageError

# Magics that only observe the statement they run, those of them that take options before it, and those without effect
# outside a notebook.
_WRAPPERS = {"time", "timeit", "prun", "capture", "memit", "mprun", "lprun"}
_WITH_OPTIONS = _WRAPPERS - {"time"}
_OF_NOTEBOOKS = {"matplotlib", "load_ext", "reload_ext", "config", "autoreload", "aimport", "pylab", "precision"}
_OPTIONS = re.compile(r"^(\s*-\w+(\s+\d+)?)+\s*")
_EXPANDED = re.compile(r"\{[^{}]+\}|\$(?P<name>[A-Za-z_]\w*)")


def to_python(code: str, title: str) -> str:
    """Return a cell's code with Python in place of IPython syntax.

    Raises
    ------
    UsageError
        If it is not valid Python, or has no equivalent in a script; ``title`` names the cell.
    """
    source = TransformerManager().transform_cell(code)
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise UsageError(f"{title} is not valid Python at line {error.lineno}: {error.msg}") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_of_ipython(node)]
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = [(node, _Magic(node, title, is_statement=id(node) in alone).python()) for node in calls]
    for node, text in sorted(found, key=lambda each: (each[0].lineno, each[0].col_offset), reverse=True):
        source = replaced(source, node, text)
    return source


def _is_of_ipython(node: ast.Call) -> bool:
    function = node.func
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Call)
        and getattr(function.value.func, "id", "") == "get_ipython"
    )


class _Magic:
    """A call of ``get_ipython()``, to which IPython translates a magic or a shell line."""

    def __init__(self, node: ast.Call, title: str, *, is_statement: bool) -> None:
        assert isinstance(node.func, ast.Attribute)
        self._place = f"{title}, line {node.lineno}"
        self._what = node.func.attr
        values = [argument.value if isinstance(argument, ast.Constant) else None for argument in node.args]
        if None in values:
            raise UsageError(f"{self._place}: get_ipython() is not available in a script; leave it out")
        self._texts = [str(value) for value in values]
        self._is_statement = is_statement

    def python(self) -> str:
        """Return the equivalent code for a script."""
        text = self._texts[0]
        if self._what == "system":
            return f'__import__("subprocess").run({self._plain(text)!r}, shell=True, check=False)'
        if self._what == "getoutput":
            how = "shell=True, check=False, capture_output=True, text=True"
            return f'__import__("subprocess").run({self._plain(text)!r}, {how}).stdout.splitlines()'
        if self._what == "run_cell_magic":
            return self._cell_magic(*self._texts)
        if self._what == "run_line_magic":
            return self._line_magic(text, self._texts[1] if len(self._texts) > 1 else "")
        raise UsageError(f"{self._place}: get_ipython().{self._what} is not available in a script; leave it out")

    def _plain(self, text: str) -> str:
        """Return the text unchanged; raises an error if IPython would expand variables in it."""
        for match in _EXPANDED.finditer(text):
            if match["name"] is None or match["name"] not in os.environ:
                raise UsageError(
                    f"{self._place}: IPython replaces {match.group()} with a value, and a script does not; "
                    "write it in Python, e.g. with subprocess.run or os.environ"
                )
        return text

    def _line_magic(self, name: str, rest: str) -> str:
        if name in _OF_NOTEBOOKS and self._is_statement:
            return f"pass  # %{name} {rest}".rstrip()
        if name in _WRAPPERS and self._is_statement:
            statement = (_OPTIONS.sub("", rest) if name in _WITH_OPTIONS else rest).strip()
            if _is_python(statement):
                return statement or "pass"
        if name == "env" and self._is_statement and "=" in rest:
            key, _, value = rest.partition("=")
            return f'__import__("os").environ[{key.strip()!r}] = {self._plain(value.strip())!r}'
        if name == "cd" and self._is_statement and rest.strip() and not rest.strip().startswith("-"):
            return f'__import__("os").chdir(__import__("os").path.expanduser({self._plain(rest.strip())!r}))'
        raise self._refusal(f"%{name}")

    def _cell_magic(self, name: str, line: str, body: str) -> str:
        rest = _OPTIONS.sub("", line).strip() if name in _WITH_OPTIONS else line.strip()
        if name in _WRAPPERS and not rest:
            return to_python(body, self._place).rstrip("\n")
        if name == "writefile":
            mode, _, path = line.strip().rpartition(" ")
            if mode in ("", "-a"):
                kind = "a" if mode else "w"
                return f'__import__("pathlib").Path({self._plain(path)!r}).open({kind!r}).write({body!r})'
        if name in ("bash", "sh") and not line.strip():
            return f'__import__("subprocess").run([{name!r}, "-c", {body!r}], check=True)'
        raise self._refusal(f"%%{name} {line}".rstrip())

    def _refusal(self, magic: str) -> UsageError:
        return UsageError(f"{self._place}: {magic} is not available in a script; run the cell without it")


def _is_python(statement: str) -> bool:
    try:
        ast.parse(statement)
    except SyntaxError:
        return False
    return True


def replaced(source: str, node: ast.expr | ast.stmt, text: str) -> str:
    """Return code with a part of it replaced by ``text``."""
    lines = source.split("\n")
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    before = lines[first].encode()[: node.col_offset].decode()
    after = lines[last].encode()[node.end_col_offset :].decode()
    if "\n" in text:
        text = textwrap.indent(text, " " * len(before)).lstrip()
    lines[first : last + 1] = [f"{before}{text}{after}"]
    return "\n".join(lines)
