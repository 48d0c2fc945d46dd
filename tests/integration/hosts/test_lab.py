"""The lab's guarantees to tests on several hosts.

Covers: hosts and what they do not share, faults of hosts and network, the capture, Slurm, several labs, leftovers.
Does not cover: our own ranks on these hosts.
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


def ssh(lab: Lab, host: str, script: str) -> str:
    return subprocess.run(
        [lab.ssh, host, script], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def reaches(lab: Lab, host: str, port: int = SSH_PORT) -> bool:
    try:
        socket.create_connection((lab.address(host), port), timeout=3).close()
    except TimeoutError:  # and it was not refused
        return False
    return True


def test_host_has_its_own_name_shared_memory_and_disk_and_resolves_the_others(lab: Lab) -> None:
    assert [ssh(lab, host, "hostname") for host in lab.hosts] == lab.hosts
    first, second, *_ = lab.hosts
    own = ["/dev/shm", str(lab.local_disk), ssh(lab, first, "echo $TMPDIR")]
    for folder in own:
        lab.run(first, f"touch {folder}/mine")
        assert "mine" not in lab.run(second, f"ls {folder}").split()
        assert not (Path(folder) / "mine").exists()
        lab.run(first, f"rm {folder}/mine")
    assert ssh(lab, first, f"{lab.ssh} {second} hostname") == second
    assert ssh(lab, first, f"getent hosts {second} head").split()[::2] == [lab.address(second), lab.head_address]
    assert lab.run(second, f"ls {__file__}").strip() == __file__, "the rest of the file system is shared"


def test_cut_host_is_silent_until_it_is_reconnected(breakable: Lab) -> None:
    host = breakable.hosts[0]
    assert reaches(breakable, host)
    breakable.cut(host)
    assert not reaches(breakable, host)
    assert breakable.run(host, "hostname").strip() == host, "it still runs"
    breakable.heal(host)
    assert reaches(breakable, host)


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


def test_closed_port_drops_packets_and_full_disk_takes_nothing(breakable: Lab) -> None:
    first, second, *_ = breakable.hosts
    with socket.create_server((breakable.head_address, 0)) as server:
        port = server.getsockname()[1]
        to_head = f"exec 3<>/dev/tcp/{breakable.head_address}/{port}"
        knock = f"timeout 5 bash -c '{to_head}'; echo $?"
        assert breakable.run(first, knock).strip() == "0"
        breakable.firewall("head", port)
        breakable.firewall(first, f"{SSH_PORT}-{SSH_PORT + 5}")
        assert breakable.run(first, knock).strip() == "124", "neither accepted nor refused"
    assert not reaches(breakable, first)
    assert reaches(breakable, second)
    breakable.fill(first)
    write = f"head -c 1 /dev/zero > {breakable.local_disk}/more"
    with pytest.raises(places.LabError, match="No space left"):
        breakable.run(first, write)
    breakable.run(second, write)
    breakable.restore()
    assert reaches(breakable, first)
    breakable.run(first, write)


def test_capture_has_the_traffic_between_any_two_hosts(lab: Lab) -> None:
    first, second, *_ = lab.hosts
    secret = b"nobody may read this"
    with lab.capture() as capture, socket.create_server((lab.head_address, 0)) as server:
        port = server.getsockname()[1]
        lab.run(first, f"bash -c 'echo {secret.decode()} > /dev/tcp/{lab.head_address}/{port}'")
        ssh(lab, first, f"{lab.ssh} {second} true")
    streams = capture.streams()
    assert secret in capture.data
    assert [text for (*_, target), text in streams.items() if target == port] == [secret + b"\n"]
    between = [text for (source, *_), text in streams.items() if source == lab.address(second)]
    assert any(text.startswith(b"SSH-2.0") for text in between)


def test_listening_sockets_of_a_host_are_reported(lab: Lab) -> None:
    assert {(socket.program, socket.port) for socket in lab.listening(lab.hosts[0])} >= {("sshd", SSH_PORT)}


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


def test_slurm_runs_a_job_on_two_hosts(lab: Lab, slurm: Slurm) -> None:
    names = slurm.run("srun", "--nodes=2", "--ntasks-per-node=1", "--mpi=pmix", "hostname").split()
    assert len(set(names)) == 2
    assert set(names) <= set(lab.hosts)


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
