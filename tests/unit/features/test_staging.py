"""``%dist_stage``: a data set is copied to each node's disk once, completely or not at all."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import zmq

from jupyter_disttrain.errors import StageError
from jupyter_disttrain.features.staging import pipeline
from jupyter_disttrain.features.staging.rank import Staging
from jupyter_disttrain.features.staging.source import Source, SourceFile
from jupyter_disttrain.protocol.requests import PrepareStaging

from ...support.stage_tools import MIB, Chain, files
from ..records import rank_info

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from jupyter_disttrain.features.staging.source import Block


def test_each_node_gets_missing_files_and_the_source_is_read_once(data: Path, tmp_path: Path) -> None:
    nodes = [tmp_path / f"node{at}" for at in range(3)]
    relays = Chain(data, nodes).run()
    assert [(relay.fault, relay.ended) for relay in relays] == [(None, "")] * 3
    assert [files(node / "data") for node in nodes] == [files(data)] * 3
    assert [relay.read_bytes for relay in relays] == [3 * MIB + 10, 0, 0]
    assert sorted(path.name for path in (nodes[0] / ".data.disttrain-stage").iterdir()) == ["files.jsonl", "lock"]

    (nodes[1] / "data" / "small").unlink()
    (nodes[2] / "data" / "deep" / "large").unlink()
    relays = Chain(data, nodes).run()
    assert [relay.report()["copied_bytes"] for relay in relays] == [0, 5, 3 * MIB + 5]
    assert relays[0].read_bytes == 3 * MIB + 10

    (data / "small").unlink()
    (data / "new").write_text("new")
    relays = Chain(data, nodes).run()
    assert relays[0].read_bytes == 3
    assert [files(node / "data") for node in nodes] == [files(data)] * 3


def test_folder_shared_by_two_nodes_is_written_once(data: Path, tmp_path: Path) -> None:
    relays = Chain(data, [tmp_path / "one", tmp_path / "shared", tmp_path / "shared"]).run()
    assert [relay.report()["shares_with"] for relay in relays] == ["", "", "node1"]
    assert [relay.report()["copied_files"] for relay in relays] == [3, 3, 0]
    assert files(tmp_path / "shared" / "data") == files(data)


def test_damaged_block_fails_the_copy_and_no_file_is_complete(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    chain = Chain(data, nodes)
    write = chain.stores[1].write
    monkeypatch.setattr(
        chain.stores[1],
        "write",
        lambda file, blocks: write(file, ((hashed, bytes(len(block))) for hashed, block in blocks)),
    )
    relays = chain.run()
    assert "on node1 has not the hash of the source's file; stage it again" in str(relays[1].fault)
    assert [relay.fault for relay in (relays[0], relays[2])] == [None, None]
    assert files(tmp_path / "b" / "data") == {"empty": b""}
    assert [relay.report()["copied_files"] for relay in Chain(data, nodes).run()][1] == 2
    assert [files(node / "data") for node in nodes] == [files(data)] * 3


def test_connection_that_is_cut_is_named(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "PIPELINE_CUT_SECONDS", 0.1)
    chain = Chain(data, [tmp_path / "a", tmp_path / "b"])
    chain.relays[0].start(chain.places, 0, verify=False)
    while not chain.links[0].is_reached:
        assert not chain.relays[0].done.wait(0.01)
    chain.relays[1].stop("its process has ended")
    assert chain.relays[0].done.wait(30)
    assert "the connection from node0 to rank 1 on node1 was cut; stage it again" in str(chain.relays[0].fault)


def test_node_that_has_everything_may_leave_first(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Chain(data, [tmp_path / "b"]).run()
    (tmp_path / "b" / "data" / "empty").unlink()
    chain = Chain(data, [None, tmp_path / "a", tmp_path / "b"])
    read = Source.blocks

    def read_late(source: Source, numbers: Iterable[int]) -> Iterator[Block]:
        for hashed, block in read(source, numbers):
            yield hashed, block
            while chain.links[1].cut_at is None:
                assert not chain.relays[1].done.wait(0.01)

    monkeypatch.setattr(Source, "blocks", read_late)
    monkeypatch.setattr(pipeline, "PIPELINE_CUT_SECONDS", -1.0)
    assert [relay.fault for relay in chain.run()] == [None] * 3
    assert files(tmp_path / "a" / "data") == files(tmp_path / "b" / "data") == files(data)


def test_copy_without_the_last_file_keeps_the_others(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [None, tmp_path / "a", tmp_path / "b"]
    chain = Chain(data, nodes)
    write = chain.stores[2].write

    def fail_late(file: SourceFile, blocks: Iterator[Block]) -> None:
        if file.name == "deep/large":
            raise StageError("no more")
        write(file, blocks)

    monkeypatch.setattr(chain.stores[2], "write", fail_late)
    assert "no more" in str(chain.run()[2].fault)
    assert sorted(path.name for path in (tmp_path / "b" / ".data.disttrain-stage").iterdir()) == ["files.jsonl", "lock"]
    relays = Chain(data, nodes).run()
    assert [(relay.fault, relay.ended) for relay in relays] == [(None, "")] * 3
    assert relays[2].report()["copied_bytes"] == 3 * MIB + 5
    assert [files(tmp_path / node / "data") for node in ("a", "b")] == [files(data)] * 2
    assert [relay.report()["copied_bytes"] for relay in Chain(data, [tmp_path / "b"], verify=True).run()] == [0]


def test_slow_final_write_of_one_node_does_not_delay_the_next(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain(data, [None, tmp_path / "a", tmp_path / "b"])
    write, next_is_done = chain.stores[1].write, list[bool]()

    def late(blocks: Iterator[Block]) -> Iterator[Block]:
        for hashed, block in blocks:
            if hashed:
                next_is_done.append(chain.relays[2].done.wait(30))
            yield hashed, block

    monkeypatch.setattr(
        chain.stores[1],
        "write",
        lambda file, blocks: write(file, late(blocks) if file.name == "deep/large" else blocks),
    )
    assert [relay.fault for relay in chain.run()] == [None] * 3
    assert next_is_done == [True]


def test_symlinks_unusual_names_and_permissions_are_copied(data: Path, tmp_path: Path) -> None:
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
    with pytest.raises(StageError, match="data/again is a link to /nowhere/at/all, which does not exist"):
        Source(str(data))
    (data / "again").unlink()
    at = os.open(data, os.O_RDONLY)
    for _ in range(20):  # deeper than PATH_MAX, so that it cannot be listed
        os.mkdir("n" * 250, dir_fd=at)
        below = os.open("n" * 250, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    with pytest.raises(StageError, match=r"can't be listed: OSError: .*File name too long"):
        Source(str(data))


def test_peer_with_another_key_is_rejected(data: Path, tmp_path: Path) -> None:
    chain = Chain(data, [tmp_path / "a", tmp_path / "b"])
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    public, secret = zmq.curve_keypair()
    stranger.curve_publickey, stranger.curve_secretkey = public, secret
    stranger.curve_serverkey = chain.keys[0].encode()
    stranger.linger, stranger.rcvtimeo = 0, 10_000
    monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    monitor.rcvtimeo = 10_000
    stranger.connect(chain.places[1].url)
    stranger.send_multipart([b"[]"])
    chain.start()
    event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
    assert event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    assert [(relay.fault, relay.ended) for relay in chain.join()] == [(None, "")] * 2
    assert files(tmp_path / "b" / "data") == files(data)
    stranger.disable_monitor()
    monitor.close()
    stranger.close()
    context.term()


def test_destination_that_is_not_a_copy_of_the_source_is_not_changed(data: Path, tmp_path: Path) -> None:
    (tmp_path / "a" / "data").mkdir(parents=True)
    (tmp_path / "a" / "data" / "mine").write_text("mine")
    (relay,) = Chain(data, [tmp_path / "a"]).run()
    assert "is not marked as a copy of" in str(relay.fault)
    assert files(tmp_path / "a" / "data") == {"mine": b"mine"}
    (tmp_path / "other" / "data").mkdir(parents=True)
    Chain(data, [tmp_path / "b"]).run()
    (relay,) = Chain(tmp_path / "other" / "data", [tmp_path / "b"]).run()
    assert f"is a copy of {data}, not of" in str(relay.fault)
    with pytest.raises(StageError, match="is outside of the data set's folder"):
        SourceFile.from_list(["../../etc/passwd", 1, "", 0])


def test_request_to_end_a_copy_closes_what_was_prepared_for_it_alone(data: Path, tmp_path: Path) -> None:
    staging, keys = Staging(), [key.decode() for key in zmq.curve_keypair()]
    for mark in ("mark-1", "mark-2"):
        request = PrepareStaging(source=str(data), to=str(tmp_path / "a"), mark=mark, keys=keys)
        place = staging.get_ready(request, rank_info(0, 1), "127.0.0.1")["place"]
        assert list(tmp_path.glob("a/.data.disttrain-stage/*")) == [tmp_path / "a/.data.disttrain-stage" / place.mark]
    staging.release("an earlier one was ended", "mark-1")
    assert staging.run([place], verify=False)["copied_files"] == 3
    place = staging.get_ready(request, rank_info(0, 1), "127.0.0.1")["place"]
    staging.release("it was ended", "mark-2")
    assert staging.run([place], verify=False)["ended"] == "it was ended"
    place = staging.get_ready(request, rank_info(0, 1), "127.0.0.1")["place"]  # the client's requests were reordered
    assert staging.run([place], verify=False)["ended"] == "it was ended before"
