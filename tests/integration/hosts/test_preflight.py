"""Check hosts before the start, and choose their network.

Covers: real hosts with real faults.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import sys
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain.errors import LaunchError
from jupyter_disttrain.launchers.hosts import probe
from jupyter_disttrain.launchers.hosts.network import choose_network, describe
from jupyter_disttrain.launchers.hosts.preflight import check
from jupyter_disttrain.launchers.hosts.probe_runner import survey, survey_by
from jupyter_disttrain.launchers.hosts.report import HostReport, HostRequirements, own_addresses
from jupyter_disttrain.launchers.mpi import find_mpiexec

from ...lab.places import command
from ...support.process_tools import own_children

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ...lab import Lab

TABLE = "preflight"  # of the packet filter


@pytest.fixture(scope="module")
def shared(lab: Lab) -> Path:
    """A folder that all hosts share."""
    folder = lab.folder / "shared"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def wanted(shared: Path) -> HostRequirements:
    return HostRequirements.here(mpiexec=find_mpiexec(), shared_folder=shared, reach_s=1.0)


def refusal(reports: list[HostReport], wanted: HostRequirements, ssh: list[str]) -> list[str]:
    """Return the lines of the message that refuses these hosts."""
    with pytest.raises(LaunchError) as refused:
        check(reports, wanted, ssh)
    return str(refused.value).splitlines()


@contextmanager
def mounted(lab: Lab, host: str, folder: Path) -> Iterator[None]:
    """Mount an empty folder on a host there."""
    lab.run(host, f"mount -t tmpfs tmpfs {folder}")
    try:
        yield
    finally:
        lab.run(host, f"umount {folder}")


@contextmanager
def new_connections_dropped(interface: str, but: int, *enter: str) -> Iterator[None]:
    """Drop connections opened from outside, except to one port; replies pass, as with most firewalls."""
    rule = f'iifname "{interface}" tcp flags & (syn | ack) == syn tcp dport != {but} drop'
    hook = "type filter hook input priority 0; policy accept;"
    command(*enter, "nft", f"table inet {TABLE} {{\nchain input {{ {hook}\n{rule}\n}}\n}}")
    try:
        yield
    finally:
        command(*enter, "nft", "delete", "table", "inet", TABLE)


@contextmanager
def silent_server(lab: Lab) -> Iterator[tuple[list[str], socket.socket]]:
    """Listen where a host named "silent" is configured to have its sshd, and send nothing."""
    with socket.create_server((lab.head_address, 0)) as server:
        address, port = server.getsockname()
        yield [str(lab.ssh), "-o", f"HostName={address}", "-o", f"Port={port}"], server


def test_complete_hosts_are_accepted_and_their_network_is_found(
    lab: Lab, wanted: HostRequirements, shared: Path
) -> None:
    reports = survey(lab.hosts, [str(lab.ssh)], wanted)
    assert check(reports, wanted) == []
    assert [report.name for report in reports] == lab.hosts
    assert {report.torch for report in reports} == {probe.version_of("torch")}
    network = choose_network(own_addresses(), reports)
    assert network.client_address == lab.head_address
    assert [each.address for each in network.addresses.values()] == [lab.address(host) for host in lab.hosts]
    assert describe(network) == f"network {network.cidr} (eth0)"
    assert list(shared.iterdir()) == [], "the file that proves the shared folder is gone"
    left = [process.cmdline() for host in lab.hosts for process in lab.processes(host)]
    probes = [text for text in left if sys.executable in text and "jupyter_disttrain.rank.warm" not in text]
    assert not probes, "none runs any more; the warm process of an earlier cluster may"


def test_missing_requirements_of_each_host_are_reported_with_advice(
    breakable: Lab, wanted: HostRequirements, shared: Path, tmp_path: Path
) -> None:
    lab = breakable
    modules = tmp_path / "modules"
    modules.mkdir()
    wanted = replace(
        wanted,
        python_path=(str(modules), *wanted.python_path),
        temporary_folder=str(lab.local_disk),
        least_free_bytes=1 << 20,
    )
    metadata = modules / "torch-1.13.1.dist-info"
    (tmp_path / "config").write_text(
        f"Host closed\n HostName {lab.address('node3')}\n Port 1\n"
        f"Host stranger\n HostName {lab.address('node3')}\n UserKnownHostsFile /dev/null\n"
        f"Host keyless\n HostName {lab.address('node3')}\n PubkeyAuthentication no\n"
        f"Match all\n Include {lab.folder}/ssh_config\n"
    )
    ssh = ["ssh", "-F", str(tmp_path / "config")]
    hosts = ["node1", "node2", "node3", "closed", "nowhere.invalid", "stranger", "keyless", "nobody@node1"]
    hosts.append(lab.address("node3"))
    with mounted(lab, "node1", shared), mounted(lab, "node2", modules):
        lab.run("node2", f"mkdir {metadata}; printf 'Name: torch\\nVersion: 1.13.1\\n' > {metadata}/METADATA")
        lab.fill("node3")
        lab.run("node1", f"rm -rf {shared}/*; mount -o remount,ro {shared}")
        lines = refusal(survey(hosts, ssh, wanted), wanted, ssh)
    text = "\n".join(lines)
    assert lines[0] == "9 of 9 hosts can't be used as requested, so nothing was started"
    here = probe.version_of("torch")
    for expected in (
        f"node1: {shared} is not the same folder there as on this machine: the hosts share no file system; mount",
        f"node1: no file can be written into {shared} (Read-only file system); free disk space",
        f"node2: torch is 1.13.1 there, here it is {here}; install the same on all hosts, e.g. pip install torch==",
        f"node3, {lab.address('node3')}: no file can be written into {lab.local_disk} (No space left on device)",
        "closed: the ssh port there refuses connections",
        "nowhere.invalid: there is no host of this name (Could not resolve hostname nowhere.invalid: Name",
        "stranger: the host key is not known here (Host key verification failed.); log in once in a terminal",
        "keyless: ssh was denied without a password (root@keyless: Permission denied (publickey",
        "nobody@node1: ssh works, but this user has no shell there (This account is currently not available.); name",
        f"{lab.address('node3')}: the same host as node3; name each host once",
    ):
        assert f"\n  {expected}" in text, text
    assert f"confirm the key: {' '.join(ssh)} stranger" in text, text


def test_requirement_missing_on_hosts_is_reported_once(lab: Lab, wanted: HostRequirements, tmp_path: Path) -> None:
    ssh = [str(lab.ssh)]
    lacking = replace(
        wanted,
        working_folder=str(tmp_path / "none"),
        package_version="0.0.1",
        mpi_version="4.1.6",
        shared_folder=None,
        least_free_bytes=1 << 60,
    )
    lines = refusal(survey(lab.hosts[:2], ssh, lacking), lacking, ssh)[1:]
    assert all(line.startswith("  node1, node2: ") or "too little disk space is free" in line for line in lines)
    for expected in (
        "working directory",
        "jupyter_disttrain is 0.1.0 there",
        "Open MPI is",
        "free disk space: ranks need",
    ):
        assert any(expected in line for line in lines), expected
    absent = replace(wanted, python="/nowhere/bin/python")
    (line,) = refusal(survey(["node1"], ssh, absent), absent, ssh)[1:]
    assert "/nowhere/bin/python can't be run there" in line


def test_firewall_is_reported_with_the_addresses_it_separates(lab: Lab, wanted: HostRequirements) -> None:
    node1 = lab._hosts["node1"].enter()
    with new_connections_dropped("eth0", 2222, *node1), new_connections_dropped(lab.place.bridge, 1):
        reports = survey(lab.hosts, [str(lab.ssh)], wanted)
    lines = refusal(reports, wanted, [str(lab.ssh)])
    address = re.escape(lab.address("node1"))
    unreached = rf"  node2, node3: can't reach node1 \({address}\) on port \d+ \(no reply\); .*arbitrary ports between"
    assert any(re.match(unreached, line) for line in lines)
    head = f"  node1, node2, node3: can't reach this machine at {lab.head_address} (no reply)"
    assert any(line.startswith(head) for line in lines)
    assert len(lines) == 3


def test_host_without_addresses_does_not_hide_closed_ports_between_the_others(
    lab: Lab, wanted: HostRequirements, tmp_path: Path
) -> None:
    (tmp_path / "psutil.py").write_text("raise ImportError('not built')")

    def way(host: str, command: list[str]) -> list[str]:
        lacking = ["env", f"PYTHONPATH={tmp_path}"] if host == "node3" else []
        return [str(lab.ssh), host, shlex.join([*lacking, *command])]

    with new_connections_dropped("eth0", 2222, *lab._hosts["node1"].enter()):
        text = "\n".join(refusal(survey_by(way, lab.hosts, wanted, {}), wanted, [str(lab.ssh)]))
    assert "\n  node3: psutil can't be imported there (not built); install" in text
    assert "\n  node2: can't reach node1 (" in text


def test_network_can_be_named_and_is_used_where_all_hosts_have_it(lab: Lab, wanted: HostRequirements) -> None:
    network, wide = f"10.99.{lab.place.lab_id}", f"10.99.{lab.place.lab_id}.0/24"
    fast = replace(wanted, interface=wide)
    with ExitStack() as stack:
        for number, name in enumerate(lab.hosts[:2], 1):
            stack.enter_context(new_interface(lab, name, f"fast{number}", f"{network}.{number}/24"))
        stack.enter_context(new_route(lab, wide))
        reports = survey(lab.hosts, [str(lab.ssh)], fast)
        first = survey(lab.hosts[:2], [str(lab.ssh)], fast)
        chosen = choose_network(own_addresses(), first, wide)
    assert describe(chosen) == f"network {wide} (fast1 on node1, fast2 on node2)"
    # The interfaces have addresses, but no cable between them.
    assert any(f"can't reach node2 ({network}.2)" in line for line in refusal(first, fast, [str(lab.ssh)]))
    with pytest.raises(LaunchError, match=r"^node3 has no address in .*; name another .*node3 has 10\.77"):
        choose_network(own_addresses(), reports, wide)
    with pytest.raises(LaunchError, match=r"^node1, node2, node3 have no address in 10\.98\."):
        choose_network(own_addresses(), reports, "10.98.0.0/16")
    for loopback in ("lo", "127.0.0.0/8"):
        text = rf"--interface {loopback} is loopback, .* node1 has 10\.77\S* \(eth0\).*; node2 has"
        with pytest.raises(LaunchError, match=text):
            choose_network(own_addresses(), reports, loopback)


@contextmanager
def new_interface(lab: Lab, name: str, interface: str, address: str) -> Iterator[None]:
    """Give a host an interface whose cable ends in the host itself."""
    lab.run(
        name, f"ip link add {interface} type veth peer name end && ip link set end up && ip link set {interface} up"
    )
    try:
        lab.run(name, f"ip address add {address} dev {interface}")
        yield
    finally:
        lab.run(name, f"ip link delete {interface}")


@contextmanager
def new_route(lab: Lab, network: str) -> Iterator[None]:
    command("ip", "route", "add", network, "dev", lab.place.bridge)
    try:
        yield
    finally:
        command("ip", "route", "delete", network, "dev", lab.place.bridge)


def test_silent_host_times_out_and_its_ssh_is_ended(lab: Lab, wanted: HostRequirements) -> None:
    soon = replace(wanted, limit_s=0.3)
    with silent_server(lab) as (ssh, _):
        reports = survey(["silent"], ssh, soon)
    assert not own_children("ssh")
    assert "silent: no reply within 0.3 s" in refusal(reports, soon, ssh)[1]


def test_interrupt_ends_every_ssh(lab: Lab, wanted: HostRequirements, shared: Path) -> None:
    with silent_server(lab) as (ssh, server):

        def interrupt_once_ssh_is_there() -> None:
            with server.accept()[0]:
                os.kill(os.getpid(), signal.SIGINT)
                done.wait()

        done = threading.Event()
        thread = threading.Thread(target=interrupt_once_ssh_is_there)
        thread.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                survey(["silent", "node1"], ssh, wanted)
        finally:
            done.set()
            thread.join()
    assert not own_children("ssh")
    assert list(shared.iterdir()) == []


def test_missing_ssh_is_named(wanted: HostRequirements) -> None:
    with pytest.raises(LaunchError, match="cannot run no-such-ssh: No such file or directory; install OpenSSH"):
        survey(["node1"], ["no-such-ssh"], replace(wanted, shared_folder=None))


def test_clock_skew_and_unequal_gpus_are_warnings(wanted: HostRequirements) -> None:
    fine = HostReport(
        name="a",
        python=wanted.python_version,
        torch=wanted.torch or "",
        package_folder=wanted.package_folder,
        package_version=wanted.package_version,
        package_digest=wanted.package_digest,
        daemon=wanted.mpi_version,
    )
    late = replace(fine, name="b", hostname="b", clock_ahead_s=-61.0, gpus=2)
    text = check([fine, late], wanted)
    assert text[0].startswith("clocks differ from this machine's: b is 61 s behind; ")
    assert text[1] == "the hosts have different numbers of GPUs: a 0, b 2"


def test_hosts_with_the_same_problem_are_reported_once(wanted: HostRequirements) -> None:
    text = "ssh: Could not resolve hostname {}: Name or service not known"
    reports = [HostReport(name=name, failure=text.format(name), exit_code=255) for name in ("node7", "node71")]
    with pytest.raises(
        LaunchError, match=r"\n  node7, node71: there is no host of this name .*hostname HOST: Name"
    ) as caught:
        check(reports, wanted)
    assert str(caught.value).count("there is no host") == 1
