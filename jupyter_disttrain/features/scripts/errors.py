"""Define the errors with which a rank reports a script.

Covers: a script that can't be run, has failed, was ended, or has exited with a code of its own.
Does not cover: running scripts (``runner``, ``in_own_process``, ``in_session``).
"""

from __future__ import annotations

from typing import Any


class ScriptError(Exception):
    """A script can't be run."""

    def _render_traceback_(self) -> list[str]:
        """Return one line: no code of the user's is at fault."""
        return [f"{type(self).__name__}: {self}"]


class ScriptExit(ScriptError):  # noqa: N818  (SystemExit is not called an error either)
    """A script has exited with a code other than 0."""


class ProgramExit(ScriptExit):
    """A program has exited with a code other than 0, or was killed; ``report`` is part of the cell's reply."""

    def __init__(self, text: str, report: dict[str, Any] | None = None) -> None:
        super().__init__(text)
        self.report = report or {}


class ProgramFailedError(ScriptError):
    """A program has ended with an error of its own, which ``report`` describes: see ``failure_report.report_of``."""

    def __init__(self, report: dict[str, Any]) -> None:
        super().__init__(report["evalue"])
        self.report = report


class ProgramInterrupt(KeyboardInterrupt):
    """A program was interrupted; ``report`` is its own report of the interrupt."""

    def __init__(self, report: dict[str, Any]) -> None:
        super().__init__()
        self.report = report
