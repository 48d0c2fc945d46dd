"""Find the modules that a file may import, from its text."""

from __future__ import annotations

import ast
import warnings
from importlib.util import resolve_name


def parse(content: str | bytes) -> ast.Module:
    """Return the syntax tree of a file; an empty one if it can't be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # e.g. an invalid escape; the rank shows it, if anyone does
            return ast.parse(content)
    except (SyntaxError, ValueError):
        return ast.Module([], [])  # the rank that imports it reports the error


def imported(content: str | bytes | ast.Module, package: str) -> set[str]:
    """Return the names of the modules that a file of ``package`` may import; empty if it can't be parsed."""
    tree = content if isinstance(content, ast.Module) else parse(content)
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            try:
                base = resolve_name("." * node.level + (node.module or ""), package)
            except ImportError:
                continue
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found
