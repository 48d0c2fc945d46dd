"""Run the nanny: the parent process of each rank.

Covers: publishing and logging the rank's output, forwarding signals, reporting the rank's exit, ending leftover child
processes.
Does not cover: the rank itself (``rank.startup.app``), receiving what the nanny publishes (``client.transport.link``).

As the rank's parent, the nanny gets its exit status. It is forked before torch is imported, so it is small. It runs one
loop over the rank's pipes, the rank's socket, the controller's control channel and the rank's exit. It never waits for
the rank.
"""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import socket
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq
from jupyter_client.session import Session

from ... import rank_sessions
from ...features.telemetry.rank.metrics_writer import MetricsFile
from ...features.telemetry.rank.process_stats import Vitals
from ...private_files import replace_private
from ...process_table import runs
from ...protocol import requests
from ...protocol.environment import CONNECTION_FILE, KEEP, LOCAL_DIR, PROFILE_DIR
from ...protocol.messages import METRICS, DebugMessage, LogTrouble, NannyHello, Record
from ...protocol.metric_blocks import unpack
from ...protocol.requests import Handlers, Reply
from ...protocol.time_limits import (
    FIRST_PAUSE_SECONDS,
    HANG_PATIENCE_SECONDS,
    KILL_GRACE_SECONDS,
    NANNY_REPEAT_SECONDS,
    NAP_SECONDS,
)
from ..startup.connection import Connection, Hellos
from .controller_watch import ClusterWatch, open_probe
from .exit_report import ExitReport
from .ipc import CELL_BEGIN, IDENTITY, LATE, PLACED, SAMPLES, NannyEnd, Wire, read_all
from .log_file import RankLog
from .output_batching import OutputBatcher
from .process_tree import Wake, adopt_orphans, interrupt, is_ending, signal_main_thread
from .publish import ActivityReporter, SideChannel
from .replay_buffer import ReplayBuffer

if TYPE_CHECKING:
    import resource
    from collections.abc import Callable

    from ...protocol.rank_death import RankDeath


serves = Handlers()


class Nanny:
    """Supervise one rank until it exits."""

    def __init__(self, pid: int, wire: Wire, on_end: Callable[[], None], lifeline: int | None) -> None:
        self._pid = pid
        self._on_end = on_end  # called once no process of the rank is left
        self._lifeline = lifeline  # a descriptor that shows the end of the process that the launcher has started
        self._exit_report = ExitReport(pid, wire)
        self._wire = NannyEnd(wire)
        self._pipes = {wire.stdout_read: "stdout", wire.stderr_read: "stderr"}
        self._taken: list[tuple[str, bytes]] = []  # (stream, bytes) read from the pipes, not handled yet
        self._engine = ""
        self._hub_id: int | None = None
        self._has_subscriber = False
        self._hellos = Hellos()
        self._interrupt_at = ""  # the cell to interrupt as soon as it starts
        self._wake_up = Wake(pid, lambda: self._wire.is_pending)
        self._expected_end = False
        self._kill_at: float | None = None
        self._wake_read, self._wake_write = socket.socketpair()
        self._stop_requested = False

    def run(self) -> None:
        """Run until the rank has exited; then report the exit and end what the rank left behind."""
        self._become_reaper()
        self._connection = connection = Connection.wait(os.environ[CONNECTION_FILE])
        connection.check_ports()
        local = Path(os.environ[LOCAL_DIR])
        held = rank_sessions.HeldSession(local, self._pid)
        rank_sessions.end_abandoned(local)  # what the rank that this one replaces left behind
        self._session = Session(key=connection.key, signature_scheme=connection.signature_scheme)
        self._identity = f"nanny-{uuid.uuid4().hex}"
        self._context = zmq.Context()
        self._pub = connection.connect(self._context.socket(zmq.XPUB), "iopub", SNDHWM=0, LINGER=2000)
        self._out = ReplayBuffer(self._pub, keeps=bool(os.environ.get(KEEP)))
        self._side_channel = SideChannel(self._pub, self._session)
        self._use = ActivityReporter(self._wire, self._side_channel)
        self._vitals = Vitals(self._pid, self._wire, self._wake, self._side_channel.publish_figures)
        self._control = connection.connect(
            self._context.socket(zmq.ROUTER),
            "control",
            IDENTITY=self._identity.encode(),
            LINGER=1000,
        )
        self._probe = open_probe(connection, self._context, self._identity)
        self._cluster = ClusterWatch(connection, self._control if self._probe is None else self._probe)
        self._log = RankLog(self._report_log_trouble)
        self._metrics = MetricsFile(self._report_log_trouble)
        self._output = OutputBatcher(self._publish, self._log)
        try:
            self._loop()
        finally:
            # Also what this process adopted from its rank; not warm processes.
            rank_sessions.end(lambda: rank_sessions.descendants(os.getpid()))
            held.release()
            self._log.close()
            self._metrics.close()
            self._on_end()  # before the final messages: ending a whole job kills this process soon
            self._context.destroy(linger=2000 if self._cluster.is_connected else 0)

    def _become_reaper(self) -> None:
        """Adopt orphans of the rank's children, ignore SIGINT, and wake the loop when a child exits."""
        adopt_orphans()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._wake_write.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno())

    def _on_sigterm(self, _number: int, _frame: Any) -> None:
        self._stop_requested = True

    # The loop

    def _loop(self) -> None:
        """Serve all sockets and pipes until the rank has exited."""
        # Until here SIGTERM ended this process, and with it the rank: there was no output yet that could be lost.
        signal.signal(signal.SIGTERM, self._on_sigterm)
        # The rank's socket comes first: a cell's start is sent before the cell's output.
        handlers: dict[Any, Callable[[], None]] = {
            self._wake_read.fileno(): self._on_wake,
            self._wire.socket.fileno(): self._on_wire,
            **dict.fromkeys(self._pipes, functools.partial(self._read_pipes, self._on_wire)),
            self._pub: self._on_subscription,
            self._cluster.monitor: self._cluster.read_event,
            self._control: functools.partial(self._on_control, self._control),
        }
        if self._lifeline is not None:
            handlers[self._lifeline] = functools.partial(self._on_launcher_end, self._lifeline)
        if self._probe is not None:
            handlers[self._probe] = functools.partial(self._on_control, self._probe)
        self._poller = zmq.Poller()
        for source in handlers:
            self._poller.register(source, zmq.POLLIN)
        while True:
            if self._may_send_hello() and self._hellos.is_due():
                self._publish_record(self._hello())
            events = dict(self._poller.poll(self._poll_ms()))
            for source, handle in handlers.items():
                if source in events:
                    handle()
            self._output.publish_due()
            self._use.report_due()
            self._vitals.publish_due()
            if self._output.due is not None:
                time.sleep(NAP_SECONDS)
            ended = self._reap()
            if ended is not None:
                self._on_rank_end(ended)
                return
            self._check_deadlines()

    def _on_launcher_end(self, lifeline: int) -> None:
        """Kill the rank: a signal that kills the process which a launcher has started for it is meant for the rank."""
        self._poller.unregister(lifeline)
        self._signal(signal.SIGKILL)

    def _may_send_hello(self) -> bool:
        """Whether to send this nanny's hello, repeatedly: until the rank has received its identity."""
        return self._has_subscriber and bool(self._engine) and not self._hellos.is_known

    def _hello(self) -> NannyHello:
        probe = b"" if self._probe is None else bytes(self._probe.getsockopt(zmq.IDENTITY))
        return NannyHello(engine=self._engine, nanny=self._identity, probe=probe.decode())

    def _wake(self) -> None:
        """Wake the loop; callable from any thread."""
        try:
            self._wake_write.send(b"\0")
        except BlockingIOError:
            return  # a wake-up is pending already

    def _on_wake(self) -> None:
        self._wake_read.recv(4096)
        if self._stop_requested:
            self._stop_requested = False
            self._begin_end()

    def _reap(self) -> tuple[int, resource.struct_rusage] | None:
        """Reap children that have exited; returns the rank's exit status and usage once it is among them.

        The others are orphans of the rank's children, which as zombies would fill the process table over the days.
        """
        while True:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == self._pid:
                return status, usage
            if pid == 0:
                return None

    def _on_subscription(self) -> None:
        self._has_subscriber = self._pub.recv()[:1] == b"\x01" or self._has_subscriber

    def _poll_ms(self) -> int:
        """Return the milliseconds to the nearest deadline."""
        now = time.monotonic()
        hello = self._hellos.next_at if self._may_send_hello() else None
        dues = (self._output.due, self._use.due, self._kill_at, self._wake_up.due, hello)
        nearest = min([self._cluster.next_check, *(at for at in dues if at is not None)])
        return max(0, round((nearest - now) * 1000))

    def _check_deadlines(self) -> None:
        self._wake_up.check()
        now = time.monotonic()
        if self._cluster.check(once_reached=self._hellos.is_known):
            self._begin_end()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._signal(signal.SIGKILL)

    # Output of the rank

    def _read_pipes(self, before: Callable[[], None] = lambda: None) -> None:
        """Read what the pipes hold, and handle it after calling ``before``; the busy flag shows this to the rank.

        The rank may have sent the start of a cell just before it wrote what is in the pipes. It sends that start once
        the pipes are empty and the busy flag is down, so nothing in the pipes precedes it.
        """
        self._wire.set_busy(True)
        try:
            self._taken += [(name, chunk) for pipe, name in self._pipes.items() for chunk in read_all(pipe)]
            before()
            taken, self._taken = self._taken, []
            for name, chunk in taken:
                self._wire.count(len(chunk))
                if name == "stderr":
                    self._exit_report.add_stderr(chunk)
                self._output.add(name, chunk)
        finally:
            self._wire.set_busy(False)

    def _on_wire(self) -> None:
        groups = self._wire.receive()
        if groups is None:
            if self._wire.socket.fileno() in self._poller:
                self._poller.unregister(self._wire.socket.fileno())
                self._on_closed_wire()
            return
        for kind, token, frames in groups:
            if kind == PLACED:
                self._on_message(token, frames)
            elif kind == CELL_BEGIN:
                self._on_cell(self._session.unpack(frames[0]))
            # The others have no position within the cell's output.
            elif kind == LATE:
                self._output.add_late(self._session.unpack(frames[0]), frames[1].decode(), frames[2])
            elif kind == SAMPLES:
                self._on_metrics(frames[0])
            elif kind == IDENTITY:
                self._on_identity(self._session.unpack(frames[0]))

    def _on_closed_wire(self) -> None:
        """End a rank that has closed its end of the socket: it can't report anything any more."""
        if not is_ending(self._pid):
            self._exit_report.has_closed_wire = True
            self._kill_at = time.monotonic() + KILL_GRACE_SECONDS
            self._signal(signal.SIGTERM)

    def _on_message(self, token: bytes, frames: list[bytes]) -> None:
        """Publish a message, and write the text form of a display or a result to the log."""
        self._read_pipes()  # output written before this message is in the pipes by now, so it goes first
        msg_type = text = ""
        with suppress(ValueError, LookupError, TypeError):  # code of the user may publish anything
            _, parts = self._session.feed_identities(frames)
            msg_type = self._session.unpack(parts[1])["msg_type"]
            if msg_type in ("display_data", "execute_result"):
                text = self._session.unpack(parts[4])["data"]["text/plain"]
        self._output.flush(end_of_cell=msg_type == "status")
        self._out.send_multipart(frames, is_kept=msg_type != DebugMessage.msg_type)
        self._wire.give_back(token)
        self._log.write(f"{text}\n".encode("utf-8", "backslashreplace") if text else b"", "stdout")

    def _on_cell(self, header: dict[str, Any]) -> None:
        self._out.begin_cell()
        self._exit_report.begin_cell()
        self._output.begin_cell(header)
        is_early = header["msg_id"] == self._interrupt_at
        self._wire.set_interrupted(is_early)
        if is_early:
            self._wire.set_pending()
            signal_main_thread(self._pid, signal.SIGINT)
            self._wake_up.begin()

    def _on_identity(self, identity: dict[str, Any]) -> None:
        self._engine = self._side_channel.engine = identity.get("engine", self._engine)
        self._hub_id = identity.get("hub_id", self._hub_id)
        if identity.get("log_path"):
            self._hellos.is_known = True
            self._log.place(identity["log_path"])
            self._metrics.place(identity["log_path"])
            self._vitals.begin(identity["world_size"], identity["local_rank"], identity["device"], identity["gpu_uuid"])

    def _on_metrics(self, data: bytes) -> None:
        try:
            self._metrics.write(unpack(data))
            self._side_channel.publish_packed(METRICS, data)  # clients that join later read the file
        except (TypeError, ValueError) as error:  # a bad metric must not end the rank
            self._output.add("stderr", f"metrics were lost: {type(error).__name__}: {error}\n".encode())

    def _publish(self, msg_type: str, content: dict[str, Any], parent: dict[str, Any]) -> None:
        topic = f"engine.{self._engine}.{content.get('name', msg_type)}".encode()
        stream: Any = self._out  # Session only calls send on it
        self._session.send(
            stream, msg_type, content, parent={"header": parent}, ident=topic, metadata={"engine": self._engine}
        )

    def _publish_record(self, record: Record) -> None:
        self._publish(record.msg_type, record.to_content(), self._output.cell)

    def _report_log_trouble(self, path: str, error: OSError) -> None:
        self._publish_record(LogTrouble(host=socket.gethostname(), log_path=path, reason=error.strerror or str(error)))

    # Control requests and the rank's exit

    def _on_control(self, sock: zmq.Socket[bytes]) -> None:
        received = sock.recv_multipart()
        try:
            idents, parts = self._session.feed_identities(received)
            message = self._session.deserialize(parts)
        except (ValueError, TypeError):
            return  # not signed with our key: every process on this host can reach the controller's ports
        try:
            content, frames = serves.serve(self, message["content"])
        except Exception as error:  # noqa: BLE001  (the rank lives as long as this process, so nothing may end it)
            content, frames = {"status": "error", "reason": f"{type(error).__name__}: {error}"}, []
        self._session.send(sock, "nanny_reply", content, parent=message, ident=idents, buffers=frames)

    @serves(requests.Signal)
    def _pass_signal(self, request: requests.Signal) -> None:
        self._signal(request.number)

    @serves(requests.Interrupt)
    def _interrupt(self, request: requests.Interrupt) -> None:
        """Interrupt a cell: now if it has started, else as soon as it starts, so that no interrupt comes too early."""
        if self._output.cell.get("msg_id") == request.cell:
            self._wire.set_interrupted(True)
            self._wire.set_pending()
            interrupt(self._pid)
            self._wake_up.begin()
        else:
            self._interrupt_at = request.cell

    @serves(requests.End)
    def _end(self, _request: requests.End) -> None:
        self._begin_end()

    @serves(requests.AcknowledgeNannyHello)
    def _acknowledge_hello(self, _request: requests.AcknowledgeNannyHello) -> None:
        self._hellos.delay()

    @serves(requests.RepeatHello)
    def _repeat_hello(self, _request: requests.RepeatHello) -> None:
        self._publish_record(self._hello())

    @serves(requests.Publish)
    def _publish_for(self, request: requests.Publish) -> None:
        self._side_channel.publish(request.record_type, request.content)

    @serves(requests.Figures)
    def _figures(self, _request: requests.Figures) -> dict[str, Any]:
        return self._vitals.now().to_content()

    @serves(requests.Replay)
    def _replay(self, _request: requests.Replay) -> Reply:
        return self._out.dump()

    @serves(requests.Ping)
    def _ping(self, request: requests.Ping) -> dict[str, Any]:
        return {"gone": [pid for pid, started in request.nannies if not runs(pid, started)]}

    @serves(requests.Stack)
    def _stack(self, _request: requests.Stack) -> dict[str, Any]:
        vitals = self._wire.status()
        beats = vitals is not None and time.monotonic() - vitals.beat_s < HANG_PATIENCE_SECONDS
        return {"stack": self._exit_report.stack.read(), "vitals": vitals.to_content() if vitals and beats else None}

    def _signal(self, number: int) -> None:
        os.kill(self._pid, number)  # the pid can't have been reused: only _reap releases it

    def _begin_end(self) -> None:
        """Ask the rank to exit; it is killed if it does not."""
        if self._expected_end:
            return
        self._expected_end = True
        self._kill_at = time.monotonic() + KILL_GRACE_SECONDS
        self._signal(signal.SIGTERM)

    def _on_rank_end(self, ended: tuple[int, resource.struct_rusage]) -> None:
        self._on_wire()
        self._read_pipes()
        self._output.flush(end_of_cell=True)
        self._log.write(self._exit_report.crash(), "stderr")
        death = self._exit_report.death(self._engine, *ended, expected=self._expected_end)
        if death.unfinished:  # without a client, only the log shows it
            self._log.write(f"this rank was killed: {death.unfinished}\n".encode(), "stderr")
        self._publish_record(death)
        if self._out.keeps and not self._expected_end:
            self._leave(death)
        self._unregister()
        if not self._expected_end and not self._hellos.is_known:
            self._repeat(death)

    def _leave(self, death: RankDeath) -> None:
        """Write the death to a file, for clients that join later."""
        try:
            report_path = Path(os.environ[PROFILE_DIR]) / f"death-{self._engine}.json"
            replace_private(report_path, json.dumps(death.to_content()))
        except OSError as error:
            # A client that joins detects that the process has ended.
            sys.stderr.write(f"the report of the exit could not be written: {error}\n")

    def _repeat(self, death: RankDeath) -> None:
        """Publish a death during start-up again and again, until the client has received it and ends this process.

        The client may not have subscribed yet.
        """
        # If no client ever subscribes, the launcher's copy of our stderr is all there is.
        sys.stderr.write(f"rank process {self._pid} {death.cause}\n{death.stderr_tail}\n")
        sys.stderr.flush()
        deadline = time.monotonic() + NANNY_REPEAT_SECONDS
        while not self._stop_requested and time.monotonic() < deadline and self._cluster.is_there(once_reached=False):
            self._publish_record(death)
            if select.select([self._wake_read], [], [], FIRST_PAUSE_SECONDS)[0]:
                self._wake_read.recv(4096)  # e.g. of the rank's own end

    def _unregister(self) -> None:
        """Unregister from ipyparallel's hub, so that its clients don't have to wait for missed heartbeats."""
        if self._hub_id is None or not self._cluster.is_connected:
            return
        hub = self._connection.connect(self._context.socket(zmq.DEALER), "registration", LINGER=1000)
        self._session.send(hub, "unregistration_request", {"id": self._hub_id})
        hub.close()
