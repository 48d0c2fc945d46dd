"""Debug the cells of a session's ranks, as one program whose threads are the ranks.

Covers: requests of the Debug Adapter Protocol to ranks and their responses, the numbers of threads, frames and values,
which ranks are stopped, ranks that are replaced.
Does not cover: the ranks' side (``rank``), front ends (``notebook.debug_requests``).

A request is sent on the control channel. Its response and events are published like output, so no port is opened on a
rank. Responses and events arrive on the link's thread.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import ClusterClosedError
from ...protocol.requests import Debug
from ...protocol.states import RankState
from ...protocol.time_limits import DEBUG_REPLY_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from ...client.startup.launch import Launch
    from ...client.startup.rank_table import RankEntry

    Message = dict[str, Any]  # of the protocol

FIRST_THREAD = 1_000_000  # the number of rank 0 as a thread; those of the notebook's process are smaller
FIRST_ID = 1 << 30  # of frames and values; those of debugpy are smaller
_LAST_ID = (1 << 31) - 1  # the protocol's largest number; those that ipykernel gives its variables are larger
_REACHABLE = (RankState.IDLE, RankState.RUNNING)
_RESUMING = ("continue", "next", "stepIn", "stepOut")


def rank_of_thread(thread: Any) -> int | None:
    """Return the rank that is a thread of the debugger; None if it is none."""
    return thread - FIRST_THREAD if isinstance(thread, int) and thread >= FIRST_THREAD else None


def is_of_rank(number: Any) -> bool:
    """Whether this is the number of a frame or a value of a rank, rather than of the notebook's process."""
    return isinstance(number, int) and FIRST_ID <= number <= _LAST_ID


class Debugger:
    """Debugs the ranks of one session for one client at a time; ``launch`` returns those that a reset has left."""

    def __init__(self, launch: Callable[[], Launch]) -> None:
        self._launch = launch
        self._lock = threading.RLock()
        self._changing = threading.RLock()  # held while ranks are attached or detached, for seconds
        self._on_event: Callable[[int, Message], None] | None = None
        self._attached: set[str] = set()  # engines
        self._breakpoints: dict[str, tuple[tuple[int, ...] | None, Message]] = {}  # ranks, arguments; by file
        self._filters: Message = {}
        self._replies: dict[tuple[int, int], Future[Message]] = {}  # by rank and number of the request
        self._numbers = itertools.count(1)
        self.stopped: dict[int, Message] = {}  # by rank: the event; in the order in which they have stopped

    @property
    def is_attached(self) -> bool:
        """Whether a client debugs the ranks."""
        return self._on_event is not None

    @property
    def ranks(self) -> range:
        """The ranks of the session."""
        return range(len(self._launch().table))

    def host_of(self, rank: int) -> str:
        """Return the host of a rank."""
        return self._launch().table[rank].info.host

    def is_running(self, rank: int) -> bool:
        """Whether a rank runs a cell and is not stopped."""
        return self._launch().table[rank].state == RankState.RUNNING and rank not in self.stopped

    def attach(self, on_event: Callable[[int, Message], None]) -> None:
        """Begin; ``on_event`` is called with the rank and each event, on the link's thread."""
        self._on_event = on_event
        self.prepare()

    def prepare(self) -> None:
        """Attach to ranks that have started since; waits until they reply."""
        if self._on_event is None or self._launch().lost_because:
            return
        futures = []
        with self._changing:
            for entry in [each for each in self._launch().table if self._on_event is not None and self._is_new(each)]:
                self.on_end(entry.info.rank)  # of the rank's earlier process
                self._attached.add(entry.engine)
                futures += [
                    self._send(entry, "attach", {}),
                    self._send(entry, "setExceptionBreakpoints", self._filters),
                ]
                for ranks, arguments in list(self._breakpoints.values()):
                    if ranks is None or entry.info.rank in ranks:
                        futures.append(self._send(entry, "setBreakpoints", arguments))
        wait(futures, DEBUG_REPLY_SECONDS)

    def _is_new(self, entry: RankEntry) -> bool:
        return entry.state in _REACHABLE and entry.engine not in self._attached

    def detach(self) -> None:
        """End: ranks that are stopped go on, and stop no more."""
        with self._changing:
            if self._on_event is None:
                return
            self._on_event = None
            futures = self.release([entry for entry in self._launch().table if entry.engine in self._attached])
            with self._lock:
                self._attached.clear()
                self._breakpoints.clear()
                self._filters = {}
                self.stopped.clear()
        wait(futures, DEBUG_REPLY_SECONDS)

    def release(self, entries: Iterable[RankEntry]) -> list[Future[Message]]:
        """Let ranks go on that this client, or that of an earlier notebook, has stopped."""
        if self._launch().lost_because:
            return []
        return [self._send(entry, "disconnect", {}) for entry in entries if entry.state in _REACHABLE]

    # Requests

    def set_breakpoints(
        self, file: str, breakpoints: Sequence[Message], ranks: Collection[int] | None, *, is_cell: bool
    ) -> list[Future[Message]]:
        """Replace the breakpoints of a file, or of a cell by the name of its file on ranks; ``None``: on all ranks."""
        source = {"name": file} if is_cell else {"path": file}
        arguments = {"source": source, "breakpoints": list(breakpoints)}
        chosen = None if ranks is None else tuple(ranks)
        with self._lock:
            before, _ = self._breakpoints.pop(file, (chosen, {}))
            if breakpoints:
                self._breakpoints[file] = chosen, arguments
        left = () if chosen is None else set(self.ranks if before is None else before) - set(chosen)
        for rank in left:
            self.request(rank, "setBreakpoints", {"source": source, "breakpoints": []})
        return [self.request(rank, "setBreakpoints", arguments) for rank in chosen or self.ranks]

    def set_filters(self, arguments: Message) -> None:
        """Choose the exceptions at which all ranks stop."""
        self._filters = arguments
        wait([self.request(rank, "setExceptionBreakpoints", arguments) for rank in self.ranks], DEBUG_REPLY_SECONDS)

    def forward(self, rank: int, request: Message) -> Future[Message]:
        """Send a client's request to a rank; numbers of frames and values are translated in both directions."""
        arguments = dict(request.get("arguments") or {})
        for name in ("frameId", "variablesReference"):
            if arguments.get(name):
                arguments[name] = self.locate(arguments[name])[1]
        return self.request(rank, request["command"], arguments)

    def locate(self, number: int) -> tuple[int, int]:
        """Return the rank of a frame or a value, and its number there."""
        found, rank = divmod(number - FIRST_ID, len(self.ranks))
        return rank, found

    def request(self, rank: int, command: str, arguments: Message) -> Future[Message]:
        """Send a request to a rank and return a future of the response."""
        entry = self._launch().table[rank]
        if self._launch().lost_because or entry.state not in _REACHABLE:
            return _failed(command, f"rank {rank} can't be reached")
        return self._send(entry, command, arguments)

    def _send(self, entry: RankEntry, command: str, arguments: Message) -> Future[Message]:
        future: Future[Message] = Future()
        number = next(self._numbers)
        key = entry.info.rank, number
        message = {"type": "request", "seq": number, "command": command, "arguments": arguments}

        def on_sent(sent: Future[Any]) -> None:
            """Fail the request if it could not be served: a response will not come."""
            error = sent.exception()
            text = str(error) if error else sent.result()["content"].get("evalue", "")
            if text and self._replies.pop(key, None) is not None:
                future.set_result(_failure(command, text))

        self._replies[key] = future
        try:
            self._launch().open_link.request(entry.engine, Debug(message=message)).add_done_callback(on_sent)
        except ClusterClosedError as error:
            self._replies.pop(key, None)
            return _failed(command, str(error))
        return future

    # What ranks publish, on the link's thread

    def take(self, rank: int, message: Message) -> None:
        """Take a response or an event of a rank."""
        if message["type"] == "response":
            future = self._replies.pop((rank, message["request_seq"]), None)
            if message["success"] and message["command"] in _RESUMING:
                with self._lock:
                    self.stopped.pop(rank, None)
            if future is not None:
                future.set_result(self._to_client(rank, message))
            return
        if self._on_event is None:
            if message["event"] == "stopped":  # as the client went
                self.release([self._launch().table[rank]])
            return
        body = message["body"] | {"threadId": FIRST_THREAD + rank}
        with self._lock:
            if message["event"] == "stopped":
                self.stopped[rank] = body
            else:
                self.stopped.pop(rank, None)
        if message["event"] == "stopped":
            self.request(rank, "noticed", {}).add_done_callback(partial(self._on_noticed, rank))
        self._on_event(rank, message | {"body": body})

    def _on_noticed(self, rank: int, response: Future[Message]) -> None:
        """Attach again, before the next cell, to a rank that went on as no client had noticed its stop in time."""
        if not response.result()["success"]:
            with self._lock:
                self._attached.discard(self._launch().table[rank].engine)
            self._on_continued(rank)

    def on_end(self, rank: int) -> None:
        """Handle the end of a rank: no response will come, and it is not stopped any more."""
        for key in [key for key in list(self._replies) if key[0] == rank]:
            future = self._replies.pop(key, None)
            if future is not None:
                future.set_result(_failure("", f"rank {rank} has ended"))
        self._on_continued(rank)

    def _on_continued(self, rank: int) -> None:
        """Publish that a rank is not stopped any more, though no client has let it go on."""
        with self._lock:
            was_stopped = self.stopped.pop(rank, None) is not None
        if was_stopped and self._on_event is not None:
            body = {"threadId": FIRST_THREAD + rank, "allThreadsContinued": False}
            self._on_event(rank, {"type": "event", "event": "continued", "body": body})

    def on_end_of_all(self) -> None:
        """Handle the end of all ranks, at a reset."""
        for rank in self.ranks:
            self.on_end(rank)

    def _to_client(self, rank: int, message: Message) -> Message:
        """Make the numbers of frames and values unique over all ranks."""
        body = dict(message.get("body") or {})
        self._number(rank, body, "variablesReference")
        for name, key in (("stackFrames", "id"), ("scopes", "variablesReference"), ("variables", "variablesReference")):
            if name in body:
                body[name] = [dict(each) for each in body[name]]
                for each in body[name]:
                    self._number(rank, each, key)
        return message | {"body": body}

    def _number(self, rank: int, holder: Message, key: str) -> None:
        if holder.get(key):
            holder[key] = FIRST_ID + holder[key] * len(self.ranks) + rank


def _failure(command: str, text: str) -> Message:
    return {"type": "response", "command": command, "success": False, "message": text, "body": {}}


def _failed(command: str, text: str) -> Future[Any]:
    future: Future[Mapping[str, Any]] = Future()
    future.set_result(_failure(command, text))
    return future
