"""The end of whoever started a cluster, at any moment, and starts that are cut off: nothing is left."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from jupyter_disttrain.launchers.folders import Folders, remove_folder
from jupyter_disttrain.rank.kernel.shell import RankProfile
from jupyter_disttrain.rank.startup.connection import Connection

from ...support.process_tools import folders, shelves


def test_a_controller_that_was_killed_is_missed_without_a_word_of_zeromq(tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    info = {"interface": f"ipc://{tmp_path / 's'}", "control": 3}
    connection = Connection(file, info)
    assert not connection.is_there(once_reached=False, is_silent=False)
    file.touch()
    assert connection.is_there(once_reached=False, is_silent=False)  # it does not listen yet
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(connection.url("control").removeprefix("ipc://"))
        listener.listen(1)
        assert all(connection.is_there(once_reached=True, is_silent=False) for _ in range(10))  # more than it takes
    assert not connection.is_there(once_reached=True, is_silent=False)  # its file and its socket's are left


def test_a_rank_that_comes_up_late_makes_no_folder(tmp_path: Path) -> None:
    gone = tmp_path / "cluster"
    profile = RankProfile(location=str(gone))
    assert profile.security_dir == str(gone / "security")
    assert not gone.exists()


def test_an_interrupt_while_folders_are_made_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_path: Path) -> None:
        assert folders() - before
        raise KeyboardInterrupt

    before, shelves_before = folders(), shelves()
    monkeypatch.setattr("jupyter_disttrain.launchers.folders._probe", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Folders.make("interrupted")
    assert (folders(), shelves()) == (before, shelves_before)


def test_a_folder_goes_although_a_process_that_ends_still_writes_into_it(tmp_path: Path) -> None:
    folder = tmp_path / "shelf"
    folder.mkdir()
    began = threading.Event()

    def write() -> None:
        holder = os.open(folder, os.O_RDONLY)  # as MPI has it: by then the path may be gone
        with suppress(FileNotFoundError):
            for number in range(5000):
                os.close(os.open(str(number), os.O_WRONLY | os.O_CREAT, dir_fd=holder))
                began.set()
        os.close(holder)

    writer = threading.Thread(target=write)
    writer.start()
    assert began.wait(10)
    remove_folder(folder)
    writer.join()
    assert not folder.exists()
