"""The lab's guarantees to tests on several hosts.

Covers: what hosts do not share, closed ports, killed hosts, Slurm on them, several labs, leftovers.
Does not cover: our own ranks on these hosts, whose tests fail without the lab's other faults and observations.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ...lab import Lab, places
from ...lab.host import SSH_PORT

if TYPE_CHECKING:
    from ...lab.slurm import Slurm

KEEPS_A_LAB = "from tests.lab import Lab; lab = Lab(1); print(lab.place.lab_id, flush=True); input()"


def test_hosts_share_neither_shared_memory_nor_the_temporary_folder(lab: Lab) -> None:
    first, second, *_ = lab.hosts
    for folder in ("/dev/shm", str(lab.folder / "tmp")):
        lab.run(first, f"touch {folder}/mine")
        assert "mine" not in lab.run(second, f"ls {folder}").split()
        assert not (Path(folder) / "mine").exists()
        lab.run(first, f"rm {folder}/mine")


def test_closed_port_drops_packets_until_the_host_is_restored(breakable: Lab) -> None:
    sshd = (breakable.address(breakable.hosts[0]), SSH_PORT)
    breakable.firewall(breakable.hosts[0], SSH_PORT)
    with pytest.raises(TimeoutError):  # neither accepted nor refused
        socket.create_connection(sshd, timeout=0.3)
    breakable.restore()
    socket.create_connection(sshd).close()


def test_killed_host_closes_no_connection_and_comes_back_empty(breakable: Lab) -> None:
    host = breakable.hosts[1]
    breakable.run(host, "sleep 1000 > /dev/null 2>&1 & touch /dev/shm/mine")
    running = breakable.processes(host)
    with socket.create_connection((breakable.address(host), SSH_PORT)) as connection:
        connection.recv(100)
        breakable.kill(host)
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(100)
    assert len(running) >= 2
    assert not any(process.is_running() for process in running)
    assert breakable.processes(host) == []
    breakable.revive(host)
    assert breakable.run(host, "ls /dev/shm") == ""


def test_a_host_reaches_the_head_at_once_after_any_other_was_killed(breakable: Lab) -> None:
    hosts = breakable.hosts
    with socket.create_server((breakable.head_address, 0)) as server:
        knock = f"timeout 3 bash -c 'exec 3<>/dev/tcp/{breakable.head_address}/{server.getsockname()[1]}'; echo $?"
        for killed, other in zip(hosts, hosts[1:] + hosts[:1], strict=True):
            assert breakable.run(other, knock).strip() == "0", "it knows the hardware address of the head"
            breakable.kill(killed)
            assert breakable.run(other, knock).strip() == "0", "and that is still right"
            breakable.revive(killed)


def test_leftovers_on_a_host_or_of_ssh_are_reported(lab: Lab) -> None:
    host = lab.hosts[0]
    with subprocess.Popen(
        [lab.ssh, host, "touch /dev/shm/mine; echo; exec sleep 1000"], stdout=subprocess.PIPE
    ) as login:
        assert login.stdout is not None
        login.stdout.readline()
        sample, at_head = lab._hosts[host].left(), lab._left_on_head()
        lab.run(host, "rm /dev/shm/mine")
        places.end([process for process in lab.processes(host) if "sleep 1000" in places.command_line_of(process)])
    assert "/dev/shm/mine" in sample
    assert any("sleep 1000" in line for line in sample)
    assert any(str(lab.folder) in line for line in at_head)
    assert lab.left_on("head") == lab.left_on(host) == []


def test_slurm_uses_a_host_again_after_its_restart(breakable: Lab, slurm: Slurm) -> None:
    breakable.kill(breakable.hosts[2])
    breakable.restore()
    names = slurm.run("srun", f"--nodes={len(breakable.hosts)}", "hostname").split()
    assert sorted(names) == breakable.hosts


def test_labs_run_side_by_side_and_orphaned_ones_are_removed(lab: Lab) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KEEPS_A_LAB], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        other = places.Place(int(owner.stdout.readline()))
        owner.send_signal(signal.SIGKILL)
    assert other.lab_id != lab.place.lab_id
    assert other.namespaces(), "it is not removed yet"
    with Lab(1) as next_lab:
        assert not places.left_of(other) or other == next_lab.place
    assert not places.left_of(next_lab.place)
