"""When the main thread of a rank stops: breakpoints, steps, exceptions, on code run as cells are.

Does not cover: requests and a real rank (``tests/integration/features/debugger``).
"""

from __future__ import annotations

import itertools
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from jupyter_disttrain.features.debugger.rank import debugger, tracer
from jupyter_disttrain.features.debugger.rank.frames import StoppedFrames, stack_of, text_of
from jupyter_disttrain.features.debugger.rank.tracer import Breakpoint, Tracer, check_hit_condition
from jupyter_disttrain.rank.interrupts import deferral

if TYPE_CHECKING:
    from types import FrameType

CELL = "/tmp/ipykernel_1/1.py"
CODE = """def add(a, b):
    total = a + b
    return total
x = add(1, 2)
for i in range(4):
    x += i
y = [add(i, i) for i in range(2)]
"""


class Stops:
    """A tracer, the lines at which it has stopped with the reasons, and the steps that follow."""

    def __init__(self, *steps: str) -> None:
        self.seen: list[tuple[int, str, str]] = []
        self._steps = list(steps)
        self.tracer = Tracer(self._stop)

    def _stop(self, frame: FrameType, reason: str, text: str) -> None:
        self.tracer.go_on()
        self.seen.append((frame.f_lineno, reason, text))
        if self._steps and (step := self._steps.pop(0)):
            self.tracer.step(step, frame)

    @property
    def lines(self) -> list[int]:
        return [line for line, _, _ in self.seen]

    def run(self, code: str = CODE) -> dict[str, Any]:
        """Run code as IPython runs a cell: each statement by a function ``run_code``."""
        names: dict[str, Any] = {}
        import ast  # noqa: PLC0415

        def run_code(statement: ast.stmt) -> None:
            exec(compile(ast.Module([statement], []), CELL, "exec"), names)

        before = sys.gettrace()
        sys.settrace(None)  # that of a coverage tool
        self.tracer.begin()
        try:
            for statement in ast.parse(code).body:
                run_code(statement)
        finally:
            self.tracer.end()
            sys.settrace(before)
        return names


def test_without_breakpoints_nothing_is_traced() -> None:
    stops = Stops()
    stops.run("import sys\nfound = sys.gettrace()\n")
    assert stops.seen == []


def test_breakpoints_stop_in_functions_and_statements() -> None:
    stops = Stops()
    stops.tracer.set_breakpoints(CELL, {3: Breakpoint(), 6: Breakpoint(condition="i == 2")})
    assert stops.run()["x"] == 9
    assert stops.lines == [3, 6, 3, 3]


@pytest.mark.parametrize(
    ("hits", "count"), [("2", 1), ("== 2", 1), (">= 3", 2), ("> 1", 3), ("< 3", 2), ("<= 3", 3), ("% 2", 2), ("% 0", 0)]
)
def test_hit_conditions(hits: str, count: int) -> None:
    stops = Stops()
    stops.tracer.set_breakpoints(CELL, {6: Breakpoint(hit_condition=hits)})
    stops.run()
    assert stops.lines == [6] * count


def test_hit_condition_that_is_none_is_refused() -> None:
    check_hit_condition("")
    with pytest.raises(ValueError, match="is no hit count"):
        check_hit_condition("twice")


def test_log_message_is_printed_and_does_not_stop(capsys: pytest.CaptureFixture[str]) -> None:
    stops = Stops()
    stops.tracer.set_breakpoints(CELL, {6: Breakpoint(log_message="i is {i}")})
    stops.run()
    assert stops.seen == []
    assert capsys.readouterr().out.splitlines() == [f"i is {i}" for i in range(4)]


def test_condition_that_fails_stops_with_its_error() -> None:
    stops = Stops()
    stops.tracer.set_breakpoints(CELL, {4: Breakpoint(condition="nothing")})
    stops.run()
    assert stops.seen[0][2] == "the breakpoint's condition failed: NameError: name 'nothing' is not defined"


@pytest.mark.parametrize(
    ("steps", "lines"),
    [
        (("over", "over"), [4, 5, 6]),
        (("in", "over", "over"), [4, 2, 3, 5]),  # from the end of a function on to the next statement
        (("in", "out"), [4, 2, 5]),
        (("out",), [4, 5]),
        (("over", ""), [4, 5]),
    ],
)
def test_steps(steps: tuple[str, ...], lines: list[int]) -> None:
    stops = Stops(*steps)
    stops.tracer.set_breakpoints(CELL, {4: Breakpoint()})
    stops.run()
    assert stops.lines == lines


def test_step_beyond_the_end_of_the_cell_is_forgotten() -> None:
    stops = Stops("over")
    stops.tracer.set_breakpoints(CELL, {2: Breakpoint()})
    stops.run("def f():\n    return 1\nf()\n")
    stops.tracer.clear()
    stops.run("z = 1\n")
    assert stops.lines == [2]


def test_raised_exceptions_stop_once_where_they_are_raised() -> None:
    stops = Stops()
    stops.tracer.stops_at_raised = True
    stops.run("def f():\n    {}['a']\ntry: f()\nexcept KeyError: pass\nfor _ in iter([1]): pass\n")
    assert stops.seen == [(2, "exception", "KeyError: 'a'")]


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "RuntimeError('gloo/tcp: closed')"])
def test_interrupts_and_errors_of_groups_do_not_stop_where_they_are_raised(error: str) -> None:
    stops = Stops()
    stops.tracer.stops_at_raised = True
    stops.run(f"try: raise {error}\nexcept BaseException: pass\n")
    assert stops.seen == []


def test_what_a_stop_raises_is_raised_in_the_code() -> None:
    def stop(_frame: FrameType, _reason: str, _text: str) -> None:
        raise KeyboardInterrupt

    stops = Stops()
    stops.tracer = Tracer(stop)
    stops.tracer.set_breakpoints(CELL, {3: Breakpoint()})
    with pytest.raises(KeyboardInterrupt):
        stops.run()
    assert sys.gettrace() != stops.tracer._on_call


def test_nothing_is_traced_once_the_last_breakpoint_is_removed() -> None:
    found: list[Any] = []

    def stop(frame: FrameType, _reason: str, _text: str) -> None:
        found.append(frame.f_lineno)
        stops.tracer.clear()
        stops.tracer.begin(frame)  # as on the main thread, after a signal

    stops = Stops()
    stops.tracer = Tracer(stop)
    stops.tracer.set_breakpoints(CELL, {2: Breakpoint()})
    names = stops.run("import sys\nx = 1\nfound = sys.gettrace()\n")
    assert found == [2]
    assert names["found"] is None


def test_generators_and_coroutines_that_wait_do_not_end_a_step() -> None:
    code = """def numbers():
    yield 1
    yield 2
async def inner():
    return 3
async def outer():
    x = await inner()
    return x
def run(coroutine):
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
list(numbers())
run(outer())
"""
    stops = Stops("over", "over")
    stops.tracer.set_breakpoints(CELL, {2: Breakpoint(), 7: Breakpoint()})
    stops.run(code)
    assert stops.lines == [2, 3, 15, 7]  # after the end of the generator the step ends at the next statement


def test_interrupt_in_the_trace_function_is_raised_in_the_code_at_once() -> None:
    """Python has called it, not the code; other code of this package is not interrupted."""

    def place_in(*files: str) -> Any:
        """Return the place that is found in a function of the last file, which those before have called."""
        names: dict[str, Any] = {"call": lambda: deferral._place(sys._getframe(1))}
        for file in reversed(files):
            exec(compile("def __enter__(call=call): return call()\ncall = __enter__", file, "exec"), names)

        def run_code() -> None:
            exec(compile("found = call()", CELL, "exec"), names)

        run_code()
        return names["found"]

    assert place_in(tracer.__file__) is None
    assert place_in(tracer.__file__, deferral.__file__) is None
    assert place_in(tracer.__file__, threading.__file__) is None
    assert place_in(deferral.__file__) is not None
    assert place_in(tracer.__file__, debugger.__file__) is not None


def test_another_debugger_is_left_alone() -> None:
    stops = Stops()
    stops.tracer.set_breakpoints(CELL, {1: Breakpoint()})

    def other(*_args: object) -> None: ...

    before = sys.gettrace()
    sys.settrace(other)
    try:
        stops.tracer.begin()
        assert sys.gettrace() is other
    finally:
        sys.settrace(before)


def test_frames_scopes_and_variables() -> None:
    found: list[Any] = []

    def stop(frame: FrameType, _reason: str, _text: str) -> None:
        stopped = StoppedFrames(stack_of(frame), {"hidden": 1}, itertools.count(1))
        frames = stopped.frames(0, 0)
        scopes = stopped.scopes(frames[0]["id"])
        found.append([(each["name"], each["line"], each["presentationHint"]) for each in frames])
        found.append({each["name"]: each["value"] for each in stopped.variables(scopes[0]["variablesReference"])})
        stopped.set_variable(scopes[0]["variablesReference"], "a", 10)
        found.append([each["name"] for each in stopped.scopes(frames[-1]["id"])])

    stops = Stops()
    stops.tracer = Tracer(stop)
    stops.tracer.set_breakpoints(CELL, {2: Breakpoint(hit_condition="1")})
    assert stops.run()["x"] == 18
    assert found == [[("add", 2, "normal"), ("<module>", 4, "normal")], {"a": "1", "b": "2"}, ["Globals"]]


def test_values_are_shown_without_calling_them() -> None:
    class Trap:
        def __repr__(self) -> str:
            raise RuntimeError

    stopped = StoppedFrames([], {}, itertools.count(1))
    assert text_of([Trap()]) == "list length 1"
    shown = stopped.describe("trap", {"a": Trap(), 1: 2})
    parts = stopped.variables(shown["variablesReference"])
    assert [each["name"] for each in parts] == ["a", "1"]
    assert parts[0]["value"].endswith("Trap")
    stopped.set_variable(shown["variablesReference"], "1", 3)
    assert stopped.variables(shown["variablesReference"])[1]["value"] == "3"
    with pytest.raises(TypeError, match="set it by an expression"):
        stopped.set_variable(shown["variablesReference"], "b", 3)
