"""Drive a Jupyter kernel and record when each of its messages arrives.

Covers: starting a kernel from any environment, running cells, arrival times of messages, ending it.
Does not cover: the code of the cells (tools, compare.measures), the text of the messages (outputs).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

from . import processes
from .outputs import final_text, text_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jupyter_client.blocking.client import BlockingKernelClient

START_TIMEOUT_S = 90.0
EXIT_TIMEOUT_S = 5.0


class KernelError(RuntimeError):
    """A cell failed or timed out, or the kernel died."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the kernel's iopub channel."""

    time_s: float  # of its arrival, by time.perf_counter
    kind: str
    content: dict[str, Any]

    @property
    def text(self) -> str:
        return text_of(self.kind, self.content)


@dataclass(slots=True)
class CellRecord:
    """The messages of one cell, from sending it until the kernel is idle."""

    sent_s: float
    idle_s: float = 0.0
    messages: list[Message] = field(default_factory=list)
    failure: str = ""

    @property
    def seconds(self) -> float:
        return self.idle_s - self.sent_s

    @property
    def text(self) -> str:
        """The text of the cell's final output."""
        return final_text((message.kind, message.content) for message in self.messages)

    def seconds_until(self, text: str) -> float | None:
        """Return the time from sending until a message contained ``text``, or None if no message did."""
        return next((m.time_s - self.sent_s for m in self.messages if text in m.text), None)


class _Manager(KernelManager):
    """A manager that starts a command instead of an installed kernelspec."""

    command: Sequence[str] = ()

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(argv=list(self.command), display_name="benchmark", language="python")

    def local_pid(self) -> int:
        provisioner: Any = self.provisioner  # the local one; the base class has no pid
        return int(provisioner.pid)


class DrivenKernel:
    """A kernel with one blocking client.

    Parameters
    ----------
    command
        The command line, with ``{connection_file}`` as the placeholder for the file's name.
    environment
        Added to this process's environment. Profiles and connection files go to a folder that is removed at the end.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.token = processes.new_token()
        self._folder = tempfile.TemporaryDirectory(prefix="disttrain-bench-", ignore_cleanup_errors=True)
        own = {
            processes.TOKEN_VARIABLE: self.token,
            "IPYTHONDIR": f"{self._folder.name}/ipython",
            "JUPYTER_RUNTIME_DIR": f"{self._folder.name}/runtime",
        }
        self._environment = {**os.environ, **environment, **own}
        Path(own["IPYTHONDIR"]).mkdir()
        Path(own["JUPYTER_RUNTIME_DIR"]).mkdir()
        self._log = Path(self._folder.name) / "kernel.log"
        self._manager = _Manager(connection_file=f"{own['JUPYTER_RUNTIME_DIR']}/kernel.json")
        self._manager.command = command
        self._client: BlockingKernelClient | None = None
        self.started_s = 0.0
        self.pid = 0

    def start(self) -> None:
        """Start the kernel and wait until it replies on both channels."""
        self.started_s = time.perf_counter()
        with self._log.open("wb") as log:  # keeps the kernel's log out of the printed results
            self._manager.start_kernel(env=self._environment, cwd=self._folder.name, stdout=log, stderr=log)
        self.pid = self._manager.local_pid()
        self._client = self._manager.client()
        # No heartbeat and no stdin: neither is measured, and each would add a thread to the measuring process.
        self._client.start_channels(stdin=False, hb=False)
        deadline = self.started_s + START_TIMEOUT_S
        while time.perf_counter() < deadline:
            request = self._client.kernel_info()
            try:
                self._reply(request, 2.0)
                self._until_idle(CellRecord(0.0), request, time.perf_counter() + 0.1)
            except KernelError:
                self._check_alive()
            else:
                return
        raise KernelError(f"the kernel did not reply within {START_TIMEOUT_S:.0f} s")

    @property
    def connection_file(self) -> str:
        """The path of the file by which other clients connect."""
        return str(self._manager.connection_file)

    def interrupt(self) -> None:
        """Interrupt the running cell."""
        self._manager.interrupt_kernel()

    def open_comm(self, target: str) -> None:
        """Open a comm, as the tool's frontend does."""
        assert self._client is not None, "start the kernel first"
        content = {"comm_id": processes.new_token(), "target_name": target, "data": {}}
        self._client.shell_channel.send(self._client.session.msg("comm_open", content))

    def run(self, cell: str, *, timeout_s: float = 60.0, check: bool = True) -> CellRecord:
        """Run a cell until the kernel is idle.

        Raises
        ------
        KernelError
            If the cell took longer than ``timeout_s``, the kernel died, or (with ``check``) the cell failed.
        """
        assert self._client is not None, "start the kernel first"
        record = CellRecord(time.perf_counter())
        request = self._client.execute(cell, allow_stdin=False, stop_on_error=False)
        try:
            self._until_idle(record, request, record.sent_s + timeout_s)
            reply = self._reply(request, 10.0)
        except KernelError as problem:
            start = " / ".join(line.strip() for line in cell.strip().splitlines()[:2])
            raise KernelError(f"{problem} in cell {start[:60]!r}") from problem
        if reply["status"] != "ok":
            record.failure = f"{reply.get('ename')}: {reply.get('evalue')}".strip().splitlines()[0]
            if check:
                raise KernelError(f"the cell failed: {record.failure[:160]}")
        return record

    def ask(self, kind: str, code: str, *, timeout_s: float = 5.0) -> tuple[float, dict[str, Any]]:
        """Ask to ``"complete"`` or to ``"inspect"`` a cell at its end; return the seconds until the reply, and that.

        Raises a KernelError if there is no reply within ``timeout_s``.
        """
        assert self._client is not None, "start the kernel first"
        began = time.perf_counter()
        reply = self._reply(getattr(self._client, kind)(code), timeout_s)
        return time.perf_counter() - began, reply

    def end(self) -> int:
        """End the kernel and every process it started; return how many of them still ran after 5 s."""
        if self._client is not None:
            self._client.stop_channels()
        with contextlib.suppress(Exception):
            self._manager.shutdown_kernel()  # by a message first, so that the kernel can end its children
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        while (left := processes.left(self.token)) and time.monotonic() < deadline:
            time.sleep(0.1)
        processes.end(self.token)
        with contextlib.suppress(Exception):
            self._manager.cleanup_resources()
        self._folder.cleanup()
        return left

    def _until_idle(self, record: CellRecord, request: str, deadline_s: float) -> None:
        channel = self._client.iopub_channel if self._client else None
        assert channel is not None
        assert channel.socket is not None
        session = channel.session
        while True:
            left_s = deadline_s - time.perf_counter()
            if left_s <= 0:
                raise KernelError(f"not idle within {deadline_s - record.sent_s:.0f} s")
            if not channel.socket.poll(int(min(left_s, 2.0) * 1000) + 1):
                self._check_alive()
                continue
            parts = channel.socket.recv_multipart()
            now_s = time.perf_counter()  # before the message is parsed, which is work of this process
            message = session.deserialize(session.feed_identities(parts)[1])
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["header"]["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                record.idle_s = now_s
                return
            record.messages.append(Message(now_s, kind, content))

    def _reply(self, request: str, timeout_s: float) -> dict[str, Any]:
        assert self._client is not None
        while True:
            try:
                reply = self._client.get_shell_msg(timeout=timeout_s)
            except Empty as error:
                raise KernelError(f"no reply within {timeout_s:.0f} s") from error
            if reply["parent_header"].get("msg_id") == request:
                return dict(reply["content"])

    def _check_alive(self) -> None:
        if not self._manager.is_alive():
            log = self._log.read_text(errors="replace").splitlines()
            last = [line for line in log if line.strip() and "WARNING" not in line][-1:]
            raise KernelError(f"the kernel died; last line of its log: {''.join(last)[:160] or '(empty)'}")
