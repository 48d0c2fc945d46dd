"""Show the frames of a stopped rank: calls, scopes, variables.

Covers: the numbers by which a client refers to frames and values, texts of values, setting variables.
Does not cover: stopping (``rank.tracer``), evaluating expressions (``rank.debugger``).

Values are read as ``features.introspection`` reads them: no code of theirs runs, so a client that shows all variables
can't start a collective. Elements are shown of small tensors on the CPU.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....rank.interrupts.deferral import is_statement, outwards
from ....rank.kernel.error_chain import walk
from ....rank.kernel.tracebacks import is_of_user
from ...introspection import attributes
from ...introspection.summaries import describe, plain_text, type_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import FrameType, TracebackType

    Stack = list[tuple[FrameType, int]]  # frames with their lines, the innermost first

_MOST = 1000  # variables of one value
_ELEMENTS = 24  # of a tensor that is shown with its elements
_HIDDEN = ("Type", "Value", "Requires grad")  # properties of a value that its text leaves out


class UnknownReferenceError(LookupError):
    """A client refers to a frame or a value of an earlier stop."""

    def __init__(self) -> None:
        super().__init__("the rank has run since it stopped there")


def stack_of(frame: FrameType | None) -> Stack:
    """Return the frames of the running cell, from this one to the cell's statement; empty if no cell runs."""
    found: Stack = []
    for each in outwards(frame):
        found.append((each, each.f_lineno))
        if is_statement(each):
            return found
    return []


def stack_of_error(trace: TracebackType) -> Stack:
    """Return the frames of an error from the innermost one of the user's own code, with the lines that they ran."""
    found = [(each.tb_frame, each.tb_lineno) for each in walk(trace)]
    while found and not is_of_user(found[-1][0].f_code.co_filename):
        found.pop()
    first = next((at for at, (frame, _) in enumerate(found) if is_statement(frame)), 0)
    return found[first:][::-1]


class StoppedFrames:
    """The frames of one stop, and the values that a client has asked for; ``numbers`` gives each a new number.

    The numbers differ from those of earlier stops: JupyterLab would take the frames for the same.
    """

    def __init__(self, stack: Stack, hidden: Mapping[str, Any], numbers: Iterator[int]) -> None:
        self.stack = stack
        self._hidden = hidden  # names that are not the user's, and their values
        self._numbers = numbers
        self._frames = {next(numbers): frame for frame, _ in stack}
        self._held: dict[int, Any] = {}  # values by reference

    def frame(self, number: int | None) -> FrameType:
        """Return a frame; without a number, the innermost one."""
        if number is None:
            return self.stack[0][0]
        if number not in self._frames:
            raise UnknownReferenceError
        return self._frames[number]

    def frames(self, start: int, count: int) -> list[dict[str, Any]]:
        """Return some of the frames as in the protocol; all for a count of 0."""
        stop = start + count if count else len(self.stack)
        return [
            {
                "id": number,
                "name": frame.f_code.co_name,
                "line": line,
                "column": 1,
                "source": {"name": Path(frame.f_code.co_filename).name, "path": frame.f_code.co_filename},
                "presentationHint": "normal" if is_of_user(frame.f_code.co_filename) else "subtle",
            }
            for number, (frame, line) in list(zip(self._frames, self.stack, strict=True))[start:stop]
        ]

    def scopes(self, number: int) -> list[dict[str, Any]]:
        """Return the scopes of a frame: its local variables, and the global ones where these are others."""
        frame = self.frame(number)
        names = ["Globals"] if frame.f_locals is frame.f_globals else ["Locals", "Globals"]
        return [
            {
                "name": name,
                "variablesReference": self._refer(_Scope(frame, is_global=name == "Globals")),
                "expensive": False,
                "presentationHint": name.lower(),
            }
            for name in names
        ]

    def variables(self, reference: int, start: int = 0, count: int = 0) -> list[dict[str, Any]]:
        """Return what a scope or a value holds; at most ``_MOST`` from ``start`` on."""
        value = self._value(reference)
        found = list(self._names(value) if isinstance(value, _Scope) else _parts(value))
        stop = start + min(count or _MOST, _MOST)
        return [self.describe(name, each) for name, each in found[start:stop]]

    def describe(self, name: str, value: Any) -> dict[str, Any]:
        """Return a value as a variable of the protocol."""
        return {
            "name": name,
            "value": text_of(value),
            "type": type_name(type(value)),
            "variablesReference": self._refer(value) if _has_parts(value) else 0,
        }

    def set_variable(self, reference: int, name: str, value: Any) -> None:
        """Set a variable of a scope, or an item of a list or a dictionary."""
        holder = self._value(reference)
        if isinstance(holder, _Scope):
            holder.values[name] = value
            write_locals(holder.frame)
        elif type(holder) is list:
            holder[int(name)] = value
        elif type(holder) is dict and name in {_key(key): key for key in holder}:
            holder[{_key(key): key for key in holder}[name]] = value
        else:
            raise TypeError(f"{name} can't be set here; set it by an expression")

    def _names(self, scope: _Scope) -> Iterator[tuple[str, Any]]:
        for name, value in sorted(scope.values.items()):
            is_hidden = scope.is_global and self._hidden.get(name) is value
            if not name.startswith("_") and not is_hidden and attributes.kind_of(value) != "module":
                yield name, value

    def _refer(self, value: Any) -> int:
        number = next(self._numbers)
        self._held[number] = value
        return number

    def _value(self, reference: int) -> Any:
        if reference not in self._held:
            raise UnknownReferenceError
        return self._held[reference]


class _Scope:
    """The local or global variables of a frame."""

    def __init__(self, frame: FrameType, *, is_global: bool) -> None:
        self.frame, self.is_global = frame, is_global
        self.values = frame.f_globals if is_global else frame.f_locals


def write_locals(frame: FrameType) -> None:
    """Give a function the values that were set in ``frame.f_locals``; since 3.13 that is its own dictionary."""
    if sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def text_of(value: Any) -> str:
    """Return a value in one line."""
    plain = plain_text(value)
    if plain is not None:
        return plain
    if attributes.is_one_of(type(value), _small_tensors()) and _is_small(value):
        return " ".join(repr(value).split())
    known = describe(value)
    parts = [f"length {text}" if name == "Length" else text for name, text in known.items() if name not in _HIDDEN]
    return " ".join([known["Type"].rpartition(".")[2], *parts])


def _small_tensors() -> tuple[type | None, ...]:
    return attributes.torch_class("Tensor"), attributes.torch_class("Parameter", "torch.nn")


def _is_small(value: Any) -> bool:
    is_dense = not value.is_nested and value.layout is sys.modules["torch"].strided
    return is_dense and value.device.type == "cpu" and value.numel() <= _ELEMENTS


def _has_parts(value: Any) -> bool:
    if attributes.is_one_of(type(value), (list, tuple, set, frozenset, *attributes.DICTS)):
        return len(value) > 0
    return next(iter(_parts(value)), None) is not None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a value holds: items of containers, attributes of objects, parts of modules of torch."""
    kind = type(value)
    if attributes.is_one_of(kind, (list, tuple)):
        yield from ((str(at), each) for at, each in enumerate(value[:_MOST]))
    elif attributes.is_one_of(kind, (set, frozenset)):
        yield from ((str(at), each) for at, each in enumerate(list(value)[:_MOST]))
    elif attributes.is_one_of(kind, attributes.DICTS):
        yield from ((_key(key), each) for key, each in list(dict.items(value))[:_MOST])
    elif attributes.kind_of(value) == "instance" and plain_text(value) is None:
        own = attributes.own_dict(value)
        for name, each in list(own.items()):
            if type(name) is str and not name.startswith("_"):
                yield name, each
        if attributes.is_module_of_torch(value):
            for held in ("_parameters", "_buffers", "_modules"):
                yield from ((str(name), each) for name, each in list(own.get(held, {}).items()))


def _key(key: Any) -> str:
    return key if type(key) is str else plain_text(key) or type_name(type(key))
