"""Refuse what would read a rank's standard input, and what would fill the notebook's next cell.

Covers: ``sys.stdin`` in a cell, payloads of IPython.
Does not cover: ``input()`` and ``getpass()``, which ask the user (``questions``); programs.
"""

from __future__ import annotations

import io
import sys
from typing import Any, NoReturn

from IPython.core.error import UsageError

from .. import user_code
from .questions import InputOnRankError


def refuse_payload(data: dict[str, Any], **_options: Any) -> NoReturn:
    """Refuse what would fill the notebook's next cell or open an editor: no reply of a rank reaches it."""
    does = "open an editor" if data["source"] == "edit_magic" else "fill a cell of the notebook"
    raise UsageError(f"a rank can't {does}; run this in the notebook, without %%distributed")


def refuse_stdin() -> None:
    """Refuse reading ``sys.stdin`` in cells from now on."""
    source = io.BufferedReader(RefusedInput(0, closefd=False))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(source, "utf-8", "surrogateescape")  # type: ignore[misc]


class RefusedInput(io.FileIO):
    """A rank's standard input: refused in cells; empty for scripts and programs."""

    def readinto(self, buffer: Any) -> int | None:
        """Read into a buffer, as all methods of ``sys.stdin`` do except those that read everything."""
        self._refuse_in_cells()
        return super().readinto(buffer)

    def readall(self) -> bytes:
        """Read everything."""
        self._refuse_in_cells()
        return super().readall()

    def _refuse_in_cells(self) -> None:
        if user_code.is_typed():
            raise InputOnRankError("reading sys.stdin", "use input(), which asks in the notebook")
