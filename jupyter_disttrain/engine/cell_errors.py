"""What the reply says of a cell that failed.

Covers: the line of the cell, the traceback without this package's frames, the time.
Does not cover: comparing the failures of several ranks (``cluster.cell_run``).
"""

from __future__ import annotations

import builtins
import time
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .shell import RankShell

_GROUPS: Any = getattr(builtins, "BaseExceptionGroup", ())  # Python 3.10 has none
TEXT_LIMIT = 20_000  # characters of an error's text, and of each part of its traceback


class InputOnRankError(RuntimeError):
    """Something on a rank asked a person."""

    def __init__(self, question: str) -> None:
        debugger = question.startswith("breakpoint")
        remedy = (
            "print what you need, or call the function in the notebook after %dist_pull of its arguments"
            if debugger
            else "ask in a notebook cell of its own, then %dist_push the answer"
        )
        super().__init__(f"{question} can't be answered on a rank; {remedy}")


def complete(reply: dict[str, Any], shell: RankShell, lines_before: int) -> None:
    """Add the line, the time and a plain traceback to an error reply."""
    error, shell.last_error = shell.last_error, None
    reply["time_s"] = time.time()
    reply["line"] = None
    if error is None:
        return
    reply["line"] = cell_line(error, lines_before)
    reply["evalue"] = _shorten(_text_of(error))
    reply["traceback"] = [_shorten(part) for part in reply["traceback"]]


def _text_of(error: BaseException) -> str:
    """Return the error's text; an error that fails to tell it must not cost the reply."""
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001  (the user's own __str__ may raise anything)
        return f"<its __str__ raised {type(failure).__name__}>"


def _shorten(text: str) -> str:
    """Leave out the middle of what nobody could read."""
    if len(text) <= TEXT_LIMIT:
        return text
    half = TEXT_LIMIT // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} characters left out … {text[-half:]}"


def group_traceback(error: BaseException) -> list[str] | None:
    """Return the traceback of an error in which an exception group takes part, from the cell's own frame on."""
    links = [error]
    while links[-1].__context__ is not None:
        links.append(links[-1].__context__)
    if not any(isinstance(link, _GROUPS) for link in links):
        return None
    for link in links:
        own = link.__traceback__
        while own is not None and "ipykernel_" not in own.tb_frame.f_code.co_filename:
            own = own.tb_next
        link.__traceback__ = own or link.__traceback__
    return "".join(traceback.format_exception(error)).splitlines()


def cell_line(error: BaseException, lines_before: int) -> int | None:
    """Return the line of the cell that ran at which ``error`` came up, None where it has none.

    A function that another cell defined has lines of its own; what counts is the line here that called it.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.lineno is not None]
    own = next((frame.filename for frame in frames if "ipykernel_" in frame.filename), None)
    lines = [frame.lineno for frame in frames if frame.filename == own and frame.lineno is not None]
    if lines:
        return lines[-1] + lines_before
    # Only code that could not even be compiled has no frame.
    return error.lineno + lines_before if isinstance(error, SyntaxError) and error.lineno else None
