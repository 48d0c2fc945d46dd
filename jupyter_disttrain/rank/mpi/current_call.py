"""Find the mpi4py call that a thread is in, and the call's communicator.

Covers: the call that a frame is executing, from its source.
Does not cover: ending the call (``world``).

mpi4py is compiled, so its calls have no frame of their own. The source and the variables of the calling frame show
which method it calls.
"""

from __future__ import annotations

import ast
import dis
import linecache
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from executing import Source
from pure_eval import CannotEval, Evaluator

from ..interrupts.deferral import INSTALLED
from .comms import is_partitioned

if TYPE_CHECKING:
    from types import FrameType


@dataclass(frozen=True, slots=True)
class MpiCall:
    """A call of a method of a communicator, request, window or file."""

    name: str  # the method's name
    owner: Any  # the object that has the method, or its class, e.g. in MPI.Request.Waitall
    kind: str  # what a release has to end: "one" call, a wait for "many" requests, or "partitioned" communication


def mpi_call(frame: FrameType | None) -> MpiCall | None:
    """Return the mpi4py call that an innermost frame is executing; None if there is none.

    This runs no code of the user.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if frame is None or mpi is None or frame.f_lineno is None:
        return None
    evaluator = Evaluator.from_frame(frame)
    node = _node_of(frame)
    found = _method_of(node, evaluator, (mpi.Comm, mpi.Request, mpi.Win, mpi.File))
    if found is None:
        return None
    name, owner = found
    waits_for_many = name.lower() in ("waitall", "waitany", "waitsome")
    requests = _requests_of(node, evaluator) if waits_for_many else [owner]
    kind = "many" if waits_for_many else "one"
    return MpiCall(name, owner, "partitioned" if any(is_partitioned(mpi, each) for each in requests) else kind)


def _node_of(frame: FrameType) -> ast.AST | None:
    """Return the call that a frame is executing, parsed from its source; None if there is none."""
    code = frame.f_code
    if sys.version_info < (3, 11):  # instructions have no positions, so this parses whole files: not large libraries
        is_library = INSTALLED.search(code.co_filename) and "/mpi4py/" not in code.co_filename
        return None if is_library else Source.executing(frame).node
    line, end_line, column, end_column = list(code.co_positions())[frame.f_lasti // 2]
    if line is None or not dis.opname[code.co_code[frame.f_lasti]].startswith(("CALL", "CACHE")):
        return None
    lines = [each.encode() for each in linecache.getlines(code.co_filename, frame.f_globals)[line - 1 : end_line]]
    if not lines:
        return None
    lines[-1] = lines[-1][:end_column]
    lines[0] = lines[0][column:]
    try:
        return ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
    except SyntaxError:  # the file was edited since
        return None


def _requests_of(node: ast.AST | None, evaluator: Evaluator) -> list[Any]:
    """Return what is known of the requests in the list that is a call's first argument."""
    if not isinstance(node, ast.Call) or not node.args:
        return []
    argument = node.args[0]
    requests: list[Any] = []
    for each in argument.elts if isinstance(argument, (ast.List, ast.Tuple)) else [argument]:
        with suppress(CannotEval):
            value = evaluator[each]
            requests += value if isinstance(value, (list, tuple)) else [value]
    return requests


def _method_of(node: ast.AST | None, evaluator: Evaluator, owners: tuple[type, ...]) -> tuple[str, Any] | None:
    """Return the method that a call of one of mpi4py's objects is of, and that object or its class."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    try:
        owner = evaluator[node.func.value]
    except CannotEval:  # e.g. the result of another call
        made_by = _method_of(node.func.value, evaluator, owners)
        owner = None if made_by is None else _result_of(*made_by)
    is_owner = isinstance(owner, owners) or (isinstance(owner, type) and issubclass(owner, owners))
    return (node.func.attr, owner) if is_owner else None


def _result_of(name: str, owner: Any) -> Any:
    """Return a substitute for a call's result: for a request the object it is from, for anything else a class."""
    is_request = name.startswith(("i", "I")) or name.endswith("_init")
    return owner if is_request or isinstance(owner, type) else type(owner)
