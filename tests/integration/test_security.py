"""Files of other users are not trusted: connection files, job folders, checkpoints, names that ranks send."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.client.registry import cluster_file
from jupyter_disttrain.errors import RankFailure, UnserializableValueError, UsageError
from jupyter_disttrain.protocol.shared_memory import ROOT

from ..support.join_tools import start_process
from ..support.process_tools import OTHER_UID, as_root, change_owner

if TYPE_CHECKING:
    from ..support.join_tools import Job


@as_root
def test_job_folder_placed_by_another_user_is_not_used(
    file: Path,
    jobs: list[Job],
) -> None:
    start_process(jobs, file, 0, 2)
    profile = Path(jobs[0].wait_for_file(file)["profile"])
    own = profile.rename(profile.with_name("moved"))
    shutil.copytree(own, profile)  # what an attacker would put there leads to a controller of theirs
    change_owner(profile)
    late = start_process(jobs, file, 1, 2)
    assert late.end() != 0
    assert f"{profile}, which belongs to {file}, can't be used: on " in late.output
    assert "it belongs to another user (nobody); end the job" in late.output
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
def test_cluster_file_of_another_user_is_ignored(light: Cluster) -> None:
    profile = light._session.launch.folders.profile
    assert light.cluster_id in [each.cluster_id for each in cluster_file.running()]
    os.chown(profile / cluster_file.FILE, OTHER_UID, OTHER_UID)
    assert light.cluster_id not in [each.cluster_id for each in cluster_file.running()]
    os.chown(profile / cluster_file.FILE, os.geteuid(), os.getegid())
    assert light.cluster_id in [each.cluster_id for each in cluster_file.running()]


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
def test_rank_can_name_no_file_outside_the_shared_memory_folder(cluster: Cluster, tmp_path: Path, key: str) -> None:
    victim = tmp_path / "precious"
    victim.write_text("kept")
    up = os.path.relpath(victim, cluster._session.launch.folders.local)
    for name in (str(victim), up):
        cluster.run(SENDS.format(note={key: name, "spans": []}))
        run = cluster.run("1")
        cluster.run("kernel.session.send = before")
        assert victim.read_text() == "kept"
        with pytest.raises(UnserializableValueError, match="names no file in this cluster's shared memory"):
            _ = run.results
    assert cluster.run("rank").results == {0: 0, 1: 1}


@as_root
def test_checkpoint_of_another_user_is_loaded_only_on_request(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run("value = rank + 1; model = torch.nn.Linear(2, 2)")
    cluster.checkpoints.save(tmp_path / "run", ["value", "model"])
    version = tmp_path / "run" / "000001"
    cluster.run("value = 0")
    for each in (version / ".metadata", version / "__0_0.distcp", version / "__1_0.distcp"):
        os.chown(each, OTHER_UID, OTHER_UID)
        with pytest.raises(RankFailure) as failed:
            cluster.checkpoints.load(tmp_path / "run")
        text = str(failed.value)
        assert f"{each}: it belongs to another user (nobody), and loading a checkpoint runs code" in text
        assert "%dist_load --trust-owner" in text
        os.chown(each, os.geteuid(), os.getegid())
        assert cluster.run("value").results == {0: 0, 1: 0}
    change_owner(tmp_path / "run")
    cluster.checkpoints.load(tmp_path / "run", trust_owner=True)
    assert cluster.run("value").results == {0: 1, 1: 2}


def test_files_of_a_cluster_are_readable_by_its_user_only(cluster: Cluster) -> None:
    folders = cluster._session.launch.folders
    for top in (folders.profile, folders.profile / "security", folders.profile / "log", folders.run, folders.local):
        assert stat.S_IMODE(top.stat().st_mode) == 0o700, top
    files = list((folders.profile / "security").iterdir())
    assert {path.name.partition("-")[0] for path in files} == {"ipcontroller", folders.environment_file.name}
    assert sorted(path.name[-11:] for path in files)[:2] == ["client.json", "engine.json"]
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert path == folders.environment_file or "key" in json.loads(path.read_text())
    assert folders.local.parent == ROOT
