"""Describe the error of a script for the cell's reply.

Covers: the traceback, the script's line, whether a process group or an interrupt is the cause.
Does not cover: running the script (``in_own_process``), the reply (``rank.kernel.cell_errors``), comparing ranks
(``client.cells.failures``).
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import IPython

from ...rank.kernel import tracebacks
from ...rank.kernel.cell_errors import as_interrupt, cell_line, interrupt_behind
from ...rank.libraries import gpu_errors
from ...rank.libraries.framework_checks import hint
from ...rank.process_group.errors import is_of_group
from ...rank.user_code import script_name

if TYPE_CHECKING:
    from collections.abc import Mapping

THEMES_SINCE = 9  # IPython's version


def report_of(error: BaseException, shown: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a cell's reply for a script's error; ``shown`` is from :func:`how_shown`."""
    shell = _Shell(shown)
    report = tracebacks.report(error, shell)
    lines, text = report.lines, report.text
    advice = hint(error, text) or gpu_errors.advice(error, text, in_program=True)
    if advice:
        lines, text = [*lines, advice], f"{text}; {advice}"
    return _place(error) | {
        "ename": type(error).__name__,
        "evalue": "" if isinstance(error, KeyboardInterrupt) else text,
        "traceback": lines,
        "details": report.details,
        "raised_at": report.raised_at,
        "group_error": "torch.distributed" in sys.modules and is_of_group(error),
    }


def report_of_interrupt(end: SystemExit, shown: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries for the interrupt that led to an exit; empty if none did."""
    interrupt = interrupt_behind(end)
    if interrupt is None:
        return {}
    lines = as_interrupt(end, _Shell(shown))
    return _place(interrupt) | {"ename": "KeyboardInterrupt", "evalue": "", "traceback": lines}


def how_shown(shell: Any) -> dict[str, Any]:
    """Return the settings of a rank's shell that decide how tracebacks look."""
    name = "theme_name" if IPython.version_info[0] >= THEMES_SINCE else "color_scheme"
    return {"colours": {name: shell.colors}, "mode": shell.InteractiveTB.mode}


def _place(error: BaseException) -> dict[str, Any]:
    line = cell_line(error)
    return {"time_s": time.time(), "line": line, "file": script_name() if line else ""}


class _Shell:
    """The part of a shell that formats tracebacks."""

    def __init__(self, shown: Mapping[str, Any]) -> None:
        self.compile = SimpleNamespace(format_code_name=lambda _name: None)  # there is no code of cells
        from IPython.core import ultratb  # noqa: PLC0415  (hidden from the script until then)

        options = dict(shown["colours"])
        self.InteractiveTB = ultratb.FormattedTB(mode=shown["mode"], tb_offset=0, **options)
        self.SyntaxTB = ultratb.SyntaxTB(**options)
        tracebacks.trim_all(self.InteractiveTB)

    def is_of_code(self, error: BaseException) -> bool:
        """Whether code that ran has raised an error, rather than the compiler that read the script."""
        return not isinstance(error, SyntaxError) or cell_line(error) != error.lineno
