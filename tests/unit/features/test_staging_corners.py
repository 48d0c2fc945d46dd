"""``%dist_stage``, rare cases: unusual folders, disks that fail late, sources that change their kind."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zmq

from jupyter_disttrain.config.data_urls import without_secrets
from jupyter_disttrain.errors import StageError
from jupyter_disttrain.features.staging import store as store_module
from jupyter_disttrain.features.staging.links import Links
from jupyter_disttrain.features.staging.source import Source, hash_of, source_name
from jupyter_disttrain.features.staging.store import Store

from ...support.stage_tools import MIB, Chain, FileServer, files, write_data

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from jupyter_disttrain.features.staging.source import Block, SourceFile


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data set of two files, one of several blocks."""
    return write_data(tmp_path, 2 * MIB + 5)


def outcomes_of(chain: Chain) -> list[tuple[BaseException | None, str]]:
    return [(relay.fault, relay.ended) for relay in chain.run()]


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


# Disks that fail


@pytest.mark.parametrize("full", ["list", "part"])
def test_full_disk_is_named_and_leaves_no_partial_file(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    source, control = data / "deep", tmp_path / "a" / ".deep.disttrain-stage"
    chain = Chain(source, [tmp_path / "a"])
    (store,) = chain.stores
    write = store.write

    def write_with_a_full_list(file: SourceFile, blocks: Iterable[Block]) -> None:
        store._list.close()
        store._list = open("/dev/full", "wb", buffering=0)  # noqa: PTH123, SIM115  (its owner closes it)
        write(file, blocks)

    if full == "list":
        monkeypatch.setattr(store, "write", write_with_a_full_list)
    else:
        (control / "part").symlink_to("/dev/full")
    (relay,) = chain.run()
    assert "the disk of node0 is full" in str(relay.fault)
    assert chain.links[0]._context.closed
    assert names(control) == ["files.jsonl", "lock"]
    assert outcomes_of(Chain(source, [tmp_path / "a"])) == [(None, "")]
    assert files(tmp_path / "a" / "deep") == files(source)


def test_list_left_incomplete_by_a_crash_counts_as_missing(data: Path, tmp_path: Path) -> None:
    listed = tmp_path / "a" / ".data.disttrain-stage" / "files.jsonl"
    for spoilt in (bytes(64), b"\xff" * 64, b"0"):
        assert outcomes_of(Chain(data, [tmp_path / "a"])) == [(None, "")]
        listed.write_bytes(listed.read_bytes().splitlines()[0] + b"\n" + spoilt + b"\n")
        (relay,) = Chain(data, [tmp_path / "a"]).run()
        assert (relay.fault, relay.report()["copied_files"]) == (None, 2)
    assert files(tmp_path / "a" / "data") == files(data)


def test_failed_connection_to_a_foreign_address_leaves_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Context(zmq.Context):  # type: ignore[type-arg]
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(zmq, "Context", Context)
    with pytest.raises(zmq.ZMQError):
        Links([key.decode() for key in zmq.curve_keypair()], "192.0.2.1")
    assert [context.closed for context in made] == [True]


# Destinations


def test_source_inside_the_destination_is_not_changed(data: Path, tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(data.parent)  # on node 0 the source is at the path that is the others' destination
    for copied in (2, 0):
        chain = Chain(data, [data.parent, tmp_path / "b", tmp_path / "a"])
        assert outcomes_of(chain) == [(None, "")] * 3
        assert [relay.report()["path"] for relay in chain.relays][:2] == [str(data), f"{tmp_path}/b/data"]
        assert chain.relays[2].report()["shares_with"] == "node0"
        assert [relay.report()["copied_files"] for relay in chain.relays] == [0, copied, 0]
    assert list(data.parent.iterdir()) == [data]
    assert names(tmp_path / "b" / "data") == names(data)
    (data / "deep" / "large").write_bytes(os.urandom(3 * MIB))
    (tmp_path / "b" / "data" / "small").unlink()
    assert outcomes_of(Chain(data, [data.parent, tmp_path / "b"])) == [(None, "")] * 2
    assert (tmp_path / "b/data/deep/large").read_bytes() == (data / "deep/large").read_bytes()


def test_unrelated_file_at_the_source_path_is_ignored_on_non_reading_nodes(data: Path, tmp_path: Path) -> None:
    chain = Chain(data, [tmp_path / "a", data.parent])  # the path of the source, on another node
    assert "is not marked as a copy" in str([fault for fault, _ in outcomes_of(chain)][1])


def test_destination_inside_the_source_is_refused_and_existing_indexes_are_not_copied(
    data: Path, tmp_path: Path
) -> None:
    with pytest.raises(StageError, match=rf"{data}/deep/data on node0 would be inside {data}, the data set to"):
        Store(str(data), str(data / "deep"), "node0", "mark")
    (tmp_path / "link").symlink_to(data)
    with pytest.raises(StageError, match="would be inside"):
        Store(str(data), str(tmp_path / "link"), "node0", "mark")
    (data / ".other.disttrain-stage").mkdir()
    (data / ".other.disttrain-stage" / "lock").touch()
    assert [file.name for file in Source(str(data)).files] == ["./", "small", "deep/large"]


def test_named_folder_may_have_another_owner_but_written_folders_may_not(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.getuid():
        pytest.skip("root alone makes files of another user")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    os.chown(scratch, 65534, 65534)
    scratch.chmod(0o1777)
    monkeypatch.setenv("DISTTRAIN_STAGE_DIR", str(scratch))
    store = Store(str(data), None, "node0", "mark")
    assert store.path == scratch / "data"
    store.close()
    (tmp_path / "link").symlink_to(scratch)
    monkeypatch.setenv("DISTTRAIN_STAGE_DIR", str(tmp_path / "link"))
    Store(str(data), None, "node0", "mark").close()

    (scratch / "data").mkdir()
    (scratch / "data").chmod(0o777)
    os.chown(scratch / "data", 65534, 65534)
    assert "scratch/data on node0 belongs to another user" in str(outcomes_of(Chain(data, [scratch]))[0][0])
    assert names(scratch / "data") == []

    monkeypatch.delenv("DISTTRAIN_STAGE_DIR")
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(scratch))
    default = scratch / f"disttrain-stage-{os.getuid()}"
    for target in (tmp_path, tmp_path / "nowhere"):
        default.symlink_to(target)
        with pytest.raises(StageError, match=rf"{default} on node0 is a link; remove it, or name"):
            Store(str(data), None, "node0", "mark")
        default.unlink()
    default.mkdir()
    os.chown(default, 65534, 65534)
    with pytest.raises(StageError, match=f"{default} on node0 belongs to another user"):
        Store(str(data), None, "node0", "mark")


def test_variable_missing_on_a_node_is_named(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HERE", str(tmp_path))
    monkeypatch.setenv("EMPTY", "")
    for to, name in (("$SCRATCH_/x", "SCRATCH_"), ("$HERE/${SCRATCH_}", "SCRATCH_"), ("$EMPTY/x", "EMPTY")):
        with pytest.raises(StageError, match=rf"\${name} is not set on node0; set it on every node, or name a path"):
            Store(str(data), to, "node0", "mark")
    for to, reason in (
        ("~nobody-of-that-name/x", "Could not determine home directory"),
        ("$/x", "Invalid placeholder"),
    ):
        with pytest.raises(StageError, match=rf"{reason}.* \(node0\); name a path"):
            Store(str(data), to, "node0", "mark")
    assert list(tmp_path.iterdir()) == [tmp_path / "source"]
    store = Store(str(data), "$HERE/${HERE}", "node0", "mark")
    store.close()
    assert store.path == Path(f"{tmp_path}/{tmp_path}/data")


def test_stop_is_checked_between_compared_blocks(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcomes_of(Chain(data, [tmp_path / "a"])) == [(None, "")]
    chain = Chain(data, [tmp_path / "a"], verify=True)
    (relay,), compared = chain.relays, []

    def hash_and_stop(blocks: Iterable[bytes], check: Callable[[], None]) -> str:
        def stopping() -> Iterator[bytes]:
            for block in blocks:
                compared.append(len(block))
                if len(block) == MIB:
                    relay.stop("stopped")
                yield block

        return hash_of(stopping(), check)

    monkeypatch.setattr(store_module, "hash_of", hash_and_stop)
    assert outcomes_of(chain) == [(None, "stopped")]
    assert compared.count(MIB) == 1


def test_stop_is_noticed_while_blocks_flow(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain(data / "deep", [tmp_path / "a"])
    written = []

    def write_and_stop(_file: SourceFile, blocks: Iterable[Block]) -> None:
        for _ in blocks:
            written.append(1)
            chain.relays[0].stop("stopped")

    monkeypatch.setattr(chain.stores[0], "write", write_and_stop)
    assert outcomes_of(chain) == [(None, "stopped")]
    assert written == [1]


# Sources


def test_folders_are_added_and_removed_as_in_the_source(data: Path, tmp_path: Path) -> None:
    def stage() -> list[list[str]]:
        nodes = [tmp_path / "a", tmp_path / "b"]
        assert outcomes_of(Chain(data, nodes)) == [(None, "")] * 2
        return [names(node / "data") for node in nodes]

    (data / "dog" / "old").mkdir(parents=True)
    (data / "dog" / "old" / "1.jpg").touch()
    (data / "none" / "yet").mkdir(parents=True)
    assert stage() == [names(data)] * 2
    (tmp_path / "b" / "data" / "none" / "mine").touch()
    shutil.rmtree(data / "dog")
    shutil.rmtree(data / "none")
    assert stage() == [["deep", "deep/large", "small"], ["deep", "deep/large", "none", "none/mine", "small"]]
    shutil.rmtree(tmp_path / "b" / "data" / "none")

    shutil.rmtree(data / "deep")
    (data / "deep").write_text("a file by now")
    (data / "small").unlink()
    (data / "small").mkdir()
    (data / "small" / "one").touch()
    assert stage() == [["deep", "small", "small/one"]] * 2
    for name in ("deep", "small/one"):
        (data / name).unlink()
    (data / "small").rmdir()
    assert stage() == [[]] * 2

    data.rmdir()
    data.write_text("all of it is a file by now")
    assert stage() == [[]] * 2
    assert (tmp_path / "b" / "data").read_text() == data.read_text()
    data.unlink()
    (data / "deep").mkdir(parents=True)
    assert stage() == [["deep"]] * 2


@pytest.mark.parametrize("reader", ["node", "the notebook's machine"])
def test_change_with_equal_size_and_time_is_detected_by_hash(data: Path, tmp_path: Path, reader: str) -> None:
    nodes = [tmp_path / "a" if reader == "node" else None, tmp_path / "b"]
    assert outcomes_of(Chain(data, nodes)) == [(None, "")] * 2
    for name in ("small", "deep/large"):
        times = (data / name).stat()
        (data / name).write_bytes((data / name).read_bytes()[::-1])
        os.utime(data / name, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert [relay.report()["copied_files"] for relay in Chain(data, nodes).run()][1] == 0
    relays = Chain(data, nodes, verify=True).run()
    assert [(relay.fault, relay.ended) for relay in relays] == [(None, "")] * 2
    assert relays[1].report()["copied_files"] == 2
    for name in ("small", "deep/large"):
        assert (tmp_path / "b" / "data" / name).read_bytes() == (data / name).read_bytes()
    (tmp_path / "b" / "data" / "small").write_text("smell")  # of the copy
    assert [relay.report()["copied_bytes"] for relay in Chain(data, nodes, verify=True).run()] == [0, 5]
    os.utime(data / "small", ns=(0, 1_234_567_890))  # the reverse: only the time differs
    for verify in (True, False):
        relays = Chain(data, nodes, verify=verify).run()
        assert [relay.report()["copied_files"] for relay in relays] == [0, 0]


def test_numeric_versions_are_not_parsed_as_times(tmp_path: Path) -> None:
    began = time.time()
    with tarfile.open(tmp_path / "set.tar", "w") as archive:
        entry = tarfile.TarInfo("one.txt")
        entry.size, entry.mtime = 3, 1_700_000_000  # in seconds
        archive.addfile(entry, io.BytesIO(b"one"))
    source = f"tar://one.txt::{tmp_path}/set.tar"
    for copied in (1, 0):
        (relay,) = Chain(source, [tmp_path / "a"]).run()
        assert (relay.fault, relay.report()["copied_files"]) == (None, copied)
    assert relay._store.path.stat().st_mtime > began - 1
    with FileServer(b"content", etag="12345678901234567890123456789012") as server:
        assert outcomes_of(Chain(server.url, [tmp_path / "b"])) == [(None, "")]
    (tmp_path / "one.txt").write_text("one")
    os.utime(tmp_path / "one.txt", ns=(0, 1_234_567_890))
    (relay,) = Chain(tmp_path / "one.txt", [tmp_path / "c"]).run()
    assert relay._store.path.stat().st_mtime_ns == 1_234_567_890


def test_url_signed_again_is_the_same_source(tmp_path: Path) -> None:
    with FileServer(b"content") as server:
        for copied, signed in ((7, "v=1&sig=A%2Fb&se=2030"), (0, "v=1&sig=other&se=2031")):
            (relay,) = Chain(f"{server.url}?{signed}", [tmp_path / "a"]).run()
            assert (relay.fault, relay.report()["copied_bytes"]) == (None, copied)
        (relay,) = Chain(f"{server.url}?v=2&sig=other", [tmp_path / "a"]).run()
        assert f"is a copy of {server.url}?v=1, not of {server.url}?v=2; remove" in str(relay.fault)
    assert "sig" not in (tmp_path / "a" / ".file.bin.disttrain-stage" / "files.jsonl").read_text()
    assert source_name("https://me:secret@host") == "host"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("https://me:se:c@ret@host/x?X-Amz-Signature=a&X-Amz-Date=b#c", "https://host/x#c"),
        ("simplecache::https://key@host/x?sig=a&sp=r::", "simplecache::https://host/x::"),
        ("zip://a::sftp://me:secret@host/x.zip", "zip://a::sftp://me@host/x.zip"),
        ("abfs://box@account.dfs.core.windows.net/x", "abfs://box@account.dfs.core.windows.net/x"),
        ("https://host/x?se=1&access_token=a", "https://host/x"),
        ("https://host/x?se=1&id=a", "https://host/x?se=1&id=a"),
        ("403, url='https://host/x?sig=a' (https://me:secret@host/)", "403, url='https://host/x' (https://host/)"),
        ("/a/path:with@signs?sig", "/a/path:with@signs?sig"),
    ],
)
def test_credentials_in_urls_are_not_shown(written: str, shown: str) -> None:
    assert without_secrets(written) == shown
