"""Define the errors of a script that are not errors of its code.

Covers: exceptions for them.
Does not cover: running scripts (``in_process``, ``subprocess_run``).
"""

from __future__ import annotations


class ScriptError(Exception):
    """A script can't be run, or has exited with a code of its own."""

    def _render_traceback_(self) -> list[str]:
        """Return one line: no code of the user's is at fault."""
        return [f"{type(self).__name__}: {self}"]


class ScriptExit(ScriptError):  # noqa: N818  (SystemExit is not called an error either)
    """A script has exited with a code other than 0."""
