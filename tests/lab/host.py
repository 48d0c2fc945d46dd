"""One host of the lab: namespaces with an sshd as their first process.

Covers: starting and killing it, running commands in it, its processes and listening sockets.
Does not cover: its network cable, which ``lab`` connects.
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

from .places import TIMEOUT_S, LabError, Place, command, command_line_of, end

if TYPE_CHECKING:
    from collections.abc import Sequence

CACHE_OF_TORCH = "/torchinductor_"  # a folder created by every program with torch
SSH_PORT = 2222
LOCAL_DISK_MIB = 64

# Its file system is that of this machine, as over NFS, except for what hosts never share.
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
    """A listening TCP socket."""

    address: str
    port: int
    program: str  # "" where the kernel does not report it
    pid: int | None  # within the host


class Host:
    """A host that runs until it is killed; number 1 is ``node1``."""

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
        """Start to boot; ``wait`` until it answers."""
        namespace, link = self.place.namespace(self.number), self.place.link(self.number)
        mac = self.place.hardware_address(self.number)
        command("ip", "netns", "add", namespace)
        peer = ("peer", "name", "eth0", "address", mac, "netns", namespace)
        command("ip", "link", "add", link, "type", "veth", *peer)
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
        """Return as soon as its sshd answers; the error after ``TIMEOUT_S`` contains the host's log."""
        assert self.boot is not None
        deadline = time.monotonic() + TIMEOUT_S
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
        """Run a shell script on the host, without its network, and return its output; ``check``: it must succeed."""
        return command(*self.enter("sh", "-c", script), check=check)

    def enter(self, *arguments: str) -> list[str]:
        """Return the command line that runs ``command`` on the host."""
        if self._init is None:
            raise LabError(f"{self.name} is dead")
        return ["nsenter", "--target", str(self._init.pid), "--net", "--uts", "--ipc", "--mount", "--pid", *arguments]

    def processes(self) -> list[psutil.Process]:
        """Return its processes, by the pids of this machine; none once it is dead."""
        if self._init is None:
            return []
        mine = _pid_namespace(self._init.pid)
        return [process for process in psutil.process_iter() if _pid_namespace(process.pid) == mine]

    def listening(self) -> list[Listening]:
        return listening_sockets(self.enter())

    def left(self) -> list[str]:
        """Return descriptions of processes and files on it that did not exist at its start; empty for a dead host."""
        if self._init is None:
            return []
        others = [process for process in self.processes() if process != self._init]
        others_now = [(process.pid, command_line_of(process)) for process in others]
        left = [
            f"process {pid}: {arguments}"
            for pid, arguments in others_now
            if arguments and not arguments.startswith("slurmd ")
        ]
        folders = ("/dev/shm", f"{self.place.folder}/tmp", f"{self.place.folder}/local")
        found = self.run(f"find {' '.join(folders)} -mindepth 1").splitlines()
        return left + [path for path in found if CACHE_OF_TORCH not in path]

    def die(self) -> None:
        """Lose power: all processes end, without closing connections."""
        # The cable goes first, otherwise the kernel would close each connection properly.
        command("ip", "link", "delete", self.place.link(self.number))
        if self._init is not None:
            end([self._init])  # the kernel kills the whole namespace with its first process
        self.reap()
        command("ip", "netns", "delete", self.place.namespace(self.number))

    def reap(self) -> None:
        """Wait for the ended process."""
        if self.boot is not None:
            self.boot.wait(TIMEOUT_S)
        self.boot = self._init = None


def listening_sockets(prefix: Sequence[str] = ()) -> list[Listening]:
    """Return the listening TCP sockets, as seen by commands after the prefix ``prefix``."""
    found = []
    for line in command(*prefix, "ss", "-Hltnp").splitlines():
        fields = line.split()
        address, _, port = fields[3].rpartition(":")
        program = re.search(r'\("([^"]*)",pid=(\d+)', line)
        name, pid = (program[1], int(program[2])) if program else ("", None)
        found.append(Listening(address=address.strip("[]"), port=int(port), program=name, pid=pid))
    return found


def _pid_namespace(pid: int) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return None
