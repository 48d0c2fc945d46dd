"""What the reply says of a cell that failed.

Covers: the line of the cell, the traceback without this package's frames, the time.
Does not cover: comparing the failures of several ranks (``cluster.cell_run``).
"""

from __future__ import annotations

import ast
import re
import sys
import time
import traceback
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from . import gpu_errors
from .frameworks import hint
from .own_code import is_own, script_name
from .script_errors import ScriptExit
from .tracebacks import chain, linked, tree, walk
from .tracebacks import report as make_report

if TYPE_CHECKING:
    from .shell import RankShell


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
    for link in chain(error):
        if isinstance(link, ReleasedError) or (dist is not None and isinstance(link, dist.DistError)):
            return True
        if type(link) is RuntimeError and _OF_A_GROUP.search(str(link)):
            return True
        if horovod is not None and isinstance(link, horovod.HorovodInternalError):
            return True
        if mpi is not None and isinstance(link, mpi.Exception) and _OF_MPI.search(str(link)):
            return True
    return False


def is_good_exit(error: BaseException | None) -> bool:
    """Whether a cell ends with e.g. ``sys.exit(0)``, which is a program's success."""
    return isinstance(error, SystemExit) and (error.code is None or error.code == 0)


def interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    """Return the interrupt that led to an error, e.g. to an exit in what deals with interrupts; None if none did."""
    return next((link for link in chain(error) if isinstance(link, KeyboardInterrupt)), None)


def complete(
    reply: dict[str, Any], shell: RankShell, lines_before: int, interrupted: bool, was_interrupted: bool
) -> None:
    """Add the error, its line and the time to an error reply.

    A collective that was released because the user interrupted the cell ends it like any other interrupt, and so does
    an exit that follows the interrupt, also one that the cell has dealt with itself (``was_interrupted``).
    """
    error = shell.error
    assert error is not None
    reply["time_s"] = time.time()
    reply["line"] = cell_line(error, lines_before)
    reply["file"] = script_name() if reply["line"] else ""
    ends_by_interrupt = isinstance(error, (SystemExit, ScriptExit)) and (interrupted or was_interrupted)
    if ends_by_interrupt or (interrupted and reply.get("group_error")):
        reply |= {"ename": "KeyboardInterrupt", "evalue": "", "traceback": _as_interrupt(error, shell)}
        return
    report = shell.report()
    reply["device_lost"] = gpu_errors.is_context_lost(report.text)
    reply |= {"ename": type(error).__name__, "evalue": report.text, "traceback": report.lines}
    reply |= {"details": report.details, "raised_at": report.raised_at}
    advice = hint(error, report.text) or gpu_errors.advice(error, report.text) or shell.advice_on(error)
    if advice:
        reply["evalue"] += f"; {advice}"
        reply["traceback"] = [*report.lines, advice]


def _as_interrupt(error: BaseException, shell: RankShell) -> list[str]:
    """Return the traceback of the interrupt that an error stands for, from the cell on.

    A library that exits after an interrupt has caught that somewhere between the cell and the code that was cut off;
    the interrupt's own traceback begins where it did.
    """
    interrupt = KeyboardInterrupt()
    interrupt.__traceback__ = error.__traceback__
    cause = interrupt_behind(error)
    if cause is not None and cause.__traceback__ is not None:
        caught = cause.__traceback__.tb_frame
        outer = list(takewhile(lambda trace: trace.tb_frame is not caught, walk(error.__traceback__)))
        inner = list(walk(cause.__traceback__))
        interrupt.__traceback__ = linked([*outer, *inner])
    return make_report(interrupt, shell).lines


def let_go(error: BaseException) -> None:
    """Empty the frames of an error that was reported: IPython keeps it for ``%tb``, and with it every tensor in them.

    That may destroy objects which warn, e.g. a coroutine that was never awaited; Python shows a warning with the line
    of the code that runs, and none of this package can help. So this runs as if it stood at the cell's line.
    """
    # Those hidden by ``from None``, too: they hold as much, e.g. a file that torch could not write to its end.
    links = {id(link): link for shown in tree(error) for each in chain(shown) for link in tree(each)}
    frames = [frame for link in links.values() for frame, _ in traceback.walk_tb(link.__traceback__)]
    places = [(trace.tb_frame.f_code.co_filename, trace.tb_lineno) for trace in walk(error.__traceback__)]
    filename, line = next((place for place in places if is_own(place[0])), ("<cell>", 1))
    code = ast.parse(_LET_GO)
    for node in ast.walk(code):
        if isinstance(node, (ast.stmt, ast.expr, ast.excepthandler)):
            node.lineno = node.end_lineno = line or 1
    names = {"__name__": "__main__", "frames": frames}
    exec(compile(code, filename, "exec"), names)  # noqa: S102


# Whoever showed the traceback has had a copy of the variables made, which only reading f_locals brings up to date.
_LET_GO = """
for frame in frames:
    try:
        frame.clear()
    except RuntimeError:  # it still runs
        pass
    frame.f_locals
"""


def cell_line(error: BaseException, lines_before: int) -> int | None:
    """Return the line of the cell that ran at which ``error`` came up, None where it has none.

    A function that another cell defined has lines of its own; what counts is the line here that called it.
    """
    for link in chain(error):
        places = [(trace.tb_frame.f_code.co_filename, trace.tb_lineno) for trace in walk(link.__traceback__)]
        own = next((filename for filename, _ in places if is_own(filename)), None)
        if own is not None:
            return [line for filename, line in places if filename == own and line is not None][-1] + lines_before
    # Only code that could not even be compiled has no frame.
    return error.lineno + lines_before if isinstance(error, SyntaxError) and error.lineno else None
