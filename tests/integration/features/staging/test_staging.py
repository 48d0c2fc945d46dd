"""``%dist_stage``: a data set is copied to each node's disk once, completely or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.config.hosts import HostSlots
from jupyter_disttrain.errors import ClusterClosedError, RankFailure, StageError
from jupyter_disttrain.features.staging import client

from ....support.process_tools import own_children
from ....support.stage_tools import MIB, FileServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from jupyter_disttrain.features.staging.links import Place

    from ....lab import Lab
    from ....support.notebook_driver import Notebook


# Ranks on hosts


@pytest.fixture(scope="module")
def nodes(lab: Lab) -> Iterator[Cluster]:
    """Two ranks on one host, and one on each of two others."""
    with on_hosts(lab, 2, 1, 1) as cluster:
        yield cluster


def on_hosts(lab: Lab, *slots: int, **options: object) -> Cluster:
    there = tuple(HostSlots(name=lab.address(f"node{at}"), slots=count) for at, count in enumerate(slots, 1))
    return Cluster(hosts=there, launcher="ssh", ssh=str(lab.ssh), backend="none", name="nodes", **options)


def hashes(lab: Lab, path: str) -> set[str]:
    return {lab.run(host, f"sha256sum < {path}").split()[0] for host in lab.hosts}


def test_url_is_read_once_for_all_nodes_and_transferred_encrypted(breakable: Lab, nodes: Cluster) -> None:
    content = os.urandom(MIB) + b"a word in clear" * (20 * MIB // 15)
    progress: list[client.StageProgress] = []
    with FileServer(content, breakable.head_address) as server, breakable.capture() as capture:
        staged = nodes.staging.stage(server.url, breakable.local_disk, name="data", on_progress=progress.append)
        assert server.sent == len(content)
        nodes.staging.stage(server.url, breakable.local_disk)
        assert server.sent == len(content)
    path = f"{breakable.local_disk}/file.bin"
    assert nodes.run("data").results == dict.fromkeys(range(4), path) == dict(staged.paths)
    assert hashes(breakable, path) == {hashlib.sha256(content).hexdigest()}
    server_port = int(server.url.split(":")[2].split("/")[0])
    between = {ends: sent for ends, sent in capture.streams().items() if server_port not in (ends[1], ends[3])}
    assert sum(map(len, between.values())) > 2 * len(content)  # from node to node
    assert not any(b"a word in clear" in sent for sent in between.values())
    assert str(staged).startswith("file.bin: 22.0 MB in 1 file, on 3 nodes in ")


def test_data_on_the_notebook_machine_is_sent_from_there_over_ssh_if_needed(breakable: Lab, nodes: Cluster) -> None:
    source = breakable.local_disk / "only-here"  # each host has another disk there
    source.mkdir()
    try:
        (source / "large").write_bytes(os.urandom(MIB) + b"a word in clear" * (7 * MIB // 15))
        hashed = hashlib.sha256((source / "large").read_bytes()).hexdigest()
        to = f"{breakable.local_disk}/to"
        with breakable.capture() as capture:
            staged = nodes.staging.stage(source, to)
        assert staged.read_on == f"{socket.gethostname()}, the notebook's machine"
        assert f"; read once, on {staged.read_on}\n" in str(staged)
        assert hashes(breakable, f"{to}/only-here/large") == {hashed}
        assert not any(b"a word in clear" in sent for sent in capture.streams().values())
        (source / "small").write_text("small")
        breakable.close_to_head("node1")
        staged = nodes.staging.stage(source, to)
        assert staged.read_bytes == len("small")
        assert staged.read_on.endswith(f"the notebook's machine, and sent through ssh to {breakable.address('node1')}")
        os.mkfifo(source / "pipe")
        with pytest.raises(
            StageError, match=rf"not copied to every node: {socket.gethostname()}: .*/pipe is not a regular file"
        ):
            nodes.staging.stage(source, to)
    finally:
        shutil.rmtree(source)
    assert own_children("-L") == []


def test_full_disk_is_one_message_and_the_next_call_resumes(breakable: Lab, nodes: Cluster, data: Path) -> None:
    nodes.staging.stage(data, breakable.local_disk)
    for number in range(400):  # a file occupies more than its size, by an unknown amount
        (data / f"{number}").write_text("x")
    breakable.fill("node2")
    breakable.run("node2", f"truncate --size -1M {breakable.local_disk}/filler")
    with pytest.raises(RankFailure, match=r"rank 2 \(node2\).*the disk of node2 is full.*name another disk with --to"):
        nodes.staging.stage(data, breakable.local_disk)
    count = f"cd {breakable.local_disk}/data; find . -type f -size 1c | wc -l"
    there = min(int(breakable.run(host, count)) for host in breakable.hosts)  # node3 may have fewer than node2
    breakable.run("node2", f"rm {breakable.local_disk}/filler")
    staged = nodes.staging.stage(data, breakable.local_disk)
    assert staged.copied_bytes <= 400 - there + 1
    assert {breakable.run(host, f"ls {breakable.local_disk}/data | wc -l").strip() for host in breakable.hosts} == {
        "403"
    }


def test_interrupted_file_is_not_visible_and_copied_by_the_next_call(breakable: Lab, nodes: Cluster) -> None:
    content = os.urandom(24 * MIB)
    path = f"{breakable.local_disk}/file.bin"
    with FileServer(content, breakable.head_address) as server:
        server.hold(16 * MIB)
        is_written = threading.Event()

        def report(progress: client.StageProgress) -> None:
            if progress.done_bytes == 16 * MIB:
                is_written.set()

        with on_event(is_written, nodes.interrupt), pytest.raises(RankFailure, match="KeyboardInterrupt"):
            nodes.staging.stage(server.url, breakable.local_disk, on_progress=report)
        assert not any(breakable.run(host, f"ls {path}", check=False).strip() for host in breakable.hosts)
        server.release()
        assert nodes.staging.stage(server.url, breakable.local_disk).read_bytes == 24 * MIB
    assert hashes(breakable, path) == {hashlib.sha256(content).hexdigest()}


def test_closed_port_between_nodes_is_named(
    breakable: Lab, nodes: Cluster, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.run("import jupyter_disttrain.features.staging.pipeline as relay; relay.GREET_SECONDS = 1.0")
    prepare = client._Copy.prepare

    def closed(copy: client._Copy, to: str | None) -> list[Place]:
        chain = prepare(copy, to)
        breakable.firewall("node2", chain[1].url.rpartition(":")[2])
        return chain

    monkeypatch.setattr(client._Copy, "prepare", closed)
    where = f"node1 could not connect to node2 at tcp://{breakable.address('node2')}:.* within 1 s; open the ports"
    with pytest.raises(RankFailure, match=where) as caught:
        nodes.staging.stage(data, breakable.local_disk)
    assert len(caught.value.failures) == 1
    nodes.run("relay.GREET_SECONDS = 20.0; del relay")


def test_death_of_a_node_ends_the_others(breakable: Lab) -> None:
    content = os.urandom(24 * MIB)
    with (
        FileServer(content, breakable.head_address) as server,
        on_hosts(breakable, 1, 1, 1, on_rank_death="stop") as cluster,
    ):
        server.hold(16 * MIB)
        with (
            on_event(server.holding, lambda: breakable.kill("node3")),
            # what ends first: the copy on the others, or the cluster (--on-rank-death stop)
            pytest.raises((RankFailure, StageError, ClusterClosedError), match="node3"),
        ):
            cluster.staging.stage(server.url, breakable.local_disk)


class on_event:  # noqa: N801  (it reads as a word)
    """Call a function in a thread as soon as an event is set."""

    def __init__(self, event: threading.Event, what: Callable[[], object]) -> None:
        self._thread = threading.Thread(target=lambda: event.wait(60) and what())

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_exc: object) -> None:
        self._thread.join()


# On one machine


def test_invalid_sources_are_reported(torchless: Cluster, tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"nothing does not exist on .*; put it on a file system that a node can read"):
        torchless.staging.stage(tmp_path / "nothing")
    with pytest.raises(RankFailure, match="s3://bucket/x can't be read by the ranks' Python; run: pip install s3fs"):
        torchless.staging.stage("s3://bucket/x", tmp_path)
    with pytest.raises(StageError, match=r"rank 0: .* can't write /proc/"):
        torchless.staging.stage(tmp_path, "/proc/nothing")


def test_magic_shows_one_line(notebook: Notebook, data: Path, tmp_path: Path) -> None:
    outcome = notebook.run(f"%dist_stage {data} --to {tmp_path}/local --as where").check()
    assert len(outcome.outputs) == 1
    assert outcome.lines[0].startswith("data: 3.1 MB in 3 files, on 1 node in ")
    assert outcome.lines[0].endswith(f"; read once, on {socket.gethostname()}")
    assert outcome.lines[1:] == [f"{tmp_path}/local/data"]
    assert notebook.run("%%rank 1\nprint(where)").check().lines == [f"{tmp_path}/local/data"]
    again = notebook.run(f"%dist_stage {data} --to {tmp_path}/local").check()
    assert again.lines[0].startswith("data: 3.1 MB in 3 files on 1 node, already complete")


def test_unreadable_url_is_shown_without_its_signature(torchless: Cluster, tmp_path: Path) -> None:
    with FileServer(b"content") as server:
        address = server.url.replace("://", "://me:secret@")
    for refused in (f"{address}?sig=hidden", "s3://me:secret@bucket/x?sig=hidden", "http://me:secret@[x/?sig=hidden"):
        with pytest.raises(RankFailure) as caught:
            torchless.staging.stage(refused, tmp_path)
        shown = str(caught.value) + "".join(str(failure) for failure in caught.value.failures)
        assert "hidden" not in shown
        assert "secret" not in shown


@pytest.mark.parametrize("change", ["del os.environ['MASTER_ADDR']", "os.environ['MASTER_ADDR'] = 'nowhere.invalid'"])
def test_rank_0_location_does_not_depend_on_the_user_variable(
    torchless: Cluster, data: Path, tmp_path: Path, change: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os; print(os.environ['MASTER_ADDR'])")
    before = torchless.run("import os; os.environ['MASTER_ADDR']").results[0]
    torchless.run(change)
    try:
        assert torchless.staging.stage(data, tmp_path / "a").copied_bytes == 3 * MIB + 10
        run = torchless.scripts.run(script)
        assert [line for text in run.stdout.values() for line in text.split()] == [before] * 2
    finally:
        torchless.run(f"os.environ['MASTER_ADDR'] = {before!r}")
