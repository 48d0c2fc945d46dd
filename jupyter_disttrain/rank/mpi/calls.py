"""Find the mpi4py call that a thread is in, and the call's communicator.

Covers: reading the bytecode of a frame's current line.
Does not cover: ending the call (``world``).

mpi4py is compiled, so its calls have no frame of their own. The bytecode and the variables of the calling frame show
which method it calls.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

_MISSING = object()


@dataclass(frozen=True, slots=True)
class MpiCall:
    """A call of a method of a communicator, request, window or file."""

    name: str  # the method's name
    owner: Any  # the object that has the method, or its class, e.g. in MPI.Request.Waitall

    @property
    def waits_for_many(self) -> bool:
        """Whether it is a wait for several requests, e.g. ``Waitall`` or ``waitany``."""
        return self.name.lower() in ("waitall", "waitany", "waitsome")


def mpi_call(frame: FrameType | None) -> MpiCall | None:
    """Return the mpi4py call on the current line of an innermost frame; None if there is none.

    This runs no code of the user: attributes are looked up only in the dictionaries of modules and objects.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if frame is None or mpi is None or frame.f_lineno is None:
        return None
    owners = (mpi.Comm, mpi.Request, mpi.Win, mpi.File)
    value: Any = _MISSING
    below: Any = _MISSING  # the stack entry below ``value``
    found = None
    steps = _steps_of_line(frame)
    begin = _begin(steps[-1]) if steps else None  # where the current call begins in the source, and so does its callee
    for step in steps[:-1]:
        is_callee = begin is None or _begin(step) == begin
        if step.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            is_class = isinstance(value, type) and issubclass(value, owners)
            if (is_class or isinstance(value, owners)) and is_callee:
                found = MpiCall(str(step.argval), value)
            value = _attribute(value, str(step.argval))
        elif step.opname == "LOAD_CONST":
            below, value = value, step.argval
        elif step.opname.startswith(("LOAD_", "STORE_FAST_LOAD_")):
            names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            for name in names:
                below, value = value, _variable(frame, name) if isinstance(name, str) else _MISSING
        elif step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]"):
            below, value = _MISSING, below if isinstance(below, owners) else _item(below, value)
        elif step.opname.startswith("CALL"):
            value = _result_of(found) if found is not None and is_callee else _MISSING
            found = None if is_callee else found  # the current call's callee is what this call returned
    return found


def _result_of(call: MpiCall) -> Any:
    """Return a substitute for a call's result: for a request the object it is from, for anything else a class."""
    is_request = call.name.startswith(("i", "I")) or call.name.endswith("_init")
    return call.owner if is_request or isinstance(call.owner, type) else type(call.owner)


def _begin(step: dis.Instruction) -> tuple[int | None, int | None] | None:
    """Return line and column where the expression of an instruction begins; None before Python 3.11."""
    positions = getattr(step, "positions", None)
    return None if positions is None else (positions.lineno, positions.col_offset)


def _steps_of_line(frame: FrameType) -> list[dis.Instruction]:
    """Return the instructions of the frame's current line up to the current one."""
    lines = {start: line for start, line in dis.findlinestarts(frame.f_code) if line is not None}
    steps, line = [], None
    for step in dis.get_instructions(frame.f_code):
        line = lines.get(step.offset, line)
        if line == frame.f_lineno and step.offset <= frame.f_lasti:
            steps.append(step)
    return steps


def _variable(frame: FrameType, name: str) -> Any:
    for names in (frame.f_locals, frame.f_globals):
        if name in names:
            return names[name]
    return _MISSING


def _item(value: Any, key: Any) -> Any:
    """Return an item of a plain list, tuple or dict, whose lookup runs no code of the user."""
    if type(value) is dict and type(key) in (str, int):
        return value.get(key, _MISSING)
    if type(value) in (list, tuple) and type(key) is int and -len(value) <= key < len(value):
        return value[key]
    return _MISSING


def _attribute(value: Any, name: str) -> Any:
    names = getattr(value, "__dict__", None) if value is not _MISSING else None
    return names.get(name, _MISSING) if isinstance(names, Mapping) else _MISSING
