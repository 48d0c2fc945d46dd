"""Have debugpy debug the notebook's own process, as ipykernel does, but within time limits.

Covers: when debugpy can be asked, and the reply where it can't; the pause that it needs between two clients.
Does not cover: the ranks (``debug_requests``), the code that debugpy leaves alone (``debugpy_rules``).

debugpy can't start while a cell runs. If a client connects to it while the connection of the last one is being closed,
it may accept no client any more (debugpy 1.8, ``adapter/clients.py``), so there is a pause between two clients. A
debugpy that does not reply is not asked again; the ranks are debugged without it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

from ..protocol.time_limits import DEBUG_REPLY_SECONDS, DEBUGPY_PAUSE_SECONDS, DEBUGPY_SECONDS
from .debugpy_rules import hide_internals, leave_processes_alone

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from ..features.debugger.client import Message

log = logging.getLogger(__name__)

_RAISED = "raised"  # the filter that stops where an exception is raised
# Requests that begin or end a client's work; they succeed where debugpy is not asked.
_OF_ALL = ("attach", "configurationDone", "disconnect", "setExceptionBreakpoints", "threads")
_BUSY = "a cell ran when the debugger was turned on; turn it off and on again"
_DEAF = f"debugpy has not replied within {DEBUGPY_SECONDS:g} s; restart the kernel to debug its own cells, too"
_MISSING = "debugpy is not installed in the notebook's environment"


class NotebookDebugger:
    """Debugs the notebook's own process; ``ask`` has ipykernel serve a request, which asks debugpy if need be."""

    def __init__(self, kernel: Any, ask: Callable[[Message], Awaitable[Message]]) -> None:
        self._kernel, self._ask = kernel, ask
        self._debugger: Any = getattr(kernel, "debugger", None)
        self._problem = _MISSING if self._debugger is None else ""  # why debugpy is not asked
        self._left_at = -DEBUGPY_PAUSE_SECONDS  # when the last client has left
        self._turns = asyncio.Lock()  # ipykernel takes the next response for that to its request
        self._loop: asyncio.AbstractEventLoop | None = None  # of the control thread
        self._filters: Message = {}  # the last request for exceptions at which to stop
        self._is_for_ranks = False  # a cell for ranks runs
        self.is_on: bool = self._debugger is not None and self._debugger.is_started
        if "pydevd" in sys.modules:
            leave_processes_alone()

    @property
    def breakpoints(self) -> Mapping[str, list[Message]]:
        """Breakpoints by file."""
        return self._debugger.breakpoint_list if self.is_on else {}

    @property
    def is_stopped(self) -> bool:
        """Whether a thread of the notebook's process is stopped."""
        return self.is_on and bool(self._debugger.stopped_threads)

    async def begin(self, request: Message, *, is_busy: bool) -> Message:
        """Serve an "initialize" request; it fails if debugpy can't debug the notebook's process."""
        if self._problem in ("", _BUSY):
            self._problem = _BUSY if is_busy else ""
        if self._problem:
            return {"success": False}
        leave_processes_alone()
        hide_internals(self._kernel)
        await asyncio.sleep(self._left_at + DEBUGPY_PAUSE_SECONDS - time.monotonic())
        reply = await self._ask_in_time(request)
        self.is_on = bool(reply.get("success"))
        return reply

    async def ask(self, request: Message) -> Message:
        """Serve a request that is about the notebook's process."""
        command = request["command"]
        if self.is_on and command == "setExceptionBreakpoints":
            self._filters = request
            return await self._ask_in_turn(self._filters_now())
        if self.is_on and command in ("attach", "disconnect"):
            return await self._ask_in_time(request)
        if self.is_on or (self._debugger is not None and command in self._debugger.static_debug_handlers):
            return await self._ask_in_turn(request)
        if self._debugger is not None and command == "variables":  # of the notebook, which ipykernel lists
            return dict(await self._debugger.variables(request))
        return self._reply_without_debugpy(request)

    def _reply_without_debugpy(self, request: Message) -> Message:
        command, arguments = request["command"], request.get("arguments") or {}
        if command in _OF_ALL:
            return {"success": True, "body": {}}
        text = f"only the ranks are debugged: {self._problem}"
        if command == "setBreakpoints":
            found = [
                {"verified": False, "line": each["line"], "message": text}
                for each in arguments.get("breakpoints") or ()
            ]
            return {"success": True, "body": {"breakpoints": found}}
        return {"success": False, "message": text}

    async def _ask_in_turn(self, request: Message) -> Message:
        self._loop = asyncio.get_running_loop()
        async with self._turns:
            return await self._ask(request)

    async def _ask_in_time(self, request: Message) -> Message:
        """Serve a request with which a client begins or ends; without a response in time debugpy is not asked again."""
        try:
            reply = await asyncio.wait_for(self._ask_in_turn(request), DEBUGPY_SECONDS)
        except (TimeoutError, asyncio.TimeoutError):  # one class since Python 3.11
            log.warning(_DEAF)
            self._problem, self.is_on = _DEAF, False
            self._debugger.stop()
            self._debugger.is_started, self._debugger.breakpoint_list = False, {}
            self._debugger.stopped_threads = set()
            reply = {"success": request["command"] in _OF_ALL, "message": _DEAF, "body": {}}
        if request["command"] == "disconnect":
            self._left_at, self.is_on, self._filters = time.monotonic(), False, {}
        return reply

    # Exceptions in cells for ranks, on the main thread

    def begin_cell_for_ranks(self) -> None:
        """Do not stop the notebook where an interrupt, or an error of ranks, is raised in it: ranks stop themselves."""
        self._change_filters(is_for_ranks=True)

    def end_cell(self) -> None:
        """Stop again where an exception is raised."""
        self._change_filters(is_for_ranks=False)

    def _change_filters(self, *, is_for_ranks: bool) -> None:
        has_changed, self._is_for_ranks = is_for_ranks != self._is_for_ranks, is_for_ranks
        if not has_changed or self._loop is None or _RAISED not in _filters_of(self._filters):
            return
        reply = asyncio.run_coroutine_threadsafe(self._ask_in_turn(self._filters_now()), self._loop)
        if not wait([reply], DEBUG_REPLY_SECONDS).done:
            log.warning("debugpy has not replied within %g s", DEBUG_REPLY_SECONDS)

    def _filters_now(self) -> Message:
        if not self._is_for_ranks:
            return self._filters
        filters = [each for each in _filters_of(self._filters) if each != _RAISED]
        return self._filters | {"arguments": self._filters["arguments"] | {"filters": filters}}


def _filters_of(request: Message) -> list[str]:
    return list((request.get("arguments") or {}).get("filters") or ())
