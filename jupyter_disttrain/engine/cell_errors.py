"""What the reply says of a cell that failed.

Covers: the line of the cell, the traceback without this package's frames, the time.
Does not cover: comparing the failures of several ranks (``cluster.cell_run``).
"""

from __future__ import annotations

import builtins
import re
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

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


# What torch and Gloo say when a group's connections end, beside their own types of errors.
_OF_A_GROUP = re.compile(r"gloo/|Connection (was likely )?closed|Connection reset|Socket|NCCL|ProcessGroup|c10d")


def is_of_group(error: BaseException) -> bool:
    """Whether this error, or one that led to it, came out of a process group: it can't be used any more then."""
    import torch.distributed as dist  # noqa: PLC0415  (there is a group, so it is there)

    return any(
        isinstance(link, dist.DistError) or (type(link) is RuntimeError and _OF_A_GROUP.search(str(link)))
        for link in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that led to it."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def complete(reply: dict[str, Any], shell: RankShell, lines_before: int, *, interrupted: bool) -> None:
    """Add the line, the time and a plain traceback to an error reply.

    A collective that was released because the person interrupted the cell ends it like any other interrupt.
    """
    error, shell.last_error = shell.last_error, None
    reply["time_s"] = time.time()
    reply["line"] = None
    if error is None:
        return
    reply["line"] = cell_line(error, lines_before)
    if reply.get("group_error") and interrupted:
        reply |= {"ename": "KeyboardInterrupt", "evalue": "", "traceback": _cut_to_cell(error, shell)}
        return
    reply["evalue"] = _shorten(_text_of(error))
    reply["traceback"] = [_shorten(part) for part in reply["traceback"]]


def leave_out_torch(error: BaseException) -> None:
    """Cut torch's own frames off an interrupt, or off an error of a group: they tell only how it was released.

    They are also slow to show: IPython parses each file that a frame is in, and torch's are long.
    """
    if "torch.distributed" not in sys.modules or not (isinstance(error, KeyboardInterrupt) or is_of_group(error)):
        return
    for link in _chain(error):
        frame = last = link.__traceback__
        while frame is not None:
            if "/torch/" not in frame.tb_frame.f_code.co_filename:
                last = frame
            frame = frame.tb_next
        if last is not None:
            last.tb_next = None


def let_go(error: BaseException) -> None:
    """Empty the frames of an error that was told: IPython keeps it for ``%tb``, and with it every tensor in them."""
    for link in _chain(error):
        traceback.clear_frames(link.__traceback__)
        for frame, _ in traceback.walk_tb(link.__traceback__):
            _ = frame.f_locals  # who showed the traceback has had a copy made, which only this brings up to date


def _cut_to_cell(error: BaseException, shell: RankShell) -> list[str]:
    """Return an interrupt's traceback in the cell's own lines: below them torch only tells how it was released."""
    for link in _chain(error):
        trace = link.__traceback__
        while trace is not None and "ipykernel_" not in trace.tb_frame.f_code.co_filename:
            trace = trace.tb_next
        if trace is None:
            continue
        told = shell.InteractiveTB.structured_traceback(KeyboardInterrupt, KeyboardInterrupt(), trace)
        return [str(line) for line in told]
    return []


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
    for link in _chain(error):
        frames = [frame for frame in traceback.extract_tb(link.__traceback__) if frame.lineno is not None]
        own = next((frame.filename for frame in frames if "ipykernel_" in frame.filename), None)
        lines = [frame.lineno for frame in frames if frame.filename == own and frame.lineno is not None]
        if own is not None:
            return lines[-1] + lines_before
    # Only code that could not even be compiled has no frame.
    return error.lineno + lines_before if isinstance(error, SyntaxError) and error.lineno else None
