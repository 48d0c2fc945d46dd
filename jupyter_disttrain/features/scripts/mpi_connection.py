"""Connect a rank with the process that mpiexec has started for the rank's script.

Covers: the socket, the variables that identify a rank of an MPI job, its shared memory, the script's exit status.
Does not cover: what that process does (``mpi_process``), running the script (``runner``).
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import tempfile
import time
import uuid
from typing import TYPE_CHECKING

from ...protocol.environment import LOCAL_DIR
from ...protocol.time_limits import MPI_CONNECT_SECONDS, WARM_RETRY_SECONDS
from ...rank.warm import channel

if TYPE_CHECKING:
    from collections.abc import Mapping

OF_MPI = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_", "MPI_LOCAL")  # variables of a rank of an MPI job


class MpiConnection:
    """The rank's end: receives the variables of the process that mpiexec starts for it, and notices its end."""

    def __init__(self) -> None:
        self.name = f"disttrain-mpi-{uuid.uuid4().hex}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(1)
        self._process: socket.socket | None = None
        # Of Open MPI, whose processes leave it when they are killed; they send each other its path.
        self._shared_memory = tempfile.mkdtemp(prefix="mpi-", dir=os.environ[LOCAL_DIR])

    def fileno(self) -> int:
        """Return a descriptor that is readable when the process has connected, and later when it has ended."""
        return (self._listener if self._process is None else self._process).fileno()

    def accept(self, timeout_s: float) -> Mapping[str, str] | None:
        """Return the variables of the process; None if it has not connected within this time."""
        ready = select.poll()
        ready.register(self._listener, select.POLLIN)
        if not ready.poll(1000 * timeout_s):
            return None
        sock, _ = self._listener.accept()
        message = channel.receive(sock)[0] if channel.belongs_to_us(sock) else None
        if message is None:
            sock.close()
            return None
        self._process = sock
        return {"OMPI_MCA_btl_sm_backing_directory": self._shared_memory, **message["environment"]}

    def end(self, status: int) -> None:
        """Have the process end as the script has; ``status`` is as from ``os.waitpid``."""
        if self._process is not None:
            try:
                channel.send(self._process, {"status": status})
            except OSError:
                return  # it was killed

    def close(self) -> None:
        """Close the sockets, and remove shared memory; a process that connects later ends with an error."""
        self._listener.close()
        shutil.rmtree(self._shared_memory, ignore_errors=True)  # the cluster's end removes what is left
        if self._process is not None:
            self._process.close()


def connect_to(name: str) -> int:
    """Connect to a rank, in the process that mpiexec has started; return the script's status once it has ended."""
    deadline = time.monotonic() + MPI_CONNECT_SECONDS
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(f"\0{name}")
        except ConnectionRefusedError:
            sock.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(WARM_RETRY_SECONDS)
        else:
            break
    if not channel.belongs_to_us(sock):
        raise PermissionError("another user's process has the name of the rank's socket")
    own = {key: value for key, value in os.environ.items() if key.startswith(OF_MPI)}
    channel.send(sock, {"environment": own})
    message, _ = channel.receive(sock)
    return 1 << 8 if message is None else int(message["status"])
