"""Debug the cells of a rank by requests of the Debug Adapter Protocol.

Covers: the requests and events of a rank, waiting while it is stopped, evaluating expressions.
Does not cover: when to stop (``rank.tracer``), frames and variables (``rank.frames``), the client's side (``client``).

Requests arrive on the control thread. While the main thread is stopped it serves them, as expressions may use the GPU
and call collectives. Otherwise the control thread serves those that need no stopped code.

A rank in a call in C code, such as a collective, can't stop before the call returns. Its frames are shown meanwhile;
expressions are then only read and not run.
"""

from __future__ import annotations

import itertools
import queue
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ....protocol.messages import DebugMessage
from ....protocol.time_limits import DEBUG_NOTICE_SECONDS, PAUSE_SECONDS
from ....rank.kernel.tracebacks import text_of
from ....rank.output.streams import flush_all
from ...introspection.attributes import UNKNOWN
from ...introspection.expressions import Scope
from .frames import StoppedFrames, UnknownReferenceError, stack_of, stack_of_error, write_locals
from .tracer import Breakpoint, Tracer, check_hit_condition, names_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

    from ....protocol.messages import Record
    from ....rank.user_input.questions import Questions
    from .frames import Stack

THREAD = 1  # the number of the only thread that is debugged: the main thread
_STEPS = {"next": "over", "stepIn": "in", "stepOut": "out"}
_LONGEST_TEXT = 10_000  # characters of an expression's value
_AT_ONCE = ("attach", "disconnect", "setBreakpoints", "setExceptionBreakpoints")  # also while the rank is stopped
_UNCAUGHT = "uncaught"  # the filter of errors that end a cell


class DebugRequestError(Exception):
    """A request of the debugger's client can't be served."""


class RankDebugger:
    """Debugs the cells of one rank.

    ``publish`` sends a record to the client; ``wake`` has :meth:`begin` called on the main thread, with what it runs;
    ``hidden`` returns the names that are not the user's; ``hold_timeouts`` suspends the timeouts of collectives, or
    restores them.
    """

    def __init__(
        self,
        questions: Questions,
        publish: Callable[[Record], None],
        wake: Callable[[], None],
        hidden: Callable[[], Mapping[str, Any]],
        hold_timeouts: Callable[[bool], None],
        folder_of_cells: Callable[[], str],
    ) -> None:
        self._questions, self._publish, self._wake = questions, publish, wake
        self._hidden, self._hold_timeouts, self._folder = hidden, hold_timeouts, folder_of_cells
        self._tracer = Tracer(lambda frame, reason, text: self._stop(stack_of(frame), reason, text))
        self._numbers = itertools.count(1)  # of frames and values
        self._turns = threading.RLock()  # between the threads that serve requests, while the main thread is not stopped
        self._stopped: StoppedFrames | None = None
        self._is_in_call = False  # the frames are those of a call in C code, after which the main thread will stop
        self._is_waiting = False  # the main thread serves requests
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()  # requests for the main thread
        self._has_stepped = False  # the code goes on until a step ends
        self._is_noticed = False  # the client has sent a request since the rank has stopped
        self._error = ""  # of the stop
        self.is_attached = False
        self.stops_at_errors = False  # stop at an error that ends a cell

    # Requests, on the control thread

    def take(self, request: dict[str, Any]) -> None:
        """Serve a request of the client, or leave it to the main thread."""
        with self._turns:
            if self._is_waiting and request["command"] not in _AT_ONCE:
                self._answers.put(request)
            else:
                self._serve(request)

    def _serve(self, request: dict[str, Any]) -> None:
        """Serve a request and publish the response."""
        response = {"type": "response", "request_seq": request["seq"], "command": request["command"]}
        method = _METHODS.get(request["command"])
        try:
            if method is None:
                raise DebugRequestError(f"{request['command']} is not supported on ranks")  # noqa: TRY301
            body = method(self, request.get("arguments") or {})
        except (DebugRequestError, UnknownReferenceError) as error:
            response |= {"success": False, "message": str(error)}
        except KeyboardInterrupt:
            self._publish(DebugMessage(message=response | {"success": False, "message": "interrupted"}))
            raise
        except BaseException as error:  # noqa: BLE001  (of the user's expression, e.g. exit(): the client shows it)
            response |= {"success": False, "message": f"{type(error).__name__}: {text_of(error)}"}
        else:
            response |= {"success": True, "body": body or {}}
        self._publish(DebugMessage(message=response))

    def _attach(self, _arguments: dict[str, Any]) -> None:
        self.is_attached = True
        self._hold_timeouts(True)

    def _disconnect(self, _arguments: dict[str, Any]) -> None:
        self.is_attached = self.stops_at_errors = False
        self._tracer.clear()
        try:
            self._hold_timeouts(False)
        finally:
            if self._is_waiting:
                self._answers.put({"command": "continue", "seq": 0})
            else:
                self._stopped = None
                self._wake()

    def _set_breakpoints(self, arguments: dict[str, Any]) -> dict[str, Any]:
        source = arguments["source"]
        file = source.get("path") or f"{self._folder()}/{source['name']}"
        breakpoints: dict[int, Breakpoint] = {}
        replies: list[dict[str, Any]] = []
        for each in arguments.get("breakpoints", ()):
            reply: dict[str, Any] = {"verified": True, "line": each["line"]}
            try:
                found = _breakpoint(each)
                if breakpoints.get(each["line"]) != Breakpoint():  # else there is one that always stops
                    breakpoints[each["line"]] = found
            except (SyntaxError, ValueError) as error:
                reply |= {"verified": False, "message": str(error)}
            replies.append(reply)
        self._tracer.set_breakpoints(file, breakpoints)
        self._wake()
        return {"breakpoints": replies}

    def _set_exception_breakpoints(self, arguments: dict[str, Any]) -> None:
        filters = arguments.get("filters", ())
        self.stops_at_errors = _UNCAUGHT in filters
        self._tracer.stops_at_raised = "raised" in filters
        self._wake()

    def _pause(self, _arguments: dict[str, Any]) -> None:
        if not stack_of(_main_frame()):
            raise DebugRequestError("no cell runs on the rank")
        self._tracer.pause()
        self._wake()
        timer = threading.Timer(PAUSE_SECONDS, self._show_call)
        timer.daemon, timer.name = True, "disttrain pause"
        timer.start()

    def _show_call(self) -> None:
        """Show the frames of a call in C code that has not returned since the rank was to pause."""
        with self._turns:
            stack = stack_of(_main_frame())
            if self._is_waiting or not self._tracer.is_pausing or not stack:
                return
            self._wake()  # a call in Python code may have put the first one off
            self._stopped, self._is_in_call = StoppedFrames(stack, self._hidden(), self._numbers), True
            self._publish_event(
                "stopped",
                {
                    "reason": "pause",
                    "description": "Paused in a call",
                    "text": "in a call that has not returned; the rank stops when it does",
                    "threadId": THREAD,
                    "allThreadsStopped": False,
                },
            )

    # Stopping, on the main thread

    def begin(self, frame: FrameType | None = None) -> None:
        """Trace the code that follows, and what runs now, as breakpoints or a pause require it; or no longer."""
        if frame is None:
            self._tracer.go_on()  # a pause that came too late was for the cell before
            with self._turns:
                if self.is_attached:
                    self._hold_timeouts(True)  # the group may be a new one
        self._tracer.begin(frame)

    def end_cell(self) -> None:
        """Stop tracing at the end of a cell; a step ends with it."""
        self._tracer.end()
        with self._turns:
            is_shown, self._stopped = self._has_stepped or self._stopped is not None, None
            self._has_stepped = self._is_in_call = False
        if is_shown:
            self._publish_continued()

    def stop_at(self, frame: FrameType, header: str = "") -> None:
        """Stop in a frame now, for ``breakpoint()``."""
        self._stop(stack_of(frame), "breakpoint", header)

    def stop_at_error(self, error: BaseException, text: str) -> None:
        """Stop in the frame where a cell's error was raised; the cell ends with it afterwards."""
        assert error.__traceback__ is not None
        self._questions.is_after_error = True
        try:
            self._stop(stack_of_error(error.__traceback__), "exception", text)
        finally:
            self._questions.is_after_error = False
            self._tracer.end()

    def _stop(self, stack: Stack, reason: str, text: str) -> None:
        """Serve requests until one lets the code go on."""
        if not stack or self._questions.refusal():
            return  # e.g. of a process that the cell has started, or a task
        with self._turns:
            if self._is_waiting or not self.is_attached:
                return  # an expression of the client's calls the code, or the client has just gone
            self._stopped = StoppedFrames(stack, self._hidden(), self._numbers)
            self._is_in_call, self._is_waiting = False, True
            self._tracer.go_on()
        self._has_stepped = self._is_noticed = False
        self._error = text if reason == "exception" else ""
        flush_all(sys.stdout, sys.stderr)
        stopped = {"reason": reason, "threadId": THREAD, "allThreadsStopped": False}
        is_asked = False
        with self._questions.waiting_for_user("a debugger"):
            try:
                self._publish_event("stopped", stopped | ({"text": text, "description": text} if text else {}))
                while not self._goes_on(request := self._wait_for_answer()):
                    self._serve(request)
                is_asked = True
            finally:
                self._leave()
                if not is_asked:
                    self._publish_continued()
        frame = stack[0][0]
        if self._has_stepped:
            self._tracer.step(_STEPS[request["command"]], frame)
        else:
            self._tracer.begin(frame)  # trace no longer what was traced only to stop here

    def _wait_for_answer(self) -> dict[str, Any]:
        """Wait for a request; an interrupt ends it (``rank.interrupts.deferral``).

        The client sends one as soon as it notices that the rank has stopped. Without it the client is gone, e.g. with
        a notebook that has left its ranks, and the rank goes on and stops no more.
        """
        try:
            request = self._answers.get(timeout=None if self._is_noticed else DEBUG_NOTICE_SECONDS)
        except queue.Empty:
            sys.stderr.write("the debugger's client does not reply, so this rank goes on and stops no more\n")
            with self._turns:
                self._disconnect({})
            request = self._answers.get()
        self._is_noticed = True
        return request

    def _goes_on(self, request: dict[str, Any]) -> bool:
        command = request["command"]
        if command != "continue" and command not in _STEPS:
            return False
        self._has_stepped = command in _STEPS
        if request["seq"]:
            response = {"type": "response", "request_seq": request["seq"], "command": command, "success": True}
            self._publish(DebugMessage(message=response | {"body": {"allThreadsContinued": False}}))
        return True

    def _leave(self) -> None:
        with self._turns:
            self._stopped, self._is_waiting = None, False
            self._tracer.go_on()  # a pause that was asked for while the rank was stopped
            left = []
            with suppress(queue.Empty):
                while True:
                    left.append(self._answers.get_nowait())
        for request in left:
            self._serve(request)

    # What a client asks of a stopped rank

    def _frames(self) -> StoppedFrames:
        stopped = self._stopped
        if stopped is None:
            raise DebugRequestError("the rank is not stopped")
        return stopped

    def _stack_trace(self, arguments: dict[str, Any]) -> dict[str, Any]:
        stopped = self._frames()
        found = stopped.frames(arguments.get("startFrame") or 0, arguments.get("levels") or 0)
        return {"stackFrames": found, "totalFrames": len(stopped.stack)}

    def _scopes(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"scopes": self._frames().scopes(arguments["frameId"])}

    def _variables(self, arguments: dict[str, Any]) -> dict[str, Any]:
        start, count = arguments.get("start") or 0, arguments.get("count") or 0
        return {"variables": self._frames().variables(arguments["variablesReference"], start, count)}

    def _set_variable(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if self._is_in_call:
            raise DebugRequestError("the rank is in a call and not stopped yet; its variables can't be set")
        stopped = self._frames()
        value = _evaluate(arguments["value"], stopped.frame(None))
        stopped.set_variable(arguments["variablesReference"], arguments["name"], value)
        found = stopped.describe(arguments["name"], value)
        return {key: found[key] for key in ("value", "type", "variablesReference")}

    def _evaluate(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Evaluate an expression in a frame, or run a statement; where nothing may run, only read it."""
        stopped = self._frames()
        frame = stopped.frame(arguments.get("frameId"))
        expression = arguments["expression"]
        if self._is_in_call or arguments.get("context") == "hover":
            value = Scope(names_of(frame), "", 0).value_of(expression)
            if value is UNKNOWN:
                raise DebugRequestError(
                    "the rank is in a call and not stopped yet: names, attributes and items can be shown"
                    if self._is_in_call
                    else "not known without running code"
                )
            found = stopped.describe("", value)
            return {"result": found["value"], "type": found["type"], "variablesReference": found["variablesReference"]}
        try:
            with self._questions.waiting_for_user(""):  # it waits for code, perhaps in a collective that hangs
                value = _evaluate(expression, frame)
        finally:
            flush_all(sys.stdout, sys.stderr)
        found = stopped.describe("", value)
        text = "" if value is None and arguments.get("context") == "repl" else repr(value)
        shown = text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
        return {"result": shown, "type": found["type"], "variablesReference": found["variablesReference"]}

    def _exception_info(self, _arguments: dict[str, Any]) -> dict[str, Any]:
        if not self._error:
            raise DebugRequestError("the rank has not stopped at an exception")
        name, _, text = self._error.partition(": ")
        return {"exceptionId": name, "description": text, "breakMode": "always"}

    def _note(self, _arguments: dict[str, Any]) -> None:
        """Do nothing: the client has noticed that the rank has stopped, perhaps too late."""
        if not self.is_attached:
            raise DebugRequestError("the rank has gone on, as its stop was not noticed in time")

    def _continue(self, _arguments: dict[str, Any]) -> dict[str, Any]:
        """Let a rank go on that has not stopped yet, after a pause or a step."""
        self._tracer.go_on()
        self._stopped, self._has_stepped = None, False
        return {"allThreadsContinued": False}

    def _pause_after_call(self, _arguments: dict[str, Any]) -> None:
        """Let a rank that is in a call run, and stop after it, for a step."""
        self._frames()
        self._stopped = None

    def _publish_continued(self) -> None:
        """Publish that the rank goes on, though the client has not asked for it."""
        self._publish_event("continued", {"threadId": THREAD, "allThreadsContinued": False})

    def _publish_event(self, event: str, body: dict[str, Any]) -> None:
        self._publish(DebugMessage(message={"type": "event", "event": event, "body": body}))


_METHODS: dict[str, Callable[[RankDebugger, dict[str, Any]], dict[str, Any] | None]] = {
    "attach": RankDebugger._attach,  # noqa: SLF001  (of the class above, as those below)
    "disconnect": RankDebugger._disconnect,  # noqa: SLF001
    "setBreakpoints": RankDebugger._set_breakpoints,  # noqa: SLF001
    "setExceptionBreakpoints": RankDebugger._set_exception_breakpoints,  # noqa: SLF001
    "pause": RankDebugger._pause,  # noqa: SLF001
    "noticed": RankDebugger._note,  # noqa: SLF001
    "continue": RankDebugger._continue,  # noqa: SLF001
    "next": RankDebugger._pause_after_call,  # noqa: SLF001
    "stepIn": RankDebugger._pause_after_call,  # noqa: SLF001
    "stepOut": RankDebugger._pause_after_call,  # noqa: SLF001
    "stackTrace": RankDebugger._stack_trace,  # noqa: SLF001
    "scopes": RankDebugger._scopes,  # noqa: SLF001
    "variables": RankDebugger._variables,  # noqa: SLF001
    "setVariable": RankDebugger._set_variable,  # noqa: SLF001
    "evaluate": RankDebugger._evaluate,  # noqa: SLF001
    "exceptionInfo": RankDebugger._exception_info,  # noqa: SLF001
}


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001


def _breakpoint(asked: Mapping[str, Any]) -> Breakpoint:
    """Return a breakpoint; raises a SyntaxError or a ValueError if one of its conditions can't be read."""
    found = Breakpoint(
        condition=asked.get("condition") or "",
        hit_condition=asked.get("hitCondition") or "",
        log_message=asked.get("logMessage") or "",
    )
    if found.condition:
        compile(found.condition, "<condition>", "eval")
    check_hit_condition(found.hit_condition)
    return found


def _evaluate(expression: str, frame: FrameType) -> Any:
    """Return the value of an expression in a frame, or run a statement there, which has none."""
    names = frame.f_locals
    try:
        code = compile(expression, "<debugger>", "eval")
    except SyntaxError:
        exec(compile(expression, "<debugger>", "exec"), frame.f_globals, names)  # noqa: S102  (the user's own code)
        if names is not frame.f_globals:
            write_locals(frame)
        return None
    return eval(code, names_of(frame))  # noqa: S307  (as above)
