"""A client of the Debug Adapter Protocol at a kernel's control channel, as JupyterLab is one."""

from __future__ import annotations

import itertools
import queue
import time
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_client.blocking.client import BlockingKernelClient
    from typing_extensions import Self

SECONDS = 30.0


class DapClient:
    """Sends debug_request messages and collects debug_event messages, each on a connection of its own."""

    def __init__(self, client: BlockingKernelClient, client_id: str = "tests") -> None:
        self._client = client
        self._client.start_channels(shell=False, stdin=False, hb=False)
        self._client_id = client_id
        self._numbers = itertools.count(1)
        self._events: deque[dict[str, Any]] = deque()
        try:
            self._subscribe()
        except TimeoutError:
            self.close()
            raise

    def _subscribe(self) -> None:
        """Wait until messages on iopub arrive."""
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            self._client.control_channel.send(self._client.session.msg("kernel_info_request", {}))
            try:
                self._client.get_control_msg(timeout=SECONDS)
                self._client.get_iopub_msg(timeout=0.2)
            except queue.Empty:
                continue
            return
        raise TimeoutError("no message on the control channel or on iopub")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections without a request, as a browser does that is killed."""
        self._client.stop_channels()

    def attach(self) -> Self:
        """Begin to debug."""
        self.ask("initialize", clientID=self._client_id, adapterID="python3")
        self.ask("attach")
        return self

    def request(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and return the response; raises a TimeoutError if none comes."""
        content = {"type": "request", "seq": next(self._numbers), "command": command, "arguments": arguments}
        message = self._client.session.msg("debug_request", content)
        self._client.control_channel.send(message)
        until = time.monotonic() + SECONDS
        while True:
            try:
                reply = self._client.get_control_msg(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"no reply to {command!r}") from None
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                return dict(reply["content"])

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request that has to succeed; return the body of the response."""
        response = self.request(command, **arguments)
        assert response.get("success"), response
        return dict(response.get("body") or {})

    def event(self, name: str, matches: Callable[[dict[str, Any]], bool] = lambda _body: True) -> dict[str, Any]:
        """Wait for an event and return its body; earlier events are dropped."""
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            while self._events:
                event = self._events.popleft()
                if event["event"] == name and matches(event.get("body", {})):
                    return dict(event.get("body", {}))
            self._receive(until - time.monotonic())
        raise TimeoutError(f"no event {name!r}")

    def _receive(self, timeout_s: float) -> None:
        try:
            message = self._client.get_iopub_msg(timeout=max(0.01, timeout_s))
        except queue.Empty:
            return
        if message["msg_type"] == "debug_event":
            self._events.append(message["content"])

    def set_breakpoints(self, cell: str, *lines: int, **options: Any) -> list[dict[str, Any]]:
        """Set the breakpoints of a cell; the options apply to each."""
        path = self.ask("dumpCell", code=cell)["sourcePath"]
        asked = [{"line": line} | options for line in lines]
        body = self.ask("setBreakpoints", source={"path": path}, breakpoints=asked, sourceModified=False)
        return list(body["breakpoints"])

    def stopped(self, *ranks: int, reason: str | None = None) -> None:
        """Wait until these ranks have stopped."""
        waiting = {1_000_000 + rank for rank in ranks}
        while waiting:
            body = self.event("stopped", lambda body: body["threadId"] in waiting)
            assert reason in (None, body["reason"]), body
            waiting.discard(body["threadId"])

    def frames(self, rank: int) -> list[dict[str, Any]]:
        """Return the frames of a rank, the innermost first."""
        return list(self.ask("stackTrace", threadId=1_000_000 + rank)["stackFrames"])

    def line(self, rank: int) -> int:
        """Return the line at which a rank is."""
        return int(self.frames(rank)[0]["line"])

    def variables(self, rank: int, scope: int = 0) -> dict[str, dict[str, Any]]:
        """Return the variables of a scope of a rank's innermost frame, by name."""
        scopes = self.ask("scopes", frameId=self.frames(rank)[0]["id"])["scopes"]
        found = self.ask("variables", variablesReference=scopes[scope]["variablesReference"])["variables"]
        return {each["name"]: each for each in found}

    def evaluate(self, rank: int, expression: str) -> str:
        """Return the text of an expression's value in a rank's innermost frame."""
        found = self.ask("evaluate", expression=expression, frameId=self.frames(rank)[0]["id"], context="repl")
        return str(found["result"])

    def go(self, rank: int, command: str = "continue") -> None:
        """Let a rank go on: "continue", "next", "stepIn" or "stepOut"."""
        self.ask(command, threadId=1_000_000 + rank, singleThread=True)
