"""Connect a rank and its nanny to the controller.

Covers: waiting for ipyparallel's connection file, connecting a socket to one of its channels, checking the ports and
that the controller runs; when a new process sends hello messages to the client.
Does not cover: watching the controller (``rank.nanny.controller_watch``), the messages (``app``, ``rank.nanny.nanny``).
"""

from __future__ import annotations

import errno
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...private_files import read_own
from ...protocol.messages import channel_url, prepare
from ...protocol.time_limits import (
    CONNECTION_CONNECT_SECONDS,
    FIRST_PAUSE_SECONDS,
    HELLOS_REPEAT_SECONDS,
    LONGEST_PAUSE_SECONDS,
    REACH_SECONDS,
    RETRY_SECONDS,
)

if TYPE_CHECKING:
    import zmq

CHANNELS = ("registration", "mux", "control", "iopub", "hb_ping", "hb_pong")
# Pause between checks for the connection file: frequent checks by 256 ranks and nannies leave the controller no core.
SHORTEST_POLL_SECONDS, LONGEST_POLL_SECONDS = 0.005, 0.05


@dataclass(frozen=True, slots=True)
class Connection:
    """The content of ipyparallel's engine connection file."""

    file: Path
    info: dict[str, Any]

    @classmethod
    def wait(cls, path: str, timeout_s: float = 60.0) -> Connection:
        """Wait until the controller has written the file, and read it.

        Raises a TimeoutError if the file is not written in time, or its folder was removed because the cluster has
        ended; a ConnectionError if the file is not this user's own: the rank would connect where another user wants it
        to.
        """
        deadline = time.monotonic() + timeout_s
        pause = SHORTEST_POLL_SECONDS
        while time.monotonic() < deadline:
            try:
                return cls(Path(path), json.loads(read_own(path)))
            except PermissionError as error:
                raise ConnectionError(
                    f"{path} on {socket.gethostname()} can't be used: {error.strerror}; ranks read from it where to "
                    "connect"
                ) from error
            except (FileNotFoundError, json.JSONDecodeError):
                if not Path(path).parent.exists():
                    raise TimeoutError(f"the cluster ended before it wrote {path}") from None
                time.sleep(pause)  # not there yet
                pause = min(1.5 * pause, LONGEST_POLL_SECONDS)
        raise TimeoutError(f"the controller did not write {path} within {timeout_s:g} s")

    @property
    def key(self) -> bytes:
        """The key that signs every message."""
        return str(self.info["key"]).encode()

    @property
    def signature_scheme(self) -> str:
        """The scheme that signs every message."""
        return str(self.info["signature_scheme"])

    def url(self, channel: str) -> str:
        """Return the address of a channel."""
        return channel_url(self.info, channel)

    @property
    def over_network(self) -> bool:
        """Whether the controller is reached through TCP and not through Unix sockets."""
        return self.url("control").startswith("tcp:")

    def is_there(self, *, once_reached: bool, is_silent: bool) -> bool:
        """Whether the controller runs: its connection file exists and, after ``once_reached``, its socket.

        ``is_silent``: its connection, which worked before, is lost; only used over a network.
        """
        try:
            self.file.stat()
        except FileNotFoundError:
            return False
        except OSError:
            pass  # a shared file system may fail for a while
        if not once_reached:
            return True
        if self.over_network:
            try:
                if is_silent:
                    socket.create_connection(self.place("control"), timeout=CONNECTION_CONNECT_SECONDS).close()
            except ConnectionRefusedError:
                return False
            except OSError:
                pass  # the network may be down
            return True
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            return probe.connect_ex(self.url("control").partition("://")[2]) not in (errno.ECONNREFUSED, errno.ENOENT)

    def place(self, channel: str) -> tuple[str, int]:
        """Return a channel's address and port."""
        host, _, port = self.url(channel).partition("://")[2].rpartition(":")
        return host.strip("[]"), int(port)

    def check_ports(self) -> None:
        """Check that all channels can be reached over the network.

        Raises a ConnectionError if one can't; the message names both hosts and the remedy.
        """
        if not self.over_network:
            return
        with ThreadPoolExecutor(len(CHANNELS)) as executor:
            found = executor.map(lambda channel: _why_closed(*self.place(channel)), CHANNELS)
            closed = {channel: why for channel, why in zip(CHANNELS, found, strict=True) if why}
        if closed:
            address = self.place("control")[0]
            ports = ", ".join(f"{self.place(channel)[1]} ({channel})" for channel in closed)
            raise ConnectionError(
                f"{socket.gethostname()} can't reach {address} on port{'s' if len(closed) > 1 else ''} {ports}: "
                f"{next(iter(closed.values()))}; allow connections from this cluster's hosts to {address} in the "
                "firewall, or choose another network with --interface"
            )

    def connect(self, sock: zmq.Socket[bytes], channel: str, **options: Any) -> zmq.Socket[bytes]:
        """Set the options on a socket and connect it to a channel."""
        for name, value in options.items():
            setattr(sock, name, value)
        prepare(sock, self.info)
        sock.connect(self.url(channel))
        return sock


def _why_closed(host: str, port: int) -> str:
    """Return why a port can't be reached; retries, as the controller opens some after it has written their numbers."""
    deadline = time.monotonic() + REACH_SECONDS
    while True:
        try:
            socket.create_connection((host, port), timeout=REACH_SECONDS).close()
        except TimeoutError:
            return "no reply, so a firewall probably drops packets"
        except OSError as error:
            if time.monotonic() > deadline:
                return str(error.strerror)
            time.sleep(RETRY_SECONDS)
        else:
            return ""


class Hellos:
    """The schedule of one process's hello messages: often until the first acknowledgement, rarely after it.

    The first message may be lost because the client or the connection to it is not ready yet. But if 256 ranks and
    nannies kept repeating their hellos until the last has registered, they would delay each other's start.
    """

    def __init__(self) -> None:
        self.is_known = False  # the client knows the process: send no more
        self.next_at = 0.0  # time of the next hello, by ``time.monotonic``
        self._pause = FIRST_PAUSE_SECONDS

    def is_due(self) -> bool:
        """Whether to send a hello now; if so, schedule the next one."""
        now = time.monotonic()
        if self.is_known or now < self.next_at:
            return False
        self.next_at = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        return True

    def delay(self) -> None:
        """Delay the next hello, which the client has acknowledged; may be called from any thread."""
        self.next_at = time.monotonic() + HELLOS_REPEAT_SECONDS
