"""Send and receive messages over the client's sockets to one cluster.

Covers: sending requests to ranks and nannies, matching replies, passing on what is published.
Does not cover: what the messages mean (``client.cells.cell_run``, ``client.cluster``).

One thread owns the sockets. Requests are queued for it. Replies are returned as futures or, for cells, passed to a
callback in the order of their arrival.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import zmq
from ipyparallel.util import _disable_session_extract_dates
from jupyter_client.session import Session

from ...errors import ClusterClosedError
from ...protocol.messages import FIGURES_TOPIC, channel_url, prepare
from ...protocol.time_limits import LINK_TURN_SECONDS, TICK_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...protocol.requests import Request


log = logging.getLogger(__name__)

Message = dict[str, Any]
FIGURES = "figures"  # channel of frequent messages from many ranks; their content is bytes


def _figures(topic: bytes, engine: bytes, data: bytes) -> Message:
    """Return frames that a nanny sent without the session's format as a message."""
    msg_type = topic[len(FIGURES_TOPIC) :].decode()
    return {"header": {"msg_type": msg_type}, "metadata": {"engine": engine.decode()}, "content": data}


class Link:
    """Sockets to a controller, and the thread that owns them.

    ``info`` is the content of ipyparallel's client connection file, ``identity`` the ZeroMQ identity by which ranks
    reach this client. On the link's thread, ``on_message`` is called with every message that no request waits for,
    ``on_lost`` when the connection to the controller is lost, and ``on_tick`` every ``TICK_SECONDS``.
    """

    def __init__(
        self,
        info: dict[str, Any],
        identity: str,
        on_message: Callable[[str, Message], None],
        on_lost: Callable[[], None],
        on_tick: Callable[[], None],
    ) -> None:
        _disable_session_extract_dates()
        self._info = info
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_tick = on_tick
        self.session = Session(key=info["key"].encode(), signature_scheme=info["signature_scheme"])
        self._context = zmq.Context()
        self._shell = self._open(zmq.DEALER, "mux", IDENTITY=identity.encode())
        self._control = self._open(zmq.DEALER, "control", IDENTITY=identity.encode())
        self._iopub = self._open(zmq.SUB, "iopub")
        self._iopub.subscribe(b"")
        self._monitor = self._shell.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._outbox: deque[tuple[zmq.Socket[bytes], list[Any]]] = deque()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._is_woken = False
        self._pending: dict[str, Callable[[Message], None] | Future[Message]] = {}  # by request: who gets the reply
        self._closed = False
        self._numbering = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="disttrain link", daemon=True)
        self._thread.start()

    def _open(self, kind: int, channel: str, **options: Any) -> zmq.Socket[bytes]:
        sock = self._context.socket(kind)
        for name, value in ({"SNDHWM": 0, "RCVHWM": 0, "LINGER": 500} | options).items():
            setattr(sock, name, value)
        prepare(sock, self._info)
        sock.connect(channel_url(self._info, channel))
        return sock

    # Requests

    def make(self, msg_type: str, content: Message | bytes, metadata: Message | None = None) -> Message:
        """Create a message, under a lock: the session numbers messages without one, and equal IDs would share a reply.

        Pass content for many ranks as bytes, packed once by the session.
        """
        with self._numbering:
            message: Message = self.session.msg(msg_type, metadata=metadata)
        return message | {"content": content}

    def post(
        self,
        target: str,
        message: Message,
        *,
        buffers: Sequence[Any] = (),
        on_reply: Callable[[Message], None] | None = None,
    ) -> None:
        """Send a request to an engine; ``on_reply`` is called once on the link's thread."""
        if on_reply is not None:
            self._pending[message["header"]["msg_id"]] = on_reply
        self._send(self._shell, target, message, buffers)

    def expect(self, msg_id: str, on_reply: Callable[[Message], None]) -> None:
        """Call ``on_reply`` with the reply to a request that an earlier client sent."""
        self._pending[msg_id] = on_reply

    def request(self, target: str, request: Request, *, buffers: Sequence[Any] = ()) -> Future[Message]:
        """Send a request to an engine or a nanny and return a future of the reply."""
        future: Future[Message] = Future()
        message = self.make(request.msg_type, request.to_content())
        msg_id = message["header"]["msg_id"]
        self._pending[msg_id] = future
        future.add_done_callback(lambda _: self._pending.pop(msg_id, None))  # also of a cancelled one
        self._send(self._control if request.control else self._shell, target, message, buffers)
        return future

    def _send(self, sock: zmq.Socket[bytes], target: str, message: Message, buffers: Sequence[Any]) -> None:
        if self._closed:
            raise ClusterClosedError("this cluster was shut down; start one with %dist_init")
        frames = self.session.serialize(message, ident=target.encode())
        self._outbox.append((sock, [*frames, *buffers]))
        self._wake()

    def _wake(self) -> None:
        """Wake the thread, unless that is pending: the system call takes as long as sending the message."""
        if self._is_woken:
            return
        self._is_woken = True
        try:
            self._wake_write.send(b"\0")
        except BlockingIOError:
            return  # the thread is awake already

    # The thread

    def _run(self) -> None:
        poller = zmq.Poller()
        channels = {self._shell: "shell", self._control: "control", self._iopub: "iopub"}
        for sock in (*channels, self._monitor, self._wake_read):
            poller.register(sock, zmq.POLLIN)
        next_tick = time.monotonic() + TICK_SECONDS
        while not self._closed:
            events = dict(poller.poll(max(0, round((next_tick - time.monotonic()) * 1000))))
            if self._wake_read.fileno() in events:
                self._wake_read.recv(4096)
                self._is_woken = False  # before the outbox is emptied: later messages wake the thread again
            self._empty_outbox()
            for sock, channel in channels.items():
                if sock in events:
                    self._receive(sock, channel)
            if self._monitor in events:
                self._monitor.recv_multipart()
                self._call(self._on_lost)
            if time.monotonic() >= next_tick:
                self._call(self._on_tick)
                next_tick = time.monotonic() + TICK_SECONDS
        self._empty_outbox()  # messages posted just before the end
        self._shell.disable_monitor()
        for sock in (*channels, self._monitor):
            sock.close()
        self._context.term()

    def _empty_outbox(self) -> None:
        while self._outbox:
            sock, frames = self._outbox.popleft()
            for frame in frames[:-1]:  # send_multipart takes three times as long: it checks the frames first
                sock.send(frame, zmq.SNDMORE, copy=False)
            sock.send(frames[-1], copy=False)

    def _call(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception:
            # The callback may raise anything; this thread must continue to serve all other messages.
            log.exception("a callback of the link failed")

    def _receive(self, sock: zmq.Socket[bytes], channel: str) -> None:
        """Receive pending messages for at most ``LINK_TURN_SECONDS``, so that messages to send don't wait longer."""
        until = time.monotonic() + LINK_TURN_SECONDS
        while time.monotonic() < until:
            try:
                frames = sock.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                if frames[0].bytes.startswith(FIGURES_TOPIC):
                    self._on_message(FIGURES, _figures(*(frame.bytes for frame in frames)))
                    continue
                _, parts = self.session.feed_identities(frames, copy=False)
                message = self.session.deserialize(parts, copy=False)
                self._dispatch(channel, message)
            except Exception:
                # One message that can't be read must not end the thread that serves all the others.
                log.exception("a message on %s could not be handled", channel)

    def _dispatch(self, channel: str, message: Message) -> None:
        if channel == "iopub" or not self.take_reply(message):
            self._on_message(channel, message)

    def take_reply(self, message: Message) -> bool:
        """Pass a reply to its handler, once; return whether there was one."""
        handler = self._pending.pop(message["parent_header"].get("msg_id", ""), None)
        if handler is None:
            return False
        if isinstance(handler, Future):
            handler.set_result(message)
        else:
            handler(message)
        return True

    def fail_requests(self, reason: str) -> None:
        """Set a :class:`ClusterClosedError` on all futures without a reply."""
        for waiting in list(self._pending.values()):
            if isinstance(waiting, Future) and not waiting.done():
                waiting.set_exception(ClusterClosedError(reason))

    def close(self) -> None:
        """End the thread; futures without a reply get a :class:`ClusterClosedError`."""
        if self._closed:
            return
        self._closed = True
        self.fail_requests("the cluster was shut down before the reply arrived")
        self._is_woken = False
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)
        self._wake_read.close()
        self._wake_write.close()
