"""What rarely befalls a job that a notebook joins, and must not cost anybody anything.

Covers: files that are not the job's own, ends at which nobody can tidy up, files that can't be read.
Does not cover: joining, leaving and joining again (``test_join``), jobs that can't begin (``test_join_begin``).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from jupyter_disttrain.client.registry import cluster_file
from jupyter_disttrain.client.transport.ssh_tunnel import Tunnel
from jupyter_disttrain.errors import UsageError
from jupyter_disttrain.features.batch_jobs import join
from jupyter_disttrain.rank.startup.startup_args import write_whole

from ...support.join_tools import file

__all__ = ["file"]  # the fixture of this module


@pytest.mark.parametrize("content", ['{"lr": 0.1}', "not JSON", "[1]", '{"connection": 1}', "\0\xff"])
def test_rank_0_takes_no_file_of_the_user_s_own(file: Path, content: str) -> None:
    file.write_text(content)
    with pytest.raises(UsageError, match=r"was not written by a job, and would be overwritten; name another file"):
        join._check_free(file)
    assert file.read_text() == content


@pytest.mark.parametrize(("host", "stays"), [("login2", True), (socket.gethostname(), False)])
def test_only_the_host_of_a_sign_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, stays: bool
) -> None:
    with monkeypatch.context() as there:
        there.setattr(socket, "gethostname", lambda: host)
        there.setattr(os, "getpid", lambda: 1 << 30)  # nobody's here
        sign = cluster_file.Sign(tmp_path, "exp-1-abcdef")
    assert "exp-1-abcdef" not in [cluster.cluster_id for cluster in cluster_file.running()]
    signs = [path.name for path in cluster_file._folder().glob("exp-1-*")]
    sign.remove()
    assert signs == ([f"exp-1-abcdef@{host}@{1 << 30}"] if stays else [])


def test_a_tunnel_brings_files_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "client").mkdir(parents=True)
    here.mkdir()
    whole = json.dumps({"of": "back\\slash\nand 'quotes'"})
    (there / "cluster.json").write_text(whole)
    (there / "client" / "open_cells.json").write_text(whole + "\n")  # as another tunnel has written it back
    (there / "death-1.json").write_text("")
    (there / "death-2.json").write_text('{"engine":')
    tunnel = Tunnel.__new__(Tunnel)
    tunnel._profile, tunnel.folder = str(there), here
    monkeypatch.setattr(tunnel, "ask", lambda script: subprocess.check_output(["sh", "-c", script], text=True))
    tunnel._fetch()
    found = {path.name: path.read_text() for path in here.iterdir()}
    assert found == {
        "cluster.json": whole,
        "open_cells.json": whole,
        "death-1.json": "",
        "death-2.json": '{"engine":',
    }


def test_a_word_is_left_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    word = tmp_path / "death-1.json"
    write_whole(word, "first")

    def no_room(path: Path, _text: str) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", no_room)
    with pytest.raises(OSError, match="No space left"):
        write_whole(word, "second")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("death-1.json", "first")]
