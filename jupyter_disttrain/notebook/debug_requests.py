"""Serve the debugger of front ends for the notebook and its ranks together.

Covers: the kernel's debug_request messages.
Does not cover: the files of cells (``debugged_cells``), the ranks (``features.debugger``), the notebook's own process
(``notebook_debugger``).

ipykernel's method for debug_request messages is wrapped. A rank is a thread of the debugged program. JupyterLab shows
one stopped thread: it gets the frames of all stopped ranks, those of one rank first (``shown_rank``). Steps act on that
rank, while the others wait; "continue" acts on all. Choosing a frame of another rank shows that one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from concurrent.futures import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ipykernel import compiler

from ..client.recovery.remedies import error_text
from ..config.rank_selection import parse_ranks
from ..errors import DisttrainError
from ..features.debugger.breakpoint_lines import line_of_statement
from ..features.debugger.client import FIRST_THREAD, is_of_rank, rank_of_thread
from ..protocol.time_limits import (
    DEBUG_EVENTS_SECONDS,
    DEBUG_REFRESH_SECONDS,
    DEBUG_REPLY_SECONDS,
    DEBUGGER_TURN_SECONDS,
)
from .debugged_cells import file_on_ranks, magic_call, text_of, write_cell
from .debugpy_rules import hide_threads
from .magics.arguments import parse, ranks_of
from .magics.cell_magics import code_for_ranks
from .notebook_debugger import NotebookDebugger
from .shown_rank import ShownRank

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from concurrent.futures import Future

    from IPython.core.interactiveshell import ExecutionInfo, InteractiveShell

    from ..client import Cluster
    from ..features.debugger.client import Debugger, Message
    from .magics.clusters import Clusters

log = logging.getLogger(__name__)

_STEPS = ("next", "stepIn", "stepOut")
_REMEMBERED = 1000  # cells
_ONE_THREAD = ("jupyterlab",)  # clients that show one stopped thread
_CAPABILITIES = {
    "supportsConfigurationDoneRequest": True,
    "supportsConditionalBreakpoints": True,
    "supportsHitConditionalBreakpoints": True,
    "supportsLogPoints": True,
    "supportsEvaluateForHovers": True,
    "supportsSetVariable": True,
    "supportsSingleThreadExecutionRequests": True,
    "supportsExceptionInfoRequest": True,
    "exceptionBreakpointFilters": [
        {"filter": "raised", "label": "Raised Exceptions", "default": False},
        {"filter": "uncaught", "label": "Uncaught Exceptions", "default": True},
    ],
}


class DebugRequests:
    """The debugger of one notebook."""

    def __init__(self, shell: InteractiveShell, clusters: Clusters) -> None:
        self._shell: Any = shell
        self._clusters = clusters
        self._kernel: Any = shell.kernel  # type: ignore[attr-defined]
        self._own = NotebookDebugger(self._kernel, self._kernel.do_debug_request)
        self._kernel.do_debug_request = self._serve
        self._lock = threading.RLock()
        self._is_started = self._own.is_on  # by a client; perhaps before this extension was loaded
        self._is_busy = False  # the notebook runs a cell
        # For a client that shows one stopped thread; an earlier client is most probably one.
        self._shown = ShownRank() if self._is_started else None
        self._cluster: Cluster | None = None  # whose ranks are debugged
        self._cells: dict[str, str] = {}  # path of a cell in the notebook, by the name of its file on the ranks
        self._earlier: deque[str] = deque(maxlen=_REMEMBERED)  # texts of cells that ran while the debugger was off
        self._asked = dict(self._own.breakpoints)  # breakpoints by file, also those set before ranks started
        self._lines: dict[str, list[Message]] = {}  # those of cells for ranks, with the lines at which they stop
        self._filters: Message = {}  # exceptions at which to stop
        self._reads_again = False  # the front end is to read all frames again soon
        self._delayed: list[Message] | None = None  # events that are published after the reply to a request
        shell.events.register("pre_run_cell", self._before_cell)
        shell.events.register("post_run_cell", self._after_cell)

    def remove(self) -> None:
        """End the debugger of the ranks, and leave the kernel's debugger as it was."""
        self._shell.events.unregister("pre_run_cell", self._before_cell)
        self._shell.events.unregister("post_run_cell", self._after_cell)
        self._detach()
        del self._kernel.do_debug_request

    # Cells

    def _before_cell(self, info: ExecutionInfo) -> None:
        self._is_busy = True
        text = info.raw_cell or ""
        if not self._is_started:
            self._earlier.append(text)
            return
        self._attach()
        if self._for_ranks(text) is not None:
            self._own.begin_cell_for_ranks()
        if compiler.get_file_name(text) in self._asked:  # perhaps before it was a cell for these ranks
            wait(self._place(compiler.get_file_name(text)), DEBUG_REPLY_SECONDS)

    def _after_cell(self, _result: Any) -> None:
        self._is_busy = False
        self._own.end_cell()

    def _for_ranks(self, text: str) -> tuple[Cluster, tuple[int, ...], str] | None:
        """Return the cluster, the ranks and the code that they get; None if a cell is for none, or has an error.

        From then on frames of this code are shown in the cell.
        """
        call = magic_call(self._shell.transform_cell(text))
        if call is None:
            return None
        name, line, cell = call
        try:
            args = parse(name, line)
            cluster = self._clusters.current(args.name)
            if cluster is None:
                return None
            ranks, code = parse_ranks(ranks_of(args), cluster.world_size), code_for_ranks(name, args, cell)
        except DisttrainError:  # the cell reports it when it runs
            return None
        self._cells[file_on_ranks(code)] = compiler.get_file_name(text)
        return cluster, ranks, code

    # Requests

    async def _serve(self, request: Message) -> Message:
        """Serve a debug_request message, on the kernel's control thread: debugpy may have stopped all others."""
        try:
            return await self._serve_one(request)
        except Exception as error:  # a client without a reply would wait forever
            log.exception("the debugger could not serve %s", request)
            return _reply(request, {"success": False, "message": error_text(error)})

    async def _serve_one(self, request: Message) -> Message:
        if self._is_started:
            hide_threads()
            self._attach()
        command, arguments = request["command"], request.get("arguments") or {}
        method = _METHODS.get(command)
        if method is not None:
            return await method(self, request, arguments)
        debugger, rank = self._debugger(), self._addressed(arguments)
        if rank is None or debugger is None:
            return await self._ask_own(request)
        if command == "scopes" and self._shown is not None:
            with self._lock:
                self._shown.look_at(rank, self._stopped())
        return _reply(request, await _wait(debugger.forward(rank, request)))

    async def _ask_own(self, request: Message) -> Message:
        return _reply(request, await self._own.ask(request))

    def _addressed(self, arguments: Message) -> int | None:
        """Return the rank that a request is about; None for the notebook's process."""
        debugger = self._debugger()
        if debugger is None or not debugger.is_attached:
            return None
        for key in ("frameId", "variablesReference", "srcFrameId"):
            if is_of_rank(arguments.get(key)):
                return debugger.locate(arguments[key])[0]
        found = rank_of_thread(arguments.get("threadId"))
        if self._shown is None or "threadId" not in arguments:
            return found
        # JupyterLab names thread 1 when it lets the thread go on that it shows.
        is_of_notebook = found is None and self._own.is_stopped
        return found if self._shown.rank is None or is_of_notebook else self._shown.rank

    def _debugger(self) -> Debugger | None:
        """Return the debugger of the ranks that are debugged; None if there are none."""
        return None if self._cluster is None else self._cluster.debugger

    def _choose_cluster(self) -> None:
        """Debug the ranks of the current cluster, until that is closed."""
        if self._cluster is None or self._cluster.closed:
            self._cluster = self._clusters.current(None)
            if self._shown is not None:
                self._shown.go_on()  # it may have been one of the earlier ranks

    async def _initialize(self, request: Message, arguments: Message) -> Message:
        if self._is_started:  # by an earlier client, which was killed
            await self._disconnect(request | {"command": "disconnect", "arguments": {}}, {})
        self._shown = ShownRank() if arguments.get("clientID") in _ONE_THREAD else None
        while self._earlier:
            self._for_ranks(self._earlier.popleft())
        own = await self._own.begin(request, is_busy=self._is_busy)
        self._is_started = True
        return _reply(request, {"success": True, "body": _CAPABILITIES | (own.get("body") or {})})

    async def _attach_all(self, request: Message, _arguments: Message) -> Message:
        reply = await self._ask_own(request)
        self._attach()
        if not self._own.is_on:
            self._publish({"type": "event", "event": "initialized", "body": {}})
        return reply

    def _attach(self) -> None:
        """Attach to ranks that have started since, and have them stop where it was asked for before."""
        self._choose_cluster()
        debugger = self._debugger()
        if debugger is None or debugger.is_attached:
            return
        debugger.attach(self._on_event)
        if self._filters:
            debugger.set_filters(self._filters)
        wait([future for path in list(self._asked) for future in self._place(path)], DEBUG_REPLY_SECONDS)

    def _detach(self) -> None:
        debugger = None if self._cluster is None else self._cluster.debugger
        if debugger is not None:
            debugger.detach()
        self._shown = self._cluster = None
        self._asked.clear()
        self._lines.clear()
        self._filters = {}

    async def _disconnect(self, request: Message, _arguments: Message) -> Message:
        self._detach()
        reply = await self._ask_own(request)
        self._is_started = False
        return reply

    async def _debug_info(self, request: Message, _arguments: Message) -> Message:
        reply = await self._ask_own(request)
        body = reply.get("body", {})
        own = [{"source": path, "breakpoints": each} for path, each in self._lines.items()]
        others = [each for each in body.get("breakpoints", ()) if each["source"] not in self._lines]
        ranks = sorted(self._stopped()) if self._shown is None else [self._shown.rank]
        stopped = [FIRST_THREAD + rank for rank in ranks if rank is not None]
        return reply | {
            "body": body
            | {
                "isStarted": self._is_started,
                "breakpoints": [*others, *own],
                "stoppedThreads": [*stopped, *body.get("stoppedThreads", ())],
            }
        }

    async def _dump_cell(self, request: Message, arguments: Message) -> Message:
        self._for_ranks(arguments["code"])
        if self._own.is_on:
            return await self._ask_own(request)
        path = write_cell(arguments["code"])
        return _reply(request, {"success": True, "body": {"sourcePath": path}})

    async def _set_breakpoints(self, request: Message, arguments: Message) -> Message:
        path = arguments["source"]["path"]
        self._asked[path] = arguments.get("breakpoints") or []
        replies = await asyncio.gather(*map(_wait, self._place(path)))
        if not replies or (self._own.is_on and path not in self._lines):
            return await self._ask_own(request)
        source = {"name": Path(path).name, "path": path}  # JupyterLab lists only breakpoints with it
        first = next((each for each in replies if each["success"]), replies[0])  # a rank may just be replaced
        found = [each | {"source": source} for each in first.get("body", {}).get("breakpoints", ())]
        return _reply(request, first | {"body": {"breakpoints": found}})

    def _place(self, path: str) -> list[Future[Message]]:
        """Set the breakpoints of a file, or of a cell for ranks, on its ranks; return the responses to come."""
        debugger, text, asked = self._debugger(), text_of(path), self._asked[path]
        if debugger is None or not debugger.is_attached:
            return []
        if not path.startswith(compiler.get_tmp_directory()):
            return debugger.set_breakpoints(path, _moved(asked, text), None, is_cell=False)
        found = self._for_ranks(text)
        if found is None or found[0] is not self._cluster:
            return []
        _, ranks, code = found
        moved = _moved(asked, self._shell.transform_cell(code))
        self._lines[path] = [{"line": each["line"]} for each in moved]
        return debugger.set_breakpoints(file_on_ranks(code), moved, ranks, is_cell=True)

    async def _read_source(self, request: Message, arguments: Message) -> Message:
        """Return the text of a file of a frame, as this host has it."""
        path = arguments["source"]["path"]
        text = text_of(path)
        failed = {"success": False, "message": f"there is no {path} on the notebook's host"}
        return _reply(request, {"success": True, "body": {"content": text}} if text else failed)

    async def _set_filters(self, request: Message, arguments: Message) -> Message:
        self._filters = arguments
        debugger = self._debugger()
        if debugger is not None and debugger.is_attached:
            debugger.set_filters(arguments)
        return await self._ask_own(request)

    async def _threads(self, request: Message, _arguments: Message) -> Message:
        own = (await self._ask_own(request)).get("body", {}).get("threads", [])
        debugger = self._debugger()
        ranks = () if debugger is None or not debugger.is_attached else debugger.ranks
        threads = [{"id": FIRST_THREAD + rank, "name": f"rank {rank} ({debugger.host_of(rank)})"} for rank in ranks]  # type: ignore[union-attr]
        return _reply(request, {"success": True, "body": {"threads": [*own, *threads]}})

    async def _stack_trace(self, request: Message, arguments: Message) -> Message:
        debugger, rank = self._debugger(), self._addressed(arguments)
        if debugger is None or rank is None:
            return await self._ask_own(request)
        others = [] if self._shown is None else [each for each in sorted(debugger.stopped) if each != rank]
        replies = await asyncio.gather(*(_wait(debugger.forward(each, request)) for each in (rank, *others)))
        frames = []
        for each, reply in zip((rank, *others), replies, strict=True):
            for frame in reply.get("body", {}).get("stackFrames", ()):
                label = {} if self._shown is None else {"name": f"rank {each} · {frame['name']}"}
                frames.append(frame | label | {"source": self._source(frame["source"])})
        body = {"stackFrames": frames, "totalFrames": sum(each["body"].get("totalFrames", 0) for each in replies)}
        return _reply(request, replies[0] | ({"body": body} if replies[0]["success"] else {}))

    def _source(self, source: Message) -> Message:
        """Return the source of a frame, with the path of a cell as in the notebook."""
        path = self._cells.get(source["name"])
        return source if path is None else {"name": Path(path).name, "path": path}

    async def _go_on(self, request: Message, arguments: Message) -> Message:
        """Let stopped ranks go on: that of the thread for a step, all for "continue" unless one is asked for."""
        debugger, rank = self._debugger(), self._addressed(arguments)
        if debugger is None or rank is None:
            return await self._ask_own(request)
        if request["command"] in _STEPS or arguments.get("singleThread"):
            if self._shown is not None:
                with self._lock:
                    step = self._shown.step(rank)
                asyncio.get_running_loop().call_later(DEBUGGER_TURN_SECONDS, self._pass_turn, step)
            return _reply(request, await _wait(debugger.forward(rank, request)))
        with self._lock:
            ranks = list(dict.fromkeys([rank, *debugger.stopped]))
            if self._shown is not None:
                self._shown.go_on()
            # JupyterLab forgets the stopped threads when it has the reply, also those that have stopped again by then.
            self._delayed = [*(self._delayed or ()), *map(_continued, ranks)]
        try:
            replies = await asyncio.gather(*(_wait(debugger.request(each, "continue", {})) for each in ranks))
        finally:
            # The reply and the events have sockets of their own, so a pause keeps their order.
            asyncio.get_running_loop().call_later(DEBUG_EVENTS_SECONDS, self._publish_delayed)
        return _reply(request, replies[0] | {"body": {"allThreadsContinued": True}})

    async def _pause(self, request: Message, arguments: Message) -> Message:
        """Pause a rank, or all that run a cell where the client shows one thread."""
        debugger, rank = self._debugger(), rank_of_thread(arguments.get("threadId"))
        running = [] if debugger is None else [each for each in debugger.ranks if debugger.is_running(each)]
        ranks = running if self._shown is not None else [] if rank is None else [rank]
        if debugger is None or not ranks:
            return await self._ask_own(request)
        replies = await asyncio.gather(*(_wait(debugger.request(each, "pause", {})) for each in ranks))
        return _reply(request, replies[0])

    async def _show_richly(self, request: Message, arguments: Message) -> Message:
        """Show a variable of a rank's frame as text: it can't be displayed here."""
        rank = self._addressed(arguments)
        debugger = self._debugger()
        if rank is None or debugger is None:
            return await self._ask_own(request)
        evaluated = {"expression": arguments["variableName"], "frameId": debugger.locate(arguments["frameId"])[1]}
        reply = await _wait(debugger.request(rank, "evaluate", evaluated))
        text = reply["body"].get("result", "") if reply["success"] else reply["message"]
        return _reply(request, {"success": True, "body": {"data": {"text/plain": text}, "metadata": {}}})

    async def _copy_to_globals(self, request: Message, arguments: Message) -> Message:
        rank = self._addressed(arguments)
        debugger = self._debugger()
        if rank is None or debugger is None:
            return await self._ask_own(request)
        expression = f"globals()[{arguments['dstVariableName']!r}] = {arguments['srcVariableName']}"
        evaluated = {"expression": expression, "frameId": debugger.locate(arguments["srcFrameId"])[1]}
        return _reply(request, await _wait(debugger.request(rank, "evaluate", evaluated)))

    # Events of ranks, on the thread of the cluster's link

    def _on_event(self, rank: int, event: Message) -> None:
        if self._shown is None:
            self._publish(event)
            return
        with self._lock:
            events = self._shown.take(rank, event, self._stopped())
            for each in events:
                self._publish(each)
            if not events and event["event"] == "stopped" and not self._reads_again:
                self._reads_again = True
                timer = threading.Timer(DEBUG_REFRESH_SECONDS, self._read_again)
                timer.daemon, timer.name = True, "disttrain debugger"
                timer.start()

    def _read_again(self) -> None:
        """Have a front end that shows one stopped thread read the frames of the ranks that have stopped since."""
        with self._lock:
            self._reads_again = False
            if self._shown is not None:
                for each in self._shown.again(self._stopped()):
                    self._publish(each)

    def _pass_turn(self, step: int) -> None:
        """Show another stopped rank if the one that is shown has not stopped after this step."""
        with self._lock:
            if self._shown is not None:
                for each in self._shown.pass_turn(step, self._stopped()):
                    self._publish(each)

    def _stopped(self) -> dict[int, Message]:
        debugger = self._debugger()
        return {} if debugger is None else dict(debugger.stopped)

    def _publish_delayed(self) -> None:
        with self._lock:
            delayed, self._delayed = self._delayed or [], None
            for each in delayed:
                self._publish(each)

    def _publish(self, event: Message) -> None:
        with self._lock:
            if self._delayed is not None:
                self._delayed.append(event)
                return
        self._kernel._publish_debug_event({"seq": 0} | event)  # noqa: SLF001  (ipykernel's own debugger calls it, too)


_METHODS: dict[str, Callable[[DebugRequests, Message, Message], Awaitable[Message]]] = {
    "initialize": DebugRequests._initialize,  # noqa: SLF001  (of the class above, as those below)
    "attach": DebugRequests._attach_all,  # noqa: SLF001
    "disconnect": DebugRequests._disconnect,  # noqa: SLF001
    "debugInfo": DebugRequests._debug_info,  # noqa: SLF001
    "dumpCell": DebugRequests._dump_cell,  # noqa: SLF001
    "setBreakpoints": DebugRequests._set_breakpoints,  # noqa: SLF001
    "setExceptionBreakpoints": DebugRequests._set_filters,  # noqa: SLF001
    "source": DebugRequests._read_source,  # noqa: SLF001
    "threads": DebugRequests._threads,  # noqa: SLF001
    "stackTrace": DebugRequests._stack_trace,  # noqa: SLF001
    "continue": DebugRequests._go_on,  # noqa: SLF001
    "next": DebugRequests._go_on,  # noqa: SLF001
    "stepIn": DebugRequests._go_on,  # noqa: SLF001
    "stepOut": DebugRequests._go_on,  # noqa: SLF001
    "pause": DebugRequests._pause,  # noqa: SLF001
    "richInspectVariables": DebugRequests._show_richly,  # noqa: SLF001
    "copyToGlobals": DebugRequests._copy_to_globals,  # noqa: SLF001
}


def _continued(rank: int) -> Message:
    body = {"threadId": FIRST_THREAD + rank, "allThreadsContinued": False}
    return {"type": "event", "event": "continued", "body": body}


def _moved(asked: Iterable[Message], code: str) -> list[Message]:
    """Move breakpoints to lines at which the code can stop."""
    return [each | {"line": line_of_statement(code, each["line"])} for each in asked]


async def _wait(future: Future[Message]) -> Message:
    """Wait for a rank's response; a failure if it does not come in time, so that the control thread is not blocked."""
    try:
        return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), DEBUG_REPLY_SECONDS)
    except (TimeoutError, asyncio.TimeoutError):  # one class since Python 3.11
        text = f"the rank has not replied within {DEBUG_REPLY_SECONDS:g} s; it may wait for other ranks"
        return {"success": False, "message": text, "body": {}}


def _reply(request: Message, found: Message) -> Message:
    """Return the response to a request with what was found for it."""
    own = {"type": "response", "request_seq": request["seq"], "seq": request["seq"], "command": request["command"]}
    return found | own
