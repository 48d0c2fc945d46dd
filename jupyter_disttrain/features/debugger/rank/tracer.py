"""Stop the main thread of a rank at breakpoints, after steps, at raised exceptions, or as soon as possible.

Covers: Python's trace function; conditions, hit counts and log messages of breakpoints; steps.
Does not cover: what a stopped rank does (``rank.debugger``), what is shown of its frames (``rank.frames``).

Only code that has a breakpoint, or that is stepped through, is traced line by line. For all other calls the trace
function compares the name of the file. Where no breakpoint is set and no step is under way, nothing is traced.
"""

from __future__ import annotations

import dis
import inspect
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ....rank.interrupts.deferral import is_statement, outwards
from ....rank.kernel.tracebacks import is_of_user, text_of
from ....rank.process_group.errors import is_of_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import CodeType, FrameType

_KNOWN = 1000  # code objects of which it is remembered whether they have a breakpoint
_HIT_CONDITION = re.compile(r"\s*(?P<operator>==|>=|<=|>|<|%)?\s*(?P<number>\d+)\s*")
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "==": lambda hits, number: hits == number,
    ">=": lambda hits, number: hits >= number,
    "<=": lambda hits, number: hits <= number,
    ">": lambda hits, number: hits > number,
    "<": lambda hits, number: hits < number,
    "%": lambda hits, number: number > 0 and hits % number == 0,
}
_EXPRESSION = re.compile(r"\{([^{}]+)\}")  # in a log message
_MAY_SUSPEND = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE
_LOOP_ENDS = (StopIteration, StopAsyncIteration)
_SUSPENDS = ("YIELD_VALUE", "YIELD_FROM")  # instructions


@dataclass(slots=True, kw_only=True)
class Breakpoint:
    """A breakpoint of one line; the conditions are those of the Debug Adapter Protocol, empty for none.

    ``hit_condition`` is a number of hits with an operator: ``3`` or ``== 3``, ``>= 3``, ``% 3``. With a log message,
    in which ``{expression}`` is replaced, the code does not stop but prints it.
    """

    condition: str = ""
    hit_condition: str = ""
    log_message: str = ""
    hits: int = 0

    def stops(self, frame: FrameType) -> tuple[bool, str]:
        """Whether to stop in a frame that has reached the line, and the error of the condition, if it has failed."""
        if self.condition:
            try:
                if not _evaluate(self.condition, frame):
                    return False, ""
            except Exception as error:  # noqa: BLE001  (of the user's expression; stopping shows it)
                return True, f"the breakpoint's condition failed: {type(error).__name__}: {error}"
        self.hits += 1
        found = _HIT_CONDITION.fullmatch(self.hit_condition)
        if found and not _COMPARE[found["operator"] or "=="](self.hits, int(found["number"])):
            return False, ""
        if self.log_message:
            print(_EXPRESSION.sub(lambda each: _text(each[1], frame), self.log_message))  # noqa: T201
            return False, ""
        return True, ""


def check_hit_condition(text: str) -> None:
    """Raise a ValueError if this is no condition on the number of hits."""
    if text and not _HIT_CONDITION.fullmatch(text):
        raise ValueError(f"{text!r} is no hit count: write a number, with ==, >=, <=, >, < or % before it if you like")


def names_of(frame: FrameType) -> dict[str, Any]:
    """Return the names that an expression in a frame can use, in its nested functions and comprehensions, too."""
    return frame.f_globals if frame.f_locals is frame.f_globals else {**frame.f_globals, **frame.f_locals}


def _evaluate(expression: str, frame: FrameType) -> Any:
    return eval(expression, names_of(frame))  # noqa: S307  (the user's own expression)


def _text(expression: str, frame: FrameType) -> str:
    try:
        return str(_evaluate(expression, frame))
    except Exception as error:  # noqa: BLE001  (as above)
        return f"<{type(error).__name__}: {error}>"


class Tracer:
    """Traces the main thread; ``stop`` is called in the frame that is to stop, with the reason and a text.

    If it can stop there, it calls :meth:`go_on` and returns when the code goes on, or is to go on until the end of a
    step: see :meth:`step`. What it raises is raised in the code.
    """

    def __init__(self, stop: Callable[[FrameType, str, str], None]) -> None:
        self._stop = stop
        self._breakpoints: dict[str, Mapping[int, Breakpoint]] = {}  # by file and line
        self.stops_at_raised = False  # stop where an exception is raised
        self._step = ""  # "in", "over", "statement" (the cell's next one) or "pause" (as soon as possible)
        self._frame: FrameType | None = None  # in which to stop after a step over
        self._known: dict[int, tuple[CodeType, bool]] = {}  # whether code has a breakpoint; code objects are held
        self._seen: BaseException | None = None  # the exception at which it stopped last

    # From other threads

    def set_breakpoints(self, file: str, breakpoints: Mapping[int, Breakpoint]) -> None:
        """Replace the breakpoints of a file; :meth:`begin` is to be called on the main thread."""
        others = {name: each for name, each in self._breakpoints.items() if name != file}
        self._breakpoints = others | ({file: breakpoints} if breakpoints else {})
        self._known = {}

    def pause(self) -> None:
        """Stop as soon as code of the user's runs; :meth:`begin` is to be called on the main thread."""
        self._step = "pause"

    @property
    def is_pausing(self) -> bool:
        """Whether the code was to pause and has not yet."""
        return self._step == "pause"

    def go_on(self) -> None:
        """Stop at breakpoints only."""
        self._step, self._frame = "", None

    def clear(self) -> None:
        """Stop no more."""
        self._breakpoints, self._known, self.stops_at_raised = {}, {}, False
        self.go_on()

    # On the main thread

    def begin(self, frame: FrameType | None = None) -> None:
        """Trace the code that follows, and ``frame``, which runs now, with its callers; or no longer, if need be."""
        if sys.gettrace() not in (None, self._on_call):
            return  # another debugger's
        is_needed = bool(self._breakpoints or self._step or self.stops_at_raised)
        for each in _of_cell(frame):
            if is_needed and (self._is_traced(each) or self._has_breakpoint(each.f_code)):
                each.f_trace = self._on_event
            elif each.f_trace == self._on_event:
                each.f_trace = None
        if is_needed or sys.gettrace() is not None:
            sys.settrace(self._on_call if is_needed else None)

    def end(self) -> None:
        """Trace nothing until the next cell."""
        self.go_on()
        self._seen = None
        if sys.gettrace() == self._on_call:
            sys.settrace(None)

    def step(self, kind: str, frame: FrameType) -> None:
        """Stop again after a step from ``frame``: "in", "over" or "out"."""
        self._step, self._frame = kind, frame
        if kind == "in":
            self._frame = None
        elif kind == "out":
            self._leave(frame)
        for each in _of_cell(frame):
            if is_of_user(each.f_code.co_filename):
                each.f_trace = self._on_event
        sys.settrace(self._on_call)

    def _on_call(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        if self._step or self.stops_at_raised:
            is_traced = self._is_traced(frame) or self._has_breakpoint(frame.f_code)
        else:
            is_traced = frame.f_code.co_filename in self._breakpoints and self._has_breakpoint(frame.f_code)
        return self._on_event if is_traced else None

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            if reason := self._reason(frame):
                self._stop(frame, *reason)
        elif event == "exception":
            self._on_exception(frame, argument[1])
        elif event == "return" and frame is self._frame and not _is_suspended(frame):
            self._leave(frame)
        if self._step or self.stops_at_raised or self._has_breakpoint(frame.f_code):
            return self._on_event
        frame.f_trace = None  # Python would go on with a function that returns None
        return None

    def _reason(self, frame: FrameType) -> tuple[str, str] | None:
        """Why to stop at the line that a frame has reached, and a text; None to go on."""
        found = self._breakpoints.get(frame.f_code.co_filename, {}).get(frame.f_lineno)
        if found is not None:
            stops, error = found.stops(frame)
            if stops:
                return "breakpoint", error
        is_end = frame is self._frame if self._step == "over" else self._is_stepped(frame)
        return ("pause" if self._step == "pause" else "step", "") if is_end else None

    def _on_exception(self, frame: FrameType, error: BaseException | None) -> None:
        if not isinstance(error, Exception) or isinstance(error, _LOOP_ENDS) or error is self._seen:
            return  # also of an interrupt
        if self.stops_at_raised and is_of_user(frame.f_code.co_filename) and not is_of_group(error):
            self._seen = error
            self._stop(frame, "exception", f"{type(error).__name__}: {text_of(error)}")

    def _is_stepped(self, frame: FrameType) -> bool:
        """Whether to stop at the next line of a frame, whichever it is."""
        if self._step == "statement":
            return is_statement(frame)
        return self._step in ("in", "pause") and _is_of_users_cell(frame)

    def _is_traced(self, frame: FrameType) -> bool:
        return self._is_stepped(frame) or (self.stops_at_raised and _is_of_users_cell(frame))

    def _has_breakpoint(self, code: CodeType) -> bool:
        known = self._known  # first: set_breakpoints() replaces it after the breakpoints
        lines = self._breakpoints.get(code.co_filename)
        if lines is None:
            return False
        found = known.get(id(code))
        if found is None:
            if len(known) >= _KNOWN:
                known.clear()
            found = known[id(code)] = code, any(line in lines for _, _, line in code.co_lines())
        return found[1]

    def _leave(self, frame: FrameType) -> None:
        """Stop at the next line of the caller, or of the cell."""
        callers = [each for each in _of_cell(frame.f_back) if is_of_user(each.f_code.co_filename)]
        if is_statement(frame) or not callers:
            self._step, self._frame = "statement", None
        else:
            self._step, self._frame = "over", callers[0]
            callers[0].f_trace = self._on_event


def _is_suspended(frame: FrameType) -> bool:
    """Whether a frame that Python reports to return is a generator or a coroutine that waits, and will go on."""
    if not frame.f_code.co_flags & _MAY_SUSPEND:
        return False
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] in _SUSPENDS


def _is_of_users_cell(frame: FrameType) -> bool:
    return is_of_user(frame.f_code.co_filename) and any(map(is_statement, outwards(frame)))


def _of_cell(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers up to the cell's statement; nothing for code that no cell runs."""
    frames = []
    for each in outwards(frame):
        frames.append(each)
        if is_statement(each):
            yield from frames
            return
