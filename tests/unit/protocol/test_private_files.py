"""Files of other users are not trusted: connection files, job folders, checkpoints, names that ranks send."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from jupyter_disttrain import private_files
from jupyter_disttrain.client.transport import ssh_tunnel
from jupyter_disttrain.errors import LaunchError, StageError
from jupyter_disttrain.features.staging.source import SourceFile
from jupyter_disttrain.features.staging.store import Store
from jupyter_disttrain.launchers.folders import Folders
from jupyter_disttrain.private_files import make_private_below, read_own, replace_private
from jupyter_disttrain.protocol.shared_memory import drop, fetch, lend
from jupyter_disttrain.rank.startup.connection import Connection

from ...support.process_tools import OTHER_UID, as_root, change_owner


@as_root
def test_rank_refuses_connection_files_of_other_users(tmp_path: Path) -> None:
    path = tmp_path / "ipcontroller-x-engine.json"
    path.write_text("{}")
    assert Connection.wait(str(path)).info == {}
    change_owner(path)
    with pytest.raises(ConnectionError, match=r"can't be used: it belongs to another user \(nobody\)"):
        Connection.wait(str(path))


@pytest.fixture
def clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of cluster files, used by no other test."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    folder = tmp_path / "runtime" / "disttrain"
    folder.mkdir(parents=True)
    return folder


def test_cluster_folders_are_private_whatever_the_umask(clusters: Path) -> None:
    clusters.chmod(0o775)  # as an earlier version created it with this umask
    before = os.umask(0o002)
    try:
        folders = Folders.make("umask")
    finally:
        os.umask(before)
    try:
        for folder in (
            folders.profile,
            folders.profile.parent,
            folders.run,
            folders.run.parent,
            folders.run.parents[1],
        ):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    finally:
        folders.remove()


@as_root
def test_cluster_folder_of_another_user_is_refused(clusters: Path) -> None:
    change_owner(clusters)
    with pytest.raises(
        LaunchError, match=r"runtime/disttrain: it belongs to another user \(nobody\).*JUPYTER_RUNTIME_DIR"
    ):
        Folders.make("other")
    assert not list(clusters.iterdir())


def test_parent_folders_are_created_private(tmp_path: Path) -> None:
    make_private_below(tmp_path / "a" / "b" / "c", tmp_path / "a")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_fifo_in_place_of_a_file_does_not_block_readers(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file")
    with pytest.raises(OSError, match="it is not a regular file"):
        read_own(tmp_path / "file")


def test_shared_memory_is_opened_only_by_its_bare_name(tmp_path: Path) -> None:
    folder = str(tmp_path)
    big = bytes(range(256)) * 8192
    note, frames = lend(folder, [big])
    assert note is not None
    assert not frames
    assert bytes(fetch(folder, note, [])[0]) == big
    for bad in (
        {"name": f"../{tmp_path.name}/{note['name']}", "spans": []},
        {"name": 3, "spans": []},
        {"spans": []},
        {"name": note["name"]},
        {"name": note["name"], "spans": [3]},
        [],
    ):
        with pytest.raises(ValueError, match=r"names no file|does not locate"):
            fetch(folder, bad, [])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="names no file"):
        drop(None, note)
    (tmp_path / ("0" * 32)).symlink_to(tmp_path / note["name"])
    with pytest.raises(OSError, match="symbolic link"):
        fetch(folder, {"name": "0" * 32, "spans": []}, [])
    os.mkfifo(tmp_path / ("1" * 32))
    with pytest.raises((OSError, ValueError)):
        fetch(folder, {"name": "1" * 32, "spans": []}, [])
    drop(folder, note)
    assert not (tmp_path / note["name"]).exists()


@as_root
def test_data_set_is_not_copied_to_a_folder_created_meanwhile_by_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "data"
    source.mkdir()
    to = tmp_path / "to"
    to.mkdir()
    store = Store(str(source), str(to), "node0", "mark")
    take = store._read_list

    def overtaken() -> dict[str, list[object]]:
        found = take()
        store.path.mkdir()
        os.chown(store.path, OTHER_UID, OTHER_UID)
        return found

    monkeypatch.setattr(store, "_read_list", overtaken)
    with pytest.raises(StageError, match="to/data on node0 belongs to another user"):
        store.begin([SourceFile("./")], verify=False, check=lambda: None)
    store.close()


@pytest.mark.parametrize("host", ["$(id)", "`id`", "a;id", "[fe80::1%;id]", "a b", "-oX", "a|b", "a@$(id)"])
def test_host_in_a_job_file_cannot_contain_shell_syntax(host: str) -> None:
    assert ssh_tunnel.split(f"{host}:/tmp/job.json") is None


def test_hosts_in_a_job_file_are_parsed() -> None:
    assert ssh_tunnel.split("login:/x/job.json") == ("login", "/x/job.json")
    assert ssh_tunnel.split("eva@login.example-site.org:~/job.json") == ("eva@login.example-site.org", "~/job.json")
    assert ssh_tunnel.split("[fd00::1%eth0]:job.json") == ("fd00::1%eth0", "job.json")
    assert ssh_tunnel.split("eva@[fd00::1]:job.json") == ("eva@fd00::1", "job.json")


def test_file_is_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notice = tmp_path / "death-1.json"
    replace_private(notice, "first")

    def no_room(path: Path, _text: str) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(private_files, "write_private", no_room)
    with pytest.raises(OSError, match="No space left"):
        replace_private(notice, "second")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("death-1.json", "first")]
