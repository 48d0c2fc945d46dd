"""Complete the reply of a cell that failed.

Covers: the line of the cell, the state of the rank, the time.
Does not cover: the traceback (``tracebacks``), comparing the failures of several ranks (``client.cells.failures``).
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import subprocess
import time
import traceback
from bdb import BdbQuit
from itertools import takewhile
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any

from ...features.scripts.errors import ProgramExit, ProgramFailedError, ProgramInterrupt, ScriptExit
from ..libraries import gpu_errors
from ..libraries.framework_checks import hint
from ..process_group.object_replacement import thaw
from ..user_code import is_own, script_name
from .error_chain import chain, line_of, linked, tree, walk
from .tracebacks import report as make_report

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import FrameType


LOST_WORK = (
    "the process groups were aborted while this cell ran, so what collectives on the GPU have written is not valid: do "
    "not use these tensors, or models and optimizers that were updated with them"
)
MOST_KEPT = 10_000  # items in a container that is searched for errors


def is_good_exit(error: BaseException | None) -> bool:
    """Whether a cell ended with e.g. ``sys.exit(0)``, which means success."""
    return isinstance(error, SystemExit) and (error.code is None or error.code == 0)


def interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    """Return the interrupt that led to an error, e.g. to an exit in a handler of interrupts; None if there is none."""
    return next((link for link in chain(error) if isinstance(link, KeyboardInterrupt)), None)


def complete(reply: dict[str, Any], shell: Any, interrupted: bool, was_interrupted: bool) -> None:
    """Add the error, its line and the time to an error reply.

    The reply is that of an interrupt if the user interrupted the cell and a collective was released for it, or if an
    exit or the like followed the interrupt, also one that the cell handled itself (``was_interrupted``).
    """
    error = shell.error
    assert error is not None
    reply["time_s"] = time.time()
    if isinstance(error, (ProgramFailedError, ProgramInterrupt)):
        reply |= error.report
        if interrupted and reply.get("group_error"):
            reply |= {"ename": "KeyboardInterrupt", "evalue": ""}
        return
    reply["line"] = cell_line(error)
    reply["file"] = script_name() if reply["line"] else ""
    ends_by_interrupt = _may_follow_interrupt(error) and (interrupted or was_interrupted)
    if ends_by_interrupt or (interrupted and reply.get("group_error")):
        reply |= {"ename": "KeyboardInterrupt", "evalue": "", "traceback": as_interrupt(error, shell)}
        return
    if isinstance(error, BdbQuit) and not error.args:
        error.args = ("the debugger was quit, which ends the cell",)
    report = shell.report()
    reply["device_lost"] = gpu_errors.is_context_lost(report.text)
    reply |= {"ename": type(error).__name__, "evalue": report.text, "traceback": report.lines}
    reply |= {"details": report.details, "raised_at": report.raised_at}
    if isinstance(error, ProgramExit):
        reply |= error.report
    advice = hint(error, report.text) or gpu_errors.advice(error, report.text) or shell.advice_on(error)
    if advice:
        reply["evalue"] += f"; {advice}"
        reply["traceback"] = [*report.lines, advice]


def _may_follow_interrupt(error: BaseException) -> bool:
    """Whether code may raise this after it handled an interrupt: an exit, a cancelled task, a terminated program."""
    if isinstance(error, subprocess.CalledProcessError):
        return error.returncode is None or error.returncode < 0  # from %%bash, which ends its program
    return isinstance(error, (SystemExit, ScriptExit, asyncio.CancelledError))


def as_interrupt(error: BaseException, shell: Any) -> list[str]:
    """Return the traceback, from the cell on, of the interrupt that led to an error.

    A library that exits after an interrupt has caught it between the cell and the interrupted code. The interrupt's own
    traceback begins where it was caught.
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


def let_go(error: BaseException, variables: Mapping[str, Any]) -> None:
    """Clear the frames of a reported error: IPython keeps the error for ``%tb``, and with it every tensor in them.

    Clearing may destroy objects that warn, e.g. a coroutine that was never awaited. Python shows a warning with the
    line of the running code, and a line of this package would not help the user. So this runs compiled as if it stood
    at the cell's line.

    Frames of errors that the user keeps in ``variables``, or in a list, tuple, set or dict there, are not cleared.
    """
    # Including errors hidden by ``from None``: they hold as much, e.g. a file that torch did not finish writing.
    links = list(tree(error, hidden=True))
    kept = {id(frame) for link in _kept(links, variables) for frame in _frames(tree(link, hidden=True))}
    frames = {id(frame): frame for frame in _frames(links) if id(frame) not in kept}
    places = [(trace.tb_frame.f_code.co_filename, line_of(trace)) for trace in walk(error.__traceback__)]
    filename, line = next((place for place in places if is_own(place[0])), ("<cell>", 1))
    # Showing the traceback made a copy of each frame's variables; only reading f_locals again updates that copy.
    code = "for frame in frames: frame.clear(); frame.f_locals"
    compiled = compile("\n" * (line - 1) + code, filename, "exec")
    live = _suspended(frames.values())
    names = {"__name__": "__main__", "frames": iter([frame for frame in frames.values() if frame not in live])}
    while True:
        try:
            exec(compiled, names)  # noqa: S102
        except RuntimeError:
            continue  # the frame still runs; the next call goes on after it
        return


def _frames(errors: Iterable[BaseException]) -> Iterator[FrameType]:
    return (frame for error in errors for frame, _ in traceback.walk_tb(error.__traceback__))


def _kept(links: Iterable[BaseException], variables: Mapping[str, Any]) -> list[BaseException]:
    """Return the errors that the user keeps."""
    values = list(variables.values())  # list() copies in one step: another thread may change the container meanwhile
    held = set(map(id, values))
    for each in values:
        if type(each) in (list, tuple, set, dict) and len(each) <= MOST_KEPT:  # a subclass's methods could run any code
            held.update(map(id, list(each.values() if type(each) is dict else each)))
    return [link for link in links if id(link) in held]


def _suspended(frames: Iterable[FrameType]) -> set[FrameType]:
    """Return frames of suspended generators and coroutines, which caught the error: clearing would end them."""
    flags = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    may_go_on = [frame for frame in frames if frame.f_code.co_flags & flags]
    if may_go_on:
        thaw()
    holders = gc.get_referrers(*may_go_on) if may_go_on else []
    names = {GeneratorType: "gi_frame", CoroutineType: "cr_frame", AsyncGeneratorType: "ag_frame"}
    return {getattr(each, names[type(each)]) for each in holders if type(each) in names}


def cell_line(error: BaseException) -> int | None:
    """Return the line of the running cell that raised ``error``; None if there is none.

    For an error in a function that another cell defined, this is the line of the running cell that called it.
    """
    for link in chain(error):
        places = [(trace.tb_frame.f_code.co_filename, line_of(trace)) for trace in walk(link.__traceback__)]
        own = next((filename for filename, _ in places if is_own(filename)), None)
        if own is not None:
            return [line for filename, line in places if filename == own][-1]
    # Only code that does not compile has no frame.
    return error.lineno or None if isinstance(error, SyntaxError) else None
