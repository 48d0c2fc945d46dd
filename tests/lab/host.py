"""One host of the lab: namespaces with an sshd as their first process.

Covers: starting and killing it, running commands in it, its processes and listening sockets.
Does not cover: its cable, which ``lab`` plugs in.
"""

from __future__ import annotations

import re
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from .places import PATIENCE_S, LabError, Place, command, end, words_of

if TYPE_CHECKING:
    from collections.abc import Sequence

CACHE_OF_TORCH = "/torchinductor_"  # a folder that every program with torch makes
SSH_PORT = 2222
LOCAL_DISK_MIB = 64

# Its file system is that of this machine, as over NFS, but for what no two hosts share.
BOOT = """
hostname {name}
mount --bind {lab}/hosts /etc/hosts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=1777 tmpfs {lab}/tmp
mount -t tmpfs -o mode=1777,size={local_mib}m tmpfs {lab}/local
exec /usr/sbin/sshd -D -e -f {lab}/sshd_config
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """A TCP socket that waits for connections."""

    address: str
    port: int
    program: str  # "" where the kernel does not tell
    pid: int | None  # within the host


class Host:
    """A host that runs until it is killed.

    Parameters
    ----------
    place
        The lab that it belongs to.
    number
        1 for ``node1``.
    """

    def __init__(self, place: Place, number: int) -> None:
        self.place = place
        self.number = number
        self.name = f"node{number}"
        self.address = place.address(number)
        self.log = place.folder / "log" / f"{self.name}.log"
        self.boot: subprocess.Popen[bytes] | None = None
        self._init: psutil.Process | None = None

    @property
    def runs(self) -> bool:
        return self._init is not None

    def start(self) -> None:
        """Begin to boot; ``wait`` until it answers."""
        namespace, link = self.place.namespace(self.number), self.place.link(self.number)
        # A host that was killed comes back with its old hardware address, so that no neighbour holds a wrong one.
        mac = f"02:77:00:00:{self.place.lab_id:02x}:{self.number:02x}"
        command("ip", "netns", "add", namespace)
        words = ("peer", "name", "eth0", "address", mac, "netns", namespace)
        command("ip", "link", "add", link, "type", "veth", *words)
        command("ip", "link", "set", link, "master", self.place.bridge, "up")
        command("ip", "-n", namespace, "address", "add", f"{self.address}/24", "dev", "eth0")
        command("ip", "-n", namespace, "link", "set", "eth0", "up")
        command("ip", "-n", namespace, "link", "set", "lo", "up")
        boot = BOOT.format(name=self.name, lab=self.place.folder, local_mib=LOCAL_DISK_MIB)
        unshare = ["unshare", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with self.log.open("ab") as log:
            self.boot = subprocess.Popen(
                ["ip", "netns", "exec", namespace, *unshare, "--propagation", "slave", "sh", "-ec", boot],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Return as soon as its sshd answers.

        Raises
        ------
        LabError
            If it does not within ``PATIENCE_S``; the host's log is part of the message.
        """
        assert self.boot is not None
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self.boot.poll() is None:
            try:
                with socket.create_connection((self.address, SSH_PORT), timeout=1) as connection:
                    connection.recv(1)
                    self._init = psutil.Process(self.boot.pid).children()[0]
                    return
            except OSError:
                time.sleep(0.01)
        raise LabError(f"{self.name} at {self.address} did not answer; its log:\n{self.log.read_text()}")

    def run(self, script: str, *, check: bool = True) -> str:
        """Run a shell script on the host, past its network, and return what it printed.

        Raises
        ------
        LabError
            If it failed, unless ``check`` is false.
        """
        return command(*self.enter("sh", "-c", script), check=check)

    def enter(self, *words: str) -> list[str]:
        """Return the command line that runs ``words`` on the host."""
        if self._init is None:
            raise LabError(f"{self.name} is dead")
        return ["nsenter", "--target", str(self._init.pid), "--net", "--uts", "--ipc", "--mount", "--pid", *words]

    def processes(self) -> list[psutil.Process]:
        """Return what runs on it, by the pids of this machine; none once it is dead."""
        if self._init is None:
            return []
        mine = _pid_namespace(self._init.pid)
        return [process for process in psutil.process_iter() if _pid_namespace(process.pid) == mine]

    def listening(self) -> list[Listening]:
        return listening_sockets(self.enter())

    def left(self) -> list[str]:
        """Return what runs or lies on it that was not there at its start, in words; nothing of a dead host."""
        if self._init is None:
            return []
        others = [process for process in self.processes() if process != self._init]
        words = [(process.pid, words_of(process)) for process in others]
        left = [f"process {pid}: {said}" for pid, said in words if said and not said.startswith("slurmd ")]
        folders = ("/dev/shm", f"{self.place.folder}/tmp", f"{self.place.folder}/local")
        found = self.run(f"find {' '.join(folders)} -mindepth 1").splitlines()
        return left + [path for path in found if CACHE_OF_TORCH not in path]

    def die(self) -> None:
        """Lose power: nobody hears a goodbye, and everything that ran is gone."""
        # The cable goes first, else the kernel would end each connection in good order.
        command("ip", "link", "delete", self.place.link(self.number))
        if self._init is not None:
            end([self._init])  # the kernel kills the whole namespace with its first process
        self.reap()
        command("ip", "netns", "delete", self.place.namespace(self.number))

    def reap(self) -> None:
        """Forget the process that is gone."""
        if self.boot is not None:
            self.boot.wait(PATIENCE_S)
        self.boot = self._init = None


def listening_sockets(prefix: Sequence[str] = ()) -> list[Listening]:
    """Return the TCP sockets that wait for connections, where the command line ``prefix`` leads to."""
    found = []
    for line in command(*prefix, "ss", "-Hltnp").splitlines():
        words = line.split()
        address, _, port = words[3].rpartition(":")
        program = re.search(r'\("([^"]*)",pid=(\d+)', line)
        name, pid = (program[1], int(program[2])) if program else ("", None)
        found.append(Listening(address=address.strip("[]"), port=int(port), program=name, pid=pid))
    return found


def _pid_namespace(pid: int) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return None
