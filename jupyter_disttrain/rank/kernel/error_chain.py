"""Walk the chain of an error and the frames of a traceback.

Covers: causes, contexts and members of exception groups; walking a traceback and making one from some of its frames.
Does not cover: formatting them (``tracebacks``).
"""

from __future__ import annotations

import builtins
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMBERS = 15  # members shown of an exception group, as in the standard library
_GROUPS: Any = getattr(builtins, "BaseExceptionGroup", ())  # missing in Python 3.10


def tree(error: BaseException, *, hidden: bool = False) -> Iterator[BaseException]:
    """Yield an error, those that led to it and the members of groups, each once; ``hidden``: also those not shown."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop(0)
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        waiting.append(link.__cause__)
        if hidden or (link.__cause__ is None and not link.__suppress_context__):
            waiting.append(link.__context__)
        if isinstance(link, _GROUPS):
            waiting += link.exceptions if hidden else link.exceptions[:MEMBERS]


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that led to it."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def has_group(error: BaseException) -> bool:
    """Whether an error's chain contains an exception group."""
    return any(isinstance(link, _GROUPS) for link in tree(error))


def walk(trace: TracebackType | None) -> Iterator[TracebackType]:
    """Yield a traceback's entries, one for each frame, outermost first."""
    while trace is not None:
        yield trace
        trace = trace.tb_next


def line_of(trace: TracebackType) -> int:
    """Return the line of a traceback's entry, or of the instruction before if it has none."""
    return _position(trace)[1]


def _position(trace: TracebackType) -> tuple[int, int]:
    """Return the instruction and the line of a traceback's entry.

    ``tb_lineno`` is None or 0 (-1 in Python 3.10) for an instruction that belongs to no line, such as a jump at the end
    of a loop; Python handles signals in these jumps. Then it is the last instruction before that has a line, or the
    first one after.
    """
    if (trace.tb_lineno or 0) > 0:
        return trace.tb_lasti, trace.tb_lineno
    code = trace.tb_frame.f_code
    lines = [(start, end - 2, line) for start, end, line in code.co_lines() if line]
    before = [place for start, *place in lines if start <= trace.tb_lasti]
    after = [place for _, *place in lines] or [[trace.tb_lasti, code.co_firstlineno]]
    at, line = before[-1] if before else after[0]
    return at, line


def linked(frames: list[TracebackType]) -> TracebackType | None:
    """Return a new traceback of these entries, each with a line; they are not changed."""
    linked = None
    for trace in reversed(frames):
        linked = TracebackType(linked, trace.tb_frame, *_position(trace))
    return linked
