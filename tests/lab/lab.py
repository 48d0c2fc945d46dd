"""Hosts on this machine, with a network between them and the head, where the tests run.

Covers: starting and stopping them, ssh to them, and faults of hosts and networks.
Does not cover: Slurm's configuration (``slurm``).
"""

from __future__ import annotations

import atexit
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from .host import SSH_PORT, Host, Listening, listening_sockets
from .network import Capture, close_ports, refuse_beginnings
from .places import TIMEOUT_S, claim, command, command_line_of, processes_of, release
from .slurm import Slurm

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from typing_extensions import Self

HEAD = "head"

SSHD_CONFIG = """
Port {port}
HostKey {lab}/keys/host
AuthorizedKeysFile {lab}/keys/id.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
PidFile none
Subsystem sftp internal-sftp
SetEnv TMPDIR={lab}/tmp
MaxStartups 1000
MaxSessions 1000
"""

SSH_CONFIG = """
Host *
  Port {port}
  User root
  IdentityFile {lab}/keys/id
  IdentitiesOnly yes
  UserKnownHostsFile {lab}/keys/known_hosts
  BatchMode yes
  LogLevel ERROR
"""


class Lab:
    """A lab with the hosts ``node1``, ``node2``, ..., which exists while the ``with`` block runs.

    It needs root, namespaces, and the packages that scripts/test.sh installs.
    """

    def __init__(self, hosts: int = 3) -> None:
        self.place = claim()
        atexit.register(self.stop)
        self.folder: Path = self.place.folder
        self.local_disk: Path = self.folder / "local"  # a different folder on each host
        self.ssh: Path = self.folder / "ssh"  # instead of ssh: for mpirun's plm_ssh_agent, or with --ssh
        self.slurm: Slurm | None = None
        self._closed: set[str] = set()  # hosts with closed ports
        self._stopped = False
        self._owner_pid = os.getpid()
        self._hosts = {host.name: host for host in (Host(self.place, number) for number in range(1, hosts + 1))}
        try:
            self._prepare()
            for host in self._hosts.values():
                host.start()
            for host in self._hosts.values():
                host.wait()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def hosts(self) -> list[str]:
        """The names of the hosts."""
        return list(self._hosts)

    @property
    def head_address(self) -> str:
        """The address of the head, where the tests run, in the lab's network."""
        return self.place.head_address

    def address(self, host: str) -> str:
        return self.head_address if host == HEAD else self._hosts[host].address

    def run(self, host: str, script: str, *, check: bool = True) -> str:
        """Run a shell script on a host, without its network, and return its output; ``check``: it must succeed."""
        return self._hosts[host].run(script, check=check)

    def processes(self, host: str) -> list[psutil.Process]:
        """Return the processes of a host, by the pids of this machine; none on a dead one."""
        return self._hosts[host].processes()

    def listening(self, host: str) -> list[Listening]:
        """Return the listening TCP sockets of a host; for the head those of this machine."""
        return listening_sockets() if host == HEAD else self._hosts[host].listening()

    def cut(self, host: str) -> None:
        """Cut the host off from all others: packets are dropped in both directions, silently."""
        # Stop forwarding at the bridge. A link that is down would come back only a second after the next packet.
        command("bridge", "link", "set", "dev", self.place.link(self._hosts[host].number), "state", "0")

    def heal(self, host: str) -> None:
        """Connect the host again."""
        command("bridge", "link", "set", "dev", self.place.link(self._hosts[host].number), "state", "3")

    def kill(self, host: str) -> None:
        """Power the host off: its processes end at once, without closing connections."""
        self._hosts[host].die()

    def revive(self, host: str) -> None:
        """Boot a killed host, with Slurm's daemon where Slurm runs; that is ready once no host is dead any more."""
        self._boot(host)
        if self.slurm is not None and all(each.runs for each in self._hosts.values()):
            self.slurm.wait()

    def _boot(self, host: str) -> None:
        self._hosts[host].start()
        self._hosts[host].wait()
        if self.slurm is not None:
            self.slurm.start_daemon(host)

    def firewall(self, host: str, *ports: int | str) -> None:
        """Drop every packet to a host, or to ``head``, for these TCP ports; without ports open all again."""
        if ports:
            self._closed.add(host)
        if host == HEAD:
            close_ports(self.place.table, ports, interface=self.place.bridge)
        else:
            close_ports(self.place.table, ports, prefix=self._hosts[host].enter())

    def close_to_head(self, host: str) -> None:
        """Drop new connections from the head to a host, except ssh; existing ones continue."""
        self._closed.add(host)
        refuse_beginnings(self.place.table, self.head_address, SSH_PORT, self._hosts[host].enter())

    def fill(self, host: str) -> None:
        """Fill the local disk of a host completely."""
        self.run(host, f"head -c 1G /dev/zero > {self.local_disk}/filler || test $? = 1")

    def restore(self) -> None:
        """Undo every fault: hosts run, cables are connected, ports are open, local disks are empty."""
        for name, host in self._hosts.items():
            if not host.runs:
                self._boot(name)  # wait for Slurm only after all hosts have started
            self.heal(name)
            self.run(name, f"find {self.local_disk} -mindepth 1 -delete")  # hidden files too
        for name in self._closed:
            self.firewall(name)
        self._closed.clear()
        if self.slurm is not None:
            self.slurm.wait()

    def left_on(self, host: str) -> list[str]:
        """Describe processes and files on a host that did not exist at its start, after waiting for them to disappear.

        For the head: processes with the lab's folder in the command line, such as a forgotten ssh.
        """
        deadline = time.monotonic() + TIMEOUT_S
        leftovers = self._left_on_head if host == HEAD else self._hosts[host].left
        while (left := leftovers()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left

    def capture(self) -> Capture:
        """Return a context manager that captures all packets between the hosts, and between them and the head."""
        return Capture(self.place.bridge)

    def start_slurm(self) -> Slurm:
        """Start Slurm over all hosts, with its controller on the head; it ends with the lab."""
        assert self.slurm is None, "Slurm runs"
        enter: dict[str, Callable[..., list[str]]] = {name: host.enter for name, host in self._hosts.items()}
        self.slurm = Slurm(self.place, enter)
        self.slurm.start()
        return self.slurm

    def stop(self) -> None:
        """Remove the lab with everything that runs in it."""
        if self._stopped or os.getpid() != self._owner_pid:  # a fork of the owner may end before it
            return
        self._stopped = True
        atexit.unregister(self.stop)
        release(self.place)
        for host in self._hosts.values():
            host.reap()
        if self.slurm is not None:
            self.slurm.reap()

    def _left_on_head(self) -> list[str]:
        known = {process.pid for host in self._hosts.values() for process in host.processes()}
        for daemon in self._daemons():
            known |= {daemon.pid, *(child.pid for child in psutil.Process(daemon.pid).children(recursive=True))}
        left = [process for process in processes_of(self.place) if process.pid not in known]
        return [f"process {process.pid}: {arguments}" for process in left if (arguments := command_line_of(process))]

    def _daemons(self) -> list[subprocess.Popen[bytes]]:
        """Return the processes that this one has started as parts of the lab."""
        boots = [host.boot for host in self._hosts.values() if host.boot is not None]
        return boots + (self.slurm.daemons if self.slurm is not None else [])

    def _prepare(self) -> None:
        for name in ("keys", "log", "tmp", "local"):
            (self.folder / name).mkdir()
        for name in ("id", "host"):
            command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / "keys" / name)
        addresses = {HEAD: self.head_address} | {host.name: host.address for host in self._hosts.values()}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        host_key = (self.folder / "keys" / "host.pub").read_text()
        (self.folder / "keys" / "known_hosts").write_text(f"* {host_key}")
        (self.folder / "sshd_config").write_text(SSHD_CONFIG.format(port=SSH_PORT, lab=self.folder))
        names = "".join(f"Host {host.name}\n  HostName {host.address}\n" for host in self._hosts.values())
        (self.folder / "ssh_config").write_text(names + SSH_CONFIG.format(port=SSH_PORT, lab=self.folder))
        self.ssh.write_text(f'#!/bin/sh\nexec ssh -F {self.folder}/ssh_config "$@"\n')
        self.ssh.chmod(0o755)
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # required by sshd for privilege separation
        command("ip", "address", "add", f"{self.head_address}/24", "dev", self.place.bridge)
        command("ip", "link", "set", self.place.bridge, "up")
