"""Rare faults of a job that a notebook joins.

Covers: files of other owners, exits after which cleanup is impossible, unreadable files.
Does not cover: joining, leaving and rejoining (``test_join``).
"""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

import pytest

from jupyter_disttrain.client.registry import cluster_file
from jupyter_disttrain.client.transport.ssh_tunnel import Tunnel
from jupyter_disttrain.errors import LaunchError, UsageError
from jupyter_disttrain.features.batch_jobs import join


@pytest.mark.parametrize("content", ['{"lr": 0.1}', "not JSON", "[1]", '{"connection": 1}', "\0\xff"])
def test_rank_0_does_not_overwrite_a_user_file(file: Path, content: str) -> None:
    file.write_text(content)
    with pytest.raises(UsageError, match=r"was not written by a job, and would be overwritten; name another file"):
        join._check_free(file)
    assert file.read_text() == content


@pytest.mark.parametrize(("host", "stays"), [("login2", True), (socket.gethostname(), False)])
def test_link_to_an_ended_job_is_removed_only_by_its_own_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, stays: bool
) -> None:
    with monkeypatch.context() as there:
        there.setattr(socket, "gethostname", lambda: host)
        link = cluster_file.list_job(tmp_path / "ended", "exp-1-abcdef")
    assert "exp-1-abcdef" not in [cluster.cluster_id for cluster in cluster_file.running()]
    assert link.is_symlink() == stays
    link.unlink(missing_ok=True)


def test_tunnel_transfers_files_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "client").mkdir(parents=True)
    here.mkdir()
    whole = json.dumps({"of": "back\\slash\nand 'quotes'"})
    (there / "cluster.json").write_text(whole)
    (there / "client" / "open_cells.json").write_text(whole + "\n")  # as another tunnel wrote it back
    (there / "death-1.json").write_text("")
    (there / "death-2.json").write_text('{"engine":')
    tunnel = Tunnel.__new__(Tunnel)
    tunnel.host, tunnel._profile, tunnel.folder = "node1", str(there), here
    monkeypatch.setattr(tunnel, "ask", lambda script: subprocess.check_output(["sh", "-c", script], text=True))
    tunnel._fetch()
    found = {path.name: path.read_text() for path in here.iterdir()}
    assert found == {
        "cluster.json": whole,
        "open_cells.json": whole + "\n",
        "death-1.json": "",
        "death-2.json": '{"engine":',
    }
    monkeypatch.setattr(tunnel, "ask", lambda _script: "cluster.json\n\n")  # as a shell without gzip
    with pytest.raises(LaunchError, match=r"on node1 can't be copied: .*; gzip, base64, .* installed there"):
        tunnel._fetch()
