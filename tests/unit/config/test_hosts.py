"""Parse host lists, hostfiles and ssh commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_disttrain.config.cluster import ClusterConfig
from jupyter_disttrain.config.hosts import HostSlots, is_local, parse_hostfile, parse_hosts, split_command, take_hosts
from jupyter_disttrain.errors import UsageError


def pairs(hosts: tuple[HostSlots, ...]) -> list[tuple[str, int | None]]:
    return [(host.name, host.slots) for host in hosts]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1:4,node2:4", [("node1", 4), ("node2", 4)]),
        ("node1, node2", [("node1", None), ("node2", None)]),
        ("node1 node2:2", [("node1", None), ("node2", 2)]),
        ("eva@node1:2", [("eva@node1", 2)]),
        ("10.0.0.1:2", [("10.0.0.1", 2)]),
        ("[fd00::1]:2,[fd00::2]", [("fd00::1", 2), ("fd00::2", None)]),
        ("eva@[fe80::1%eth0]:1", [("eva@fe80::1%eth0", 1)]),
        ("node1,node1,node2", [("node1", 2), ("node2", None)]),
        ("node1:2,node2:1,node1:3", [("node1", 5), ("node2", 1)]),
        ("localhost:2", [("localhost", 2)]),
    ],
)
def test_hosts_keep_their_order(text: str, expected: list[tuple[str, int | None]]) -> None:
    assert pairs(parse_hosts(text)) == expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no host"),
        (",", "no host"),
        ("node1:", "'node1:'"),
        ("node1:0", "1 to 4096; leave out hosts without ranks"),
        ("node1:4:2", "cannot read 'node1:4:2'"),
        ("node1:-1", "1 to 4096"),
        ("node1:4096,node1", "4097"),
        ("node1:four", "'node1:four'"),
        ("fd00::1:2", "in brackets"),
        ("[node1]:2", "cannot read '[node1]:2'"),
        ("[fe80::1%;id]:2", "'[fe80::1%;id]:2'"),
        ("[fe80::1%$(id)]", "'[fe80::1%$(id)]'"),
        ("[fe80::1%`id`]", "'[fe80::1%`id`]'"),
        ("[fe80::1%-x]", "'[fe80::1%-x]'"),
        ("[fd00::1]2", "'[fd00::1]2'"),
        ("-oProxyCommand=x", "'-oProxyCommand=x'"),
        ("-l@node1", "'-l@node1'"),
        ("@node1", "'@node1'"),
        ("a@b@node1", "'a@b@node1'"),
        ("node1;ls", "'node1;ls'"),
        ("node1,localhost:2", "localhost beside other hosts"),
        ("127.0.0.1,node1", "127.0.0.1 beside other hosts"),
    ],
)
def test_invalid_host_is_quoted_in_the_error(text: str, named: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_hosts(text)
    assert named in str(refused.value)


@given(st.text())
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        hosts = parse_hosts(text)
    except UsageError:
        return
    assert hosts
    assert all(host.name and not host.name.startswith("-") and not set(host.name) & set(" '\";$\n") for host in hosts)


@given(
    st.lists(st.tuples(st.from_regex(r"n[a-z0-9]{0,2}", fullmatch=True), st.integers(1, 64)), min_size=1, max_size=20)
)
def test_repeated_hosts_are_merged_with_all_their_ranks(written: list[tuple[str, int]]) -> None:
    hosts = parse_hosts(",".join(f"{name}:{slots}" for name, slots in written))
    assert [host.name for host in hosts] == list(dict.fromkeys(name for name, _ in written))
    assert sum(host.slots or 0 for host in hosts) == sum(slots for _, slots in written)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# all\nnode1 slots=4\nnode2 slots = 2 max_slots=8  # the small one\n\n", [("node1", 4), ("node2", 2)]),
        ("node1:4\nnode2:4\n", [("node1", 4), ("node2", 4)]),
        ("node1\nnode2\n", [("node1", None), ("node2", None)]),
        ("node1\nnode1\nnode2\n", [("node1", 2), ("node2", None)]),
        ("node1 slots=2\nnode1 slots=2\n", [("node1", 4)]),
    ],
)
def test_hostfile_formats_are_parsed(tmp_path: Path, text: str, expected: list[tuple[str, int | None]]) -> None:
    (tmp_path / "hosts").write_text(text)
    assert pairs(parse_hostfile(tmp_path / "hosts")) == expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("# none\n", "no host is named"),
        ("node1\nnode2 slots=x\n", "line 2"),
        ("node1 slts=4\n", "'slts=4'"),
        ("node1:4 slots=4\n", "'slots=4'"),
        ("^node1\n", "'^node1'"),
        ("node1,node2\n", "'node1,node2' in line 1"),
        ("node1;node2\n", "write a host on each line, e.g. node1 slots=4"),
        ("node1\nlocalhost\n", "beside other hosts"),
    ],
)
def test_invalid_hostfile_is_refused_with_its_line(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(UsageError) as refused:
        parse_hostfile(tmp_path / "hosts")
    assert named in str(refused.value)


def test_missing_hostfile_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, why in (("none", "No such file"), ("binary", "not a text file")):
        with pytest.raises(UsageError, match=why):
            parse_hostfile(tmp_path / name)


def test_ranks_fill_the_first_hosts() -> None:
    hosts = parse_hosts("node1:4,node2,node3:1")
    assert pairs(take_hosts(hosts, 2, 8)) == [("node1", 8), ("node2", 8)]
    assert pairs(take_hosts(hosts, 1)) == [("node1", 4)]
    assert take_hosts(hosts) == hosts
    with pytest.raises(UsageError, match="4 nodes were requested, and 3 hosts are named"):
        take_hosts(hosts, 4)
    with pytest.raises(UsageError, match="2 nodes were requested, and 1 host is named"):
        take_hosts(hosts[:1], 2)
    with pytest.raises(UsageError, match="not 0"):
        take_hosts(hosts, 2, 0)


def test_ssh_command_is_split_like_a_shell_or_refused() -> None:
    assert split_command("ssh -o 'ProxyCommand=nc %h 22'") == ["ssh", "-o", "ProxyCommand=nc %h 22"]
    with pytest.raises(UsageError, match=r"cannot read --ssh .*No closing quotation"):
        split_command("ssh -o 'ProxyCommand=nc")
    with pytest.raises(UsageError, match="--ssh names no command"):
        split_command(" ")
    hosts = parse_hosts("node1:1")
    with pytest.raises(UsageError, match="mpiexec can't pass on 'ProxyCommand=nc %h 22' of --ssh"):
        ClusterConfig(hosts=hosts, ssh="ssh -o 'ProxyCommand=nc %h 22'")
    ClusterConfig(hosts=hosts, launcher="ssh", ssh="ssh -o 'ProxyCommand=nc %h 22'")


def test_names_of_the_local_machine() -> None:
    assert all(map(is_local, ["localhost", "eva@localhost", "LOCALHOST", "127.0.0.1", "127.0.1.1", "::1"]))
    assert not any(map(is_local, ["node1", "10.0.0.1", "localhost1", "fd00::1"]))
