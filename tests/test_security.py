"""Files of other users are not believed: connection files, folders of jobs, checkpoints, names that ranks send."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.cluster import registry, tunnel
from jupyter_disttrain.cluster.folders import Folders
from jupyter_disttrain.engine.connection import Connection
from jupyter_disttrain.engine.stage_store import Store
from jupyter_disttrain.errors import LaunchError, RankFailure, StageError, UnserializableValueError, UsageError
from jupyter_disttrain.private_files import make_private_below, read_own
from jupyter_disttrain.shelf import ROOT, drop, fetch, lend

from .join_tools import by_hand, file, jobs  # noqa: F401  (fixtures)

if TYPE_CHECKING:
    from .join_tools import Job

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def give_away(path: Path) -> None:
    for each in (path, *path.rglob("*")):
        os.chown(each, NOBODY, NOBODY, follow_symlinks=False)


@as_root
def test_neither_ranks_nor_a_notebook_use_a_job_s_folder_that_another_user_put_there(
    file: Path,  # noqa: F811
    jobs: list[Job],  # noqa: F811
) -> None:
    by_hand(jobs, file, 0, 2)
    profile = Path(jobs[0].until(file)["profile"])
    own = profile.rename(profile.with_name("moved"))
    shutil.copytree(own, profile)  # what an attacker would put there leads to a controller of theirs
    give_away(profile)
    late = by_hand(jobs, file, 1, 2)
    assert late.end() != 0
    assert f"{profile}, which belongs to {file}, can't be used: on " in late.said
    assert "it belongs to another user (nobody); end the job" in late.said
    with pytest.raises(
        UsageError, match=r"it belongs to another user \(nobody\); start the job with its file in a folder"
    ):
        Cluster.attach(str(file))
    shutil.rmtree(profile)
    profile.symlink_to(own)
    with pytest.raises(UsageError, match="it is a link; start the job"):
        Cluster.attach(str(file))
    profile.unlink()
    own.rename(profile)
    profile.chmod(0o770)
    with pytest.raises(UsageError, match=r"it is open to other users \(mode 770\)"):
        Cluster.attach(str(file))
    profile.chmod(0o700)


@as_root
def test_a_rank_connects_by_no_file_of_another_user(tmp_path: Path) -> None:
    path = tmp_path / "ipcontroller-x-engine.json"
    path.write_text("{}")
    assert Connection.wait(str(path)).info == {}
    give_away(path)
    with pytest.raises(ConnectionError, match=r"can't be used: it belongs to another user \(nobody\)"):
        Connection.wait(str(path))


@as_root
def test_a_cluster_that_another_user_wrote_down_is_not_seen(light: Cluster) -> None:
    profile = light._launch.folders.profile
    assert light.cluster_id in [each.cluster_id for each in registry.running()]
    os.chown(profile / registry.FILE, NOBODY, NOBODY)
    assert light.cluster_id not in [each.cluster_id for each in registry.running()]
    os.chown(profile / registry.FILE, os.geteuid(), os.getegid())
    assert light.cluster_id in [each.cluster_id for each in registry.running()]


def test_the_folders_of_clusters_are_private_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "runtime" / "disttrain").mkdir(parents=True)
    (tmp_path / "runtime" / "disttrain").chmod(0o775)  # as an earlier version left it with this umask
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
def test_a_folder_of_clusters_that_is_another_user_s_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "runtime" / "disttrain").mkdir(parents=True)
    give_away(tmp_path / "runtime" / "disttrain")
    with pytest.raises(
        LaunchError, match=r"runtime/disttrain: it belongs to another user \(nobody\).*JUPYTER_RUNTIME_DIR"
    ):
        Folders.make("other")
    assert not list((tmp_path / "runtime" / "disttrain").iterdir())


def test_folders_between_are_made_private(tmp_path: Path) -> None:
    make_private_below(tmp_path / "a" / "b" / "c", tmp_path / "a")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_a_pipe_in_the_place_of_a_file_blocks_no_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file")
    with pytest.raises(OSError, match="it is not a regular file"):
        read_own(tmp_path / "file")


SENDS = """
import pickle
kernel = get_ipython().kernel
before = kernel.session.send
def send(stream, kind, content=None, *args, **kwargs):
    if kind == "execute_reply":
        content["value"] = {{"kind": "pickle", "shelf": {note!r}}}
        kwargs["buffers"] = [pickle.dumps(1)]
    return before(stream, kind, content, *args, **kwargs)
kernel.session.send = send
"""


@pytest.mark.parametrize("key", ["name", "path"])
def test_a_rank_can_name_no_file_outside_the_shelf(cluster: Cluster, tmp_path: Path, key: str) -> None:
    victim = tmp_path / "precious"
    victim.write_text("kept")
    up = os.path.relpath(victim, cluster._launch.folders.local)
    for name in (str(victim), up):
        cluster.run(SENDS.format(note={key: name, "spans": []}))
        run = cluster.run("1")
        cluster.run("kernel.session.send = before")
        assert victim.read_text() == "kept"
        with pytest.raises(UnserializableValueError, match="names no file in this cluster's shared memory"):
            _ = run.results
    assert cluster.run("rank").results == {0: 0, 1: 1}


def test_what_lies_on_the_shelf_is_taken_by_its_bare_name(tmp_path: Path) -> None:
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
        with pytest.raises(ValueError, match=r"names no file|does not say where"):
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
def test_a_checkpoint_of_another_user_is_loaded_only_when_asked(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run("value = rank + 1; model = torch.nn.Linear(2, 2)")
    cluster.save(tmp_path / "run", ["value", "model"])
    version = tmp_path / "run" / "000001"
    cluster.run("value = 0")
    for each in (version / ".metadata", version / "rank1" / "value.pt", version / "rank0" / ".random.pt", version):
        os.chown(each, NOBODY, NOBODY)
        with pytest.raises(RankFailure) as failed:
            cluster.load(tmp_path / "run")
        words = str(failed.value)
        assert f"{each} belongs to another user (nobody), and loading a checkpoint runs code" in words
        assert "%dist_load --trust-owner" in words
        os.chown(each, os.geteuid(), os.getegid())
        assert cluster.run("value").results == {0: 0, 1: 0}
    give_away(tmp_path / "run")
    cluster.load(tmp_path / "run", trust_owner=True)
    assert cluster.run("value").results == {0: 1, 1: 2}


@as_root
def test_a_checkpoint_s_files_are_checked_as_they_are_opened(cluster: Cluster, tmp_path: Path) -> None:
    """After the whole version was checked somebody may swap a file."""
    cluster.run("model = torch.nn.Linear(2, 2)")
    cluster.save(tmp_path / "run", ["model"])
    version = tmp_path / "run" / "000001"
    os.chown(version / ".metadata", NOBODY, NOBODY)
    code = (
        "from jupyter_disttrain.engine.checkpoint_reader import reader_of\n"
        "import torch.distributed.checkpoint as dcp, pathlib\n"
        f"reader = reader_of(pathlib.Path({str(version)!r}), trust_owner=False)\n"
        "dcp.load({'model': model.state_dict()}, storage_reader=reader)"
    )
    with pytest.raises(RankFailure, match="belongs to another user"):
        cluster.run(code)


@as_root
def test_a_data_set_goes_into_no_folder_that_another_user_makes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "data"
    source.mkdir()
    to = tmp_path / "to"
    to.mkdir()
    store = Store(str(source), str(to), "node0")
    take = store._read_list

    def overtaken() -> dict[str, list[object]]:
        found = take()
        store.path.mkdir()
        os.chown(store.path, NOBODY, NOBODY)
        return found

    monkeypatch.setattr(store, "_read_list", overtaken)
    with pytest.raises(StageError, match="to/data on node0 belongs to another user"):
        store.begin([], [], verify=False, check=lambda: None)
    store.close()


@pytest.mark.parametrize("host", ["$(id)", "`id`", "a;id", "[fe80::1%;id]", "a b", "-oX", "a|b", "a@$(id)"])
def test_a_host_of_a_job_s_file_is_nothing_that_a_shell_reads(host: str) -> None:
    assert tunnel.split(f"{host}:/tmp/job.json") is None


def test_hosts_of_a_job_s_file_are_read() -> None:
    assert tunnel.split("login:/x/job.json") == ("login", "/x/job.json")
    assert tunnel.split("eva@login.example-site.org:~/job.json") == ("eva@login.example-site.org", "~/job.json")
    assert tunnel.split("[fd00::1%eth0]:job.json") == ("fd00::1%eth0", "job.json")
    assert tunnel.split("eva@[fd00::1]:job.json") == ("eva@fd00::1", "job.json")


def test_what_a_cluster_writes_is_readable_by_its_user_alone(cluster: Cluster) -> None:
    folders = cluster._launch.folders
    for top in (folders.profile, folders.local):
        assert stat.S_IMODE(top.stat().st_mode) == 0o700
    for path in (folders.profile / "security").glob("*.json"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert "key" in json.loads(path.read_text())
    assert folders.local.parent == ROOT
