"""Parse command lines and report results the same way in every benchmark.

Covers: the parser, lists of names, the ``--write`` option, exit on SIGTERM, printing and writing a page.
Does not cover: the options of one benchmark.
"""

from __future__ import annotations

import argparse
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


def make_parser(module: str, docstring: str | None) -> argparse.ArgumentParser:
    """Return the parser of ``python -m module``, described by the first line of the module's docstring."""
    description = (docstring or "").partition("\n")[0]
    return argparse.ArgumentParser(prog=f"python -m {module}", description=description)


def name_list(kind: str, known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return an argparse type that reads names of ``kind`` separated by commas."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown {kind} {name!r}; choose from {', '.join(known)}")
        return names

    return parse


def exit_on_sigterm() -> None:
    """Turn SIGTERM into SystemExit, so that everything that was started is ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def add_write_option(parser: argparse.ArgumentParser, path: Path) -> None:
    """Add ``--write``, which replaces the results file that the documentation quotes."""
    parser.add_argument("--write", action="store_true", help=f"replace benchmarks/results/{path.name}")


def report(text: str, path: Path | None) -> None:
    """Print a page and, if ``path`` is given, write it there."""
    print(text)
    if path is not None:
        path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
