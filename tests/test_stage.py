"""``%dist_stage``: a data set comes to each node's disk once, whole or not at all."""

from __future__ import annotations

import hashlib
import os
import queue
import shutil
import socket
import threading
from typing import TYPE_CHECKING

import pytest
import zmq

from jupyter_disttrain import Cluster
from jupyter_disttrain.cluster import staging
from jupyter_disttrain.engine.stage_source import Source, SourceFile
from jupyter_disttrain.errors import RankFailure, StageError
from jupyter_disttrain.hosts import HostSlots

from .process_tools import own_children
from .stage_tools import Chain, FileServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .lab import Lab
    from .notebook_driver import Notebook

MIB = 1 << 20


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data set of three files, one of several blocks."""
    folder = tmp_path / "source" / "data"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "large").write_bytes(os.urandom(3 * MIB + 5))
    (folder / "small").write_text("small")
    (folder / "empty").touch()
    return folder


def files(folder: Path) -> dict[str, bytes]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


# A chain of nodes, each with a folder of this machine


def test_each_node_gets_what_it_lacks_and_the_source_is_read_once(data: Path, tmp_path: Path) -> None:
    nodes = [tmp_path / f"node{at}" for at in range(3)]
    relays = Chain(data, nodes).run()
    assert [(relay.fault, relay.ended) for relay in relays] == [(None, "")] * 3
    assert [files(node / "data") for node in nodes] == [files(data)] * 3
    assert [relay.read_bytes for relay in relays] == [3 * MIB + 10, 0, 0]
    assert [path.name for path in (nodes[0] / ".data.disttrain-stage").iterdir()] == ["files.jsonl", "lock"]

    (nodes[1] / "data" / "small").unlink()
    (nodes[2] / "data" / "deep" / "large").unlink()
    relays = Chain(data, nodes).run()
    assert [relay.tell()["copied_bytes"] for relay in relays] == [0, 5, 3 * MIB + 5]
    assert relays[0].read_bytes == 3 * MIB + 10

    (data / "small").unlink()
    (data / "new").write_text("new")
    relays = Chain(data, nodes).run()
    assert relays[0].read_bytes == 3
    assert [files(node / "data") for node in nodes] == [files(data)] * 3


def test_what_was_spoilt_since_is_found_by_its_hash(data: Path, tmp_path: Path) -> None:
    nodes = [tmp_path / f"node{at}" for at in range(2)]
    Chain(data, nodes).run()
    (nodes[1] / "data" / "small").write_text("smell")
    assert [relay.tell()["copied_bytes"] for relay in Chain(data, nodes).run()] == [0, 0]
    assert [relay.tell()["copied_bytes"] for relay in Chain(data, nodes, verify=True).run()] == [0, 5]
    assert files(nodes[1] / "data") == files(data)


def test_a_folder_that_two_nodes_see_is_written_once(data: Path, tmp_path: Path) -> None:
    relays = Chain(data, [tmp_path / "one", tmp_path / "shared", tmp_path / "shared"]).run()
    assert [relay.tell()["shares_with"] for relay in relays] == ["", "", "node1"]
    assert [relay.tell()["copied_files"] for relay in relays] == [3, 3, 0]
    assert files(tmp_path / "shared" / "data") == files(data)


def test_a_block_that_comes_damaged_ends_all_and_no_file_is_taken_for_whole(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain(data, [tmp_path / "a", tmp_path / "b", tmp_path / "c"])
    write = chain.stores[1].write
    monkeypatch.setattr(
        chain.stores[1], "write", lambda at, number, block, digest: write(at, number, bytes(len(block)), digest)
    )
    relays = chain.run()
    assert "came to node1 damaged" in str(relays[1].fault)
    assert [relay.fault for relay in (relays[0], relays[2])] == [None, None]
    assert all("rank 1 on node1: a block of " in relay.ended for relay in (relays[0], relays[2]))
    assert files(tmp_path / "b" / "data") == {"empty": b""}


def test_a_machine_that_only_reads_sends_what_nodes_lack_from_the_block_on_where_they_were_cut_off(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain(data, [None, tmp_path / "a", tmp_path / "b"])
    write = chain.stores[2].write

    def fail_late(at: int, number: int, block: bytes, digest: bytes) -> None:
        if number == 2:
            raise StageError("no more")
        write(at, number, block, digest)

    monkeypatch.setattr(chain.stores[2], "write", fail_late)
    assert "no more" in str(chain.run()[2].fault)
    relays = Chain(data, [None, tmp_path / "a", tmp_path / "b"]).run()
    assert [(relay.fault, relay.ended) for relay in relays] == [(None, "")] * 3
    assert relays[2].tell()["copied_bytes"] == MIB + 5
    assert relays[0].read_bytes >= MIB + 5  # the node before may have written less
    assert [files(tmp_path / node / "data") for node in ("a", "b")] == [files(data)] * 2
    assert [relay.tell()["copied_bytes"] for relay in Chain(data, [tmp_path / "b"], verify=True).run()] == [0]


def test_links_odd_names_and_rights_come_as_a_person_expects(data: Path, tmp_path: Path) -> None:
    (data / "again").symlink_to("deep")
    (data / "deep" / "circle").symlink_to("..")
    (data / os.fsdecode(b"\xff.jpg")).write_text("no UTF-8")
    (data / "small").chmod(0o4755)
    relays = Chain(data, [tmp_path / "a", tmp_path / "b"]).run()
    assert [(relay.fault, relay.ended) for relay in relays] == [(None, "")] * 2
    copied = files(tmp_path / "b" / "data")
    assert sorted(copied) == ["again/large", "deep/large", "empty", "small", os.fsdecode(b"\xff.jpg")]
    assert copied["again/large"] == copied["deep/large"]
    assert (tmp_path / "b" / "data" / "small").stat().st_mode == 0o100755

    (data / "again").unlink()
    (data / "again").symlink_to("/nowhere/at/all")
    with pytest.raises(StageError, match="data/again is a link to /nowhere/at/all, which is not there"):
        Source(str(data))
    (data / "again").unlink()
    at = os.open(data, os.O_RDONLY)
    for _ in range(20):  # deeper than a path may be long, so that nobody can list it
        os.mkdir("n" * 250, dir_fd=at)
        below = os.open("n" * 250, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    with pytest.raises(StageError, match=r"can't be listed: OSError: .*File name too long"):
        Source(str(data))


def test_a_node_whose_disk_stalls_at_the_end_waits_for_it_while_the_next_one_is_done(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (data / "deep" / "large").write_bytes(os.urandom(20 * MIB))
    chain = Chain(data / "deep", [tmp_path / "a", tmp_path / "b"])
    write, put, send = chain.stores[0].write, chain.relays[0]._to_write.put, chain.neighbours[1].send
    next_is_done, stalls = threading.Event(), threading.Event()

    def send_and_note(side: str, head: dict[str, object], parts: tuple[object, ...] = ()) -> bool:
        was_sent = send(side, head, parts)
        if head["say"] == "done":
            next_is_done.set()
        return was_sent

    def put_and_note(item: object, timeout: float) -> None:
        was_done = next_is_done.is_set()
        try:
            put(item, timeout=timeout)  # type: ignore[arg-type]
        except queue.Full:
            if was_done:
                stalls.set()
            raise

    def write_late(at: int, number: int, block: bytes, digest: bytes) -> None:
        if number == 12:  # the queue has room for what follows, and not for the end
            stalls.wait(30)
        write(at, number, block, digest)

    monkeypatch.setattr(chain.neighbours[1], "send", send_and_note)
    monkeypatch.setattr(chain.relays[0]._to_write, "put", put_and_note)
    monkeypatch.setattr(chain.stores[0], "write", write_late)
    assert [(relay.fault, relay.ended) for relay in chain.run()] == [(None, "")] * 2
    assert stalls.is_set()
    assert [files(tmp_path / node / "deep") for node in "ab"] == [files(data / "deep")] * 2


def test_who_has_another_key_is_not_let_in(data: Path, tmp_path: Path) -> None:
    chain = Chain(data, [tmp_path / "a", tmp_path / "b"])
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    public, secret = zmq.curve_keypair()
    stranger.curve_publickey, stranger.curve_secretkey = public, secret
    stranger.curve_serverkey = chain.places[1].key.encode()
    stranger.linger, stranger.rcvtimeo = 0, 10_000
    monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    monitor.rcvtimeo = 10_000
    stranger.connect(chain.places[1].url)
    stranger.send_multipart([b'{"say": "hello"}'])
    chain.start()
    event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
    assert event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    assert [(relay.fault, relay.ended) for relay in chain.join()] == [(None, "")] * 2
    assert files(tmp_path / "b" / "data") == files(data)
    stranger.disable_monitor()
    monitor.close()
    stranger.close()
    context.term()


def test_what_is_no_copy_of_the_source_is_left_alone(data: Path, tmp_path: Path) -> None:
    (tmp_path / "a" / "data").mkdir(parents=True)
    (tmp_path / "a" / "data" / "mine").write_text("mine")
    (relay,) = Chain(data, [tmp_path / "a"]).run()
    assert "nothing tells that it is a copy of" in str(relay.fault)
    assert files(tmp_path / "a" / "data") == {"mine": b"mine"}
    (tmp_path / "other" / "data").mkdir(parents=True)
    Chain(data, [tmp_path / "b"]).run()
    (relay,) = Chain(tmp_path / "other" / "data", [tmp_path / "b"]).run()
    assert f"is a copy of {data}, not of" in str(relay.fault)
    with pytest.raises(StageError, match="leads out of its folder"):
        SourceFile.from_list(["../../etc/passwd", 1, "", 0])


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


def test_an_address_is_read_once_for_all_nodes_and_crosses_the_network_encrypted(
    breakable: Lab, nodes: Cluster
) -> None:
    content = os.urandom(MIB) + b"a word in clear" * (20 * MIB // 15)
    told = []
    with FileServer(content, breakable.head_address) as server, breakable.capture() as capture:
        staged = nodes.stage(server.url, breakable.local_disk, name="data", on_progress=told.append)
        assert server.sent == len(content)
        nodes.stage(server.url, breakable.local_disk)
        assert server.sent == len(content)
    path = f"{breakable.local_disk}/file.bin"
    assert nodes.run("data").results == dict.fromkeys(range(4), path) == dict(staged.paths)
    assert hashes(breakable, path) == {hashlib.sha256(content).hexdigest()}
    server_port = int(server.url.split(":")[2].split("/")[0])
    between = {ends: sent for ends, sent in capture.streams().items() if server_port not in (ends[1], ends[3])}
    assert sum(map(len, between.values())) > 2 * len(content)  # from node to node
    assert not any(b"a word in clear" in sent for sent in between.values())
    assert str(staged).startswith("file.bin: 22.0 MB in 1 file, on 3 nodes in ")


def test_what_the_notebooks_machine_alone_has_is_sent_from_there_and_through_ssh_where_nothing_else_leads(
    breakable: Lab, nodes: Cluster
) -> None:
    source = breakable.local_disk / "only-here"  # each host has another disk there
    source.mkdir()
    try:
        (source / "large").write_bytes(os.urandom(MIB) + b"a word in clear" * (7 * MIB // 15))
        hashed = hashlib.sha256((source / "large").read_bytes()).hexdigest()
        to = f"{breakable.local_disk}/to"
        with breakable.capture() as capture:
            staged = nodes.stage(source, to)
        assert staged.read_on == f"{socket.gethostname()}, the notebook's machine"
        assert f"; read once, on {staged.read_on}\n" in str(staged)
        assert hashes(breakable, f"{to}/only-here/large") == {hashed}
        assert not any(b"a word in clear" in sent for sent in capture.streams().values())
        (source / "small").write_text("small")
        breakable.close_to_head("node1")
        staged = nodes.stage(source, to)
        assert staged.read_bytes == len("small")
        assert staged.read_on.endswith(f"the notebook's machine, and sent through ssh to {breakable.address('node1')}")
        os.mkfifo(source / "pipe")
        with pytest.raises(StageError, match=rf"not on every node: {socket.gethostname()}: .*/pipe is no file that"):
            nodes.stage(source, to)
    finally:
        shutil.rmtree(source)
    assert own_children("-L") == []


def test_a_full_disk_ends_in_one_message_and_the_next_call_goes_on(breakable: Lab, nodes: Cluster, data: Path) -> None:
    nodes.stage(data, breakable.local_disk)
    for number in range(400):  # a file takes more room than its bytes, which nobody knows beforehand
        (data / f"{number}").write_text("x")
    breakable.fill("node2")
    breakable.run("node2", f"truncate --size -1M {breakable.local_disk}/filler")
    with pytest.raises(RankFailure, match=r"rank 2 \(node2\).*the disk of node2 is full.*name another disk with --to"):
        nodes.stage(data, breakable.local_disk)
    there = breakable.run("node2", f"cd {breakable.local_disk}/data; find . -type f -size 1c | wc -l")
    breakable.run("node2", f"rm {breakable.local_disk}/filler")
    staged = nodes.stage(data, breakable.local_disk)
    assert staged.copied_bytes <= 400 - int(there) + 1
    assert {breakable.run(host, f"ls {breakable.local_disk}/data | wc -l").strip() for host in breakable.hosts} == {
        "403"
    }


def test_an_interrupted_file_goes_on_at_its_last_block(breakable: Lab, nodes: Cluster) -> None:
    content = os.urandom(24 * MIB)
    path = f"{breakable.local_disk}/file.bin"
    with FileServer(content, breakable.head_address) as server:
        server.hold(16 * MIB)
        is_written = threading.Event()

        def told(progress: staging.StageProgress) -> None:
            if progress.done_bytes == 16 * MIB:
                is_written.set()

        with when(is_written, nodes.interrupt), pytest.raises(RankFailure, match="KeyboardInterrupt"):
            nodes.stage(server.url, breakable.local_disk, on_progress=told)
        assert not any(breakable.run(host, f"ls {path}", check=False).strip() for host in breakable.hosts)
        server.release()
        assert nodes.stage(server.url, breakable.local_disk).read_bytes == 8 * MIB
    assert hashes(breakable, path) == {hashlib.sha256(content).hexdigest()}


def test_a_port_that_is_closed_between_nodes_is_named(
    breakable: Lab, nodes: Cluster, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.run("import jupyter_disttrain.engine.stage_relay as relay; relay.GREET_SECONDS = 1.0")
    original = staging._get_ready

    def closed(*args: object) -> object:
        ready = original(*args)  # type: ignore[arg-type]
        breakable.firewall("node2", ready[1][1]["url"].rpartition(":")[2])
        return ready

    monkeypatch.setattr(staging, "_get_ready", closed)
    where = f"node1 did not reach node2 at tcp://{breakable.address('node2')}:.* within 1 s; open the ports"
    with pytest.raises(RankFailure, match=where) as caught:
        nodes.stage(data, breakable.local_disk)
    assert len(caught.value.failures) == 1
    nodes.run("relay.GREET_SECONDS = 20.0; del relay")


def test_a_node_that_dies_ends_the_others(breakable: Lab) -> None:
    content = os.urandom(24 * MIB)
    with (
        FileServer(content, breakable.head_address) as server,
        on_hosts(breakable, 1, 1, 1, on_rank_death="stop") as cluster,
    ):
        server.hold(16 * MIB)
        with when(server.holding, lambda: breakable.kill("node3")), pytest.raises((RankFailure, StageError)) as caught:
            cluster.stage(server.url, breakable.local_disk)
        assert "node3" in str(caught.value)


class when:  # noqa: N801  (it reads as a word)
    """Do something in a thread as soon as an event comes."""

    def __init__(self, event: threading.Event, what: Callable[[], object]) -> None:
        self._thread = threading.Thread(target=lambda: event.wait(60) and what())

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_exc: object) -> None:
        self._thread.join()


# On one machine


def test_what_can_t_be_staged_is_said(torchless: Cluster, tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"nothing is not there on .*; put it on a file system that a node sees"):
        torchless.stage(tmp_path / "nothing")
    with pytest.raises(RankFailure, match="s3://bucket/x can't be read by the ranks' Python; run: pip install s3fs"):
        torchless.stage("s3://bucket/x", tmp_path)
    with pytest.raises(StageError, match=r"rank 0: .* can't write /proc/"):
        torchless.stage(tmp_path, "/proc/nothing")


def test_the_magic_shows_one_line(notebook: Notebook, data: Path, tmp_path: Path) -> None:
    outcome = notebook.run(f"%dist_stage {data} --to {tmp_path}/local --as where").check()
    assert len(outcome.outputs) == 1
    assert outcome.lines[0].startswith("data: 3.1 MB in 3 files, on 1 node in ")
    assert outcome.lines[0].endswith(f"; read once, on {socket.gethostname()}")
    assert outcome.lines[1:] == [f"{tmp_path}/local/data"]
    assert notebook.run("%%rank 1\nprint(where)").check().lines == [f"{tmp_path}/local/data"]
    again = notebook.run(f"%dist_stage {data} --to {tmp_path}/local").check()
    assert again.lines[0].startswith("data: 3.1 MB in 3 files on 1 node, all there already")
