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


def linked(frames: list[TracebackType]) -> TracebackType | None:
    """Return a new traceback of these entries; they are not changed."""
    linked = None
    for trace in reversed(frames):
        linked = TracebackType(linked, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
    return linked
