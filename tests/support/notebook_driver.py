"""Drive a real kernel as a notebook does, and read what a user would see."""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import re
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import zmq
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode, v4

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

# Below those that the system chooses for others, which may take one between its choice here and the kernel's start.
_FIRST_PORT = 20000 + os.getpid() % 100 * 100
_PORTS = itertools.cycle(range(_FIRST_PORT, _FIRST_PORT + 100))
_PORT_NAMES = ("shell_port", "iopub_port", "stdin_port", "hb_port", "control_port")

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def plain(text: str) -> str:
    """Return a text without its colours."""
    return _ANSI.sub("", text)


@dataclass
class Outcome:
    """The output of a cell in the notebook, with every update applied."""

    outputs: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)  # of questions that the cell has asked
    reply: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """All visible text, without colours."""
        return plain(self.coloured)

    @property
    def coloured(self) -> str:
        """All visible text."""
        parts = []
        for output in self.outputs:
            if output["type"] == "stream":
                parts.append(output["text"])
            elif output["type"] == "error":
                parts.append("\n".join(output["traceback"]))
            else:
                parts.append(output["data"].get("text/plain", ""))
        return "\n".join(part.rstrip("\n") for part in parts if part)

    @property
    def lines(self) -> list[str]:
        """The lines of the text, without the blanks that align the labels."""
        return [re.sub(r"\s+([│┃]) ?", r" \1 ", line).rstrip() for line in self.text.splitlines()]

    @property
    def status(self) -> str:
        return str(self.reply.get("status"))

    @property
    def error(self) -> str:
        """The error's name and text; empty without an error."""
        return f"{self.reply.get('ename', '')}: {self.reply.get('evalue', '')}" if self.status == "error" else ""

    def check(self) -> Outcome:
        """Fail the test if the cell failed."""
        assert self.status == "ok", self.text
        return self

    def mimes(self) -> list[str]:
        """The kinds of rich output, in order."""
        return [mime for output in self.outputs if "data" in output for mime in output["data"]]


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0


class Notebook:
    """A kernel that has loaded the extension, and its notebook."""

    def __init__(self, **kernel_options: Any) -> None:
        ports = dict(zip(_PORT_NAMES, filter(_is_free, _PORTS), strict=False))
        self._manager = KernelManager(kernel_name="python3", cache_ports=False, **ports)
        self._manager.start_kernel(**kernel_options)
        self.client = self._manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.run("%load_ext jupyter_disttrain").check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Shut the kernel down as JupyterLab does."""
        self.client.stop_channels()
        if self._manager.has_kernel:
            self._manager.shutdown_kernel(now=False)

    @property
    def connection_file(self) -> str:
        """The path of the kernel's connection file."""
        return str(self._manager.connection_file)

    def connect(self) -> Any:
        """Return another client of the kernel, whose channels are not started."""
        return self._manager.blocking_client()

    @property
    def alive(self) -> bool:
        return bool(self._manager.is_alive())

    @property
    def pid(self) -> int:
        """The process id of the kernel."""
        return int(self._manager.provisioner.pid)  # type: ignore[union-attr]

    def interrupt(self) -> None:
        """Send SIGINT to the kernel's process group, as the stop button does; callable from any thread.

        The manager's own method leaves an event loop behind in every thread that calls it.
        """
        os.killpg(os.getpgid(self.pid), signal.SIGINT)

    def interrupt_at(self, *texts: str) -> Callable[[dict[str, Any], Outcome], None]:
        """Return an ``on_message`` that interrupts the cell once after each of these texts has appeared in it."""
        found: set[str] = set()

        def on_message(_message: dict[str, Any], outcome: Outcome) -> None:
            for text in texts:
                if text not in found and text in outcome.text:
                    found.add(text)
                    self.interrupt()

        return on_message

    def run(
        self,
        source: str,
        timeout: float = 120,
        on_message: Callable[[dict[str, Any], Outcome], None] | None = None,
        answer: Callable[[str, Outcome], str | None] | None = None,
    ) -> Outcome:
        """Run a cell; ``on_message`` gets each message after it was applied.

        ``answer`` gets the prompt of each question and returns the answer, or None to give none; without it the front
        end takes no input.
        """
        msg_id = self.client.execute(source, allow_stdin=answer is not None)
        return self.outcome(msg_id, timeout, on_message, answer)

    def outcome(
        self,
        msg_id: str,
        timeout: float = 120,
        on_message: Callable[[dict[str, Any], Outcome], None] | None = None,
        answer: Callable[[str, Outcome], str | None] | None = None,
    ) -> Outcome:
        """Wait for the cell of this request to end.

        Its reply alone is not enough: after an error the kernel aborts queued cells until it is idle.
        """
        outcome = Outcome()
        displays: dict[str, list[dict[str, Any]]] = {}
        deadline = time.monotonic() + timeout
        clear_next = False
        while True:
            if answer is not None and not self._wait_for_output(answer, outcome, deadline):
                continue
            try:
                message = self.client.get_iopub_msg(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"the cell did not end within {timeout} s; so far:\n{outcome.text}") from None
            if message["parent_header"].get("msg_id") != msg_id:
                continue
            if _is_idle(message):
                break
            clear_next = _take(outcome, displays, message, clear_next)
            if on_message is not None:
                on_message(message, outcome)
        reply = self.client.get_shell_msg(timeout=60)
        while reply["parent_header"].get("msg_id") != msg_id:
            reply = self.client.get_shell_msg(timeout=60)  # a cell on which an earlier test timed out
        outcome.reply = reply["content"]
        return outcome

    def _wait_for_output(self, answer: Callable[[str, Outcome], str | None], outcome: Outcome, deadline: float) -> bool:
        """Wait for output or a question, and answer the question; return whether there is output, or no time left."""
        iopub, stdin = self.client.iopub_channel.socket, self.client.stdin_channel.socket
        ready, _, _ = zmq.select([iopub, stdin], [], [], max(0.01, deadline - time.monotonic()))
        if iopub in ready or not ready:
            return True
        content = self.client.get_stdin_msg(timeout=0)["content"]
        outcome.prompts.append(content["prompt"])
        text = answer(content["prompt"], outcome)
        if text is not None:
            self.client.input(text)
        return False


def _is_idle(message: dict[str, Any]) -> bool:
    return message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"


def _take(
    outcome: Outcome, displays: dict[str, list[dict[str, Any]]], message: dict[str, Any], clear_next: bool
) -> bool:
    """Apply a message as a front end does; return whether the next output clears the outputs before it."""
    kind, content = message["msg_type"], message["content"]
    if kind == "clear_output":
        if not content["wait"]:
            outcome.outputs.clear()
        return bool(content["wait"])
    if kind in ("stream", "display_data", "execute_result", "error", "update_display_data"):
        if clear_next and kind != "update_display_data":
            outcome.outputs.clear()
            clear_next = False
        _apply(outcome, displays, kind, content)
    return clear_next


def _apply(outcome: Outcome, displays: dict[str, list[dict[str, Any]]], kind: str, content: dict[str, Any]) -> None:
    if kind == "stream":
        last = outcome.outputs[-1] if outcome.outputs else None
        if last is not None and last["type"] == "stream" and last["name"] == content["name"]:
            last["text"] += content["text"]
        else:
            outcome.outputs.append({"type": "stream", "name": content["name"], "text": content["text"]})
    elif kind == "error":
        outcome.outputs.append({"type": "error", **content})
    elif kind == "update_display_data":
        for output in displays.get(content["transient"]["display_id"], []):
            output["data"], output["metadata"] = content["data"], content["metadata"]
    else:
        output = {"type": kind, "data": content["data"], "metadata": content["metadata"]}
        outcome.outputs.append(output)
        display_id = content.get("transient", {}).get("display_id")
        if display_id:
            displays.setdefault(display_id, []).append(output)


def execute_notebook(cells: list[str], *, allow_errors: bool = False) -> NotebookNode:
    """Execute cells with nbclient, as nbconvert does."""
    notebook = v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", allow_errors=allow_errors)
    asyncio.run(client.async_execute())  # its own execute() leaves an event loop open
    return notebook
