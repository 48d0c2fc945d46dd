"""How a script can end that is no error of its code.

Covers: what is raised then.
Does not cover: running scripts (``script``, ``programs``).
"""

from __future__ import annotations


class ScriptError(Exception):
    """A script can't be run, or has ended with an exit code of its own."""

    def _render_traceback_(self) -> list[str]:
        """Return one line: no code of the person's is at fault."""
        return [f"{type(self).__name__}: {self}"]


class ScriptExit(ScriptError):  # noqa: N818  (SystemExit is not called an error either)
    """A script has ended with an exit code other than 0."""
