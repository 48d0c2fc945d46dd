"""How a rank and its nanny reach the controller.

Covers: waiting for ipyparallel's connection file, connecting a socket to one of its channels.
"""

from __future__ import annotations

import errno
import json
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..messages import channel_url

if TYPE_CHECKING:
    import zmq

# The environment of a rank's process, set by the launcher.
CONNECTION_FILE = "DISTTRAIN_CONNECTION_FILE"
CLIENT_IDENTITY = "DISTTRAIN_CLIENT"
PROFILE_DIR = "DISTTRAIN_PROFILE_DIR"
LOCAL_DIR = "DISTTRAIN_LOCAL_DIR"  # of the cluster on the notebook's host; a rank elsewhere has none
WITHOUT_TORCH = "DISTTRAIN_WITHOUT_TORCH"
LAUNCHER = "DISTTRAIN_LAUNCHER"
MPI_HEALS = "DISTTRAIN_MPI_HEALS"  # this MPI can be made whole after a death
SAMPLE = "DISTTRAIN_SAMPLE_SECONDS"  # between two messages with figures of a rank; 0: there are none
KEEP = "DISTTRAIN_KEEP"  # somebody may join later, and ask for what was said meanwhile
TELL_USE = "DISTTRAIN_TELL_USE"  # seconds between two words of having been used


@dataclass(frozen=True, slots=True)
class Connection:
    """What ipyparallel's engine connection file says."""

    file: Path
    info: dict[str, Any]

    @classmethod
    def wait(cls, path: str, timeout_s: float = 60.0) -> Connection:
        """Wait until the controller has written the file, and read it.

        Raises
        ------
        TimeoutError
            If it does not come in time, or its folder is gone: then the cluster has ended.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                return cls(Path(path), json.loads(Path(path).read_text()))
            except (FileNotFoundError, json.JSONDecodeError):
                if not Path(path).parent.exists():
                    raise TimeoutError(f"the cluster ended before it wrote {path}") from None
                time.sleep(0.005)  # not there yet, or half written
        raise TimeoutError(f"the controller did not write {path} within {timeout_s:g} s")

    @property
    def key(self) -> bytes:
        """The key that signs every message."""
        return str(self.info["key"]).encode()

    @property
    def signature_scheme(self) -> str:
        """How messages are signed."""
        return str(self.info["signature_scheme"])

    def url(self, channel: str) -> str:
        """Return the address of a channel."""
        return channel_url(self.info, channel)

    def is_there(self, *, once_reached: bool) -> bool:
        """Whether the controller is: its file, which comes first, and once it was reached the end of a Unix socket."""
        transport, _, path = self.url("control").partition("://")
        if transport != "ipc" or not once_reached or not self.file.exists():
            return self.file.exists()
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            return probe.connect_ex(path) not in (errno.ECONNREFUSED, errno.ENOENT)

    def connect(self, sock: zmq.Socket[bytes], channel: str, **options: Any) -> zmq.Socket[bytes]:
        """Set the options on a socket and connect it to a channel."""
        for name, value in options.items():
            setattr(sock, name, value)
        sock.connect(self.url(channel))
        return sock
