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

from . import gpu_errors
from .frameworks import hint
from .own_code import is_own, script_name
from .script_errors import ScriptExit
from .untimely import INSTALLED, PACKAGE, STANDARD_LIBRARY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .shell import RankShell

_GROUPS: Any = getattr(builtins, "BaseExceptionGroup", ())  # Python 3.10 has none
TEXT_LIMIT = 20_000  # characters of an error's text, and of each part of its traceback


class InputOnRankError(EOFError):
    """Something on a rank asked a person; who reads input and bears its end, as where there is none, bears this too."""

    def __init__(self, question: str) -> None:
        debugger = question.startswith("breakpoint")
        remedy = (
            "print what you need, or call the function in the notebook after %dist_pull of its arguments"
            if debugger
            else "ask in a notebook cell of its own, then %dist_push the answer"
        )
        super().__init__(f"{question} can't be answered on a rank; {remedy}")


_IN_LIBRARY = re.compile(r"/(torch|horovod)/")  # whose frames tell nothing more of an error of a group


class ReleasedError(RuntimeError):
    """A rank waited for others that will not come, and was released."""


LOST_WORK = (
    "the process groups were aborted while this cell ran, so what collectives on the GPU have written is not valid: do "
    "not use these tensors, or models and optimizers that were updated with them"
)


# What torch and Gloo say when a group's connections end, beside their own types of errors.
_OF_A_GROUP = re.compile(r"gloo/|Connection (was likely )?closed|Connection reset|Socket|NCCL|ProcessGroup|c10d")


# What MPI says when a communicator was revoked or a rank of it died; some collectives give no better reason then.
_OF_MPI = re.compile(r"MPI_ERR_(REVOKED|PROC_FAILED|PROC_FAILED_PENDING|OTHER)\b")


def is_of_group(error: BaseException) -> bool:
    """Whether this error, or one that led to it, came out of a process group or communicator that is of no use now."""
    dist, mpi = sys.modules.get("torch.distributed"), sys.modules.get("mpi4py.MPI")
    horovod = sys.modules.get("horovod.common.exceptions")
    for link in _chain(error):
        if isinstance(link, ReleasedError) or (dist is not None and isinstance(link, dist.DistError)):
            return True
        if type(link) is RuntimeError and _OF_A_GROUP.search(str(link)):
            return True
        if horovod is not None and isinstance(link, horovod.HorovodInternalError):
            return True
        if mpi is not None and isinstance(link, mpi.Exception) and _OF_MPI.search(str(link)):
            return True
    return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that led to it."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def is_good_exit(error: BaseException | None) -> bool:
    """Whether a cell ends with e.g. ``sys.exit(0)``, which is a program's success."""
    return isinstance(error, SystemExit) and (error.code is None or error.code == 0)


def interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    """Return the interrupt that led to an error, e.g. to an exit in what deals with interrupts; None if none did."""
    return next((link for link in _chain(error) if isinstance(link, KeyboardInterrupt)), None)


def complete(
    reply: dict[str, Any], shell: RankShell, lines_before: int, interrupted: bool, was_interrupted: bool
) -> None:
    """Add the line, the time and a plain traceback to an error reply.

    A collective that was released because the person interrupted the cell ends it like any other interrupt, and so does
    an exit that follows the interrupt, also one that the cell has dealt with itself (``was_interrupted``).
    """
    error, shell.last_error = shell.last_error, None
    reply["time_s"] = time.time()
    reply["line"] = None
    if error is None:
        return
    is_exit = isinstance(error, (SystemExit, ScriptExit))
    ends_by_interrupt = is_exit and (interrupted or was_interrupted)
    if ends_by_interrupt:
        error = interrupt_behind(error) or error
    reply["line"] = cell_line(error, lines_before)
    reply["file"] = script_name() if reply["line"] else ""
    if ends_by_interrupt or (interrupted and reply.get("group_error")):
        reply |= {"ename": "KeyboardInterrupt", "evalue": "", "traceback": _cut_to_cell(error, shell)}
        return
    reply["evalue"] = _shorten(_text_of(error))
    reply["traceback"] = [_shorten(part) for part in reply["traceback"]]
    advice = hint(error) or gpu_errors.advice(error) or shell.advice_on(error)
    reply["device_lost"] = gpu_errors.is_context_lost(error)
    if advice:
        reply["evalue"] += f"; {advice}"
        reply["traceback"].append(advice)


def leave_out_libraries(error: BaseException) -> None:
    """Cut what lies below the person's own code off an interrupt, and a library's frames off an error of a group.

    They tell only how a rank was stopped or released. They are also slow to show: IPython parses each file that a frame
    is in and colours its whole scope, seconds for an interrupt in the midst of torch's imports.
    """
    if isinstance(error, KeyboardInterrupt):
        _cut_below_last(error, is_of_person)
    elif "torch.distributed" in sys.modules and is_of_group(error):
        _cut_below_last(error, lambda filename: not _IN_LIBRARY.search(filename))


def _cut_below_last(error: BaseException, keep: Callable[[str], bool]) -> None:
    for link in _chain(error):
        last, frame = None, link.__traceback__
        while frame is not None:
            if keep(frame.tb_frame.f_code.co_filename):
                last = frame
            frame = frame.tb_next
        if last is not None:
            last.tb_next = None
        elif link is not error:
            error.__cause__, error.__suppress_context__ = None, True  # what a library was just dealing with


def is_of_person(filename: str) -> bool:
    """Whether a file is the person's: a cell, the script that it runs, or a module of theirs."""
    if is_own(filename):
        return True
    return not filename.startswith(("<frozen", STANDARD_LIBRARY, PACKAGE)) and not INSTALLED.search(filename)


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
        while trace is not None and not is_own(trace.tb_frame.f_code.co_filename):
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
        while own is not None and not is_own(own.tb_frame.f_code.co_filename):
            own = own.tb_next
        link.__traceback__ = own or link.__traceback__
    return "".join(traceback.format_exception(error)).splitlines()


def cell_line(error: BaseException, lines_before: int) -> int | None:
    """Return the line of the cell that ran at which ``error`` came up, None where it has none.

    A function that another cell defined has lines of its own; what counts is the line here that called it.
    """
    for link in _chain(error):
        frames = [frame for frame in traceback.extract_tb(link.__traceback__) if frame.lineno is not None]
        own = next((frame.filename for frame in frames if is_own(frame.filename)), None)
        lines = [frame.lineno for frame in frames if frame.filename == own and frame.lineno is not None]
        if own is not None:
            return lines[-1] + lines_before
    # Only code that could not even be compiled has no frame.
    return error.lineno + lines_before if isinstance(error, SyntaxError) and error.lineno else None
