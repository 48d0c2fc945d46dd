"""Refuse code that prompts the user, with what to do instead.

Covers: debuggers, ``sys.stdin`` in a cell.
Does not cover: ``input()`` and ``getpass()``, for which ipykernel calls its kernel (``kernel``); programs.
"""

from __future__ import annotations

import io
import pdb  # noqa: T100  (it is refused)
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from IPython.core.error import UsageError

from ..output import user_code

if TYPE_CHECKING:
    from collections.abc import Callable


class InputOnRankError(EOFError):
    """Code on a rank prompted the user; it is an EOFError for code that can do without an answer."""

    def __init__(self, question: str, *, is_debugger: bool = False) -> None:
        remedy = (
            "print what you need, or call the function in the notebook after %dist_pull of its arguments"
            if is_debugger
            else "read it in a notebook cell, then send it with %dist_push"
        )
        super().__init__(f"{question} can't be answered on a rank; {remedy}")


def refuse_debugger(name: str) -> Callable[..., NoReturn]:
    """Return a function that refuses to stop in a debugger."""

    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise InputOnRankError(name, is_debugger=True)

    return refuse


def refuse_payload(data: dict[str, Any], **_options: Any) -> NoReturn:
    """Refuse what would fill the notebook's next cell or open an editor: no reply of a rank reaches it."""
    does = "open an editor" if data["source"] == "edit_magic" else "fill a cell of the notebook"
    raise UsageError(f"a rank can't {does}; run this in the notebook, without %%distributed")


def refuse_questions() -> None:
    """Refuse debuggers and reading ``sys.stdin`` from now on."""
    sys.breakpointhook = refuse_debugger("breakpoint()")
    # IPython's debugger and torch's derive from this one. It may be created, as doctest does, but may not prompt.
    pdb.Pdb.set_trace = refuse_debugger("pdb.set_trace()")  # type: ignore[method-assign]
    for name in ("interaction", "run", "runeval", "runcall"):
        setattr(pdb.Pdb, name, refuse_debugger("a debugger"))
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
            raise InputOnRankError("reading sys.stdin")
