"""Cleanup after the exit of processes that started a cluster."""

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


def test_killed_controller_is_detected_without_zeromq_messages(tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    info = {"interface": f"ipc://{tmp_path / 's'}", "control": 3}
    connection = Connection(file, info)
    assert not connection.is_there(once_reached=False, is_silent=False)
    file.touch()
    assert connection.is_there(once_reached=False, is_silent=False)  # it does not listen yet
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(connection.url("control").removeprefix("ipc://"))
        listener.listen(1)
        assert all(connection.is_there(once_reached=True, is_silent=False) for _ in range(10))  # more than it accepts
    assert not connection.is_there(once_reached=True, is_silent=False)  # its file and its socket's file are left


def test_rank_that_starts_late_creates_no_folder(tmp_path: Path) -> None:
    gone = tmp_path / "cluster"
    profile = RankProfile(location=str(gone))
    assert profile.security_dir == str(gone / "security")
    assert not gone.exists()


def test_interrupt_while_folders_are_created_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_path: Path) -> None:
        assert folders() - before
        raise KeyboardInterrupt

    before, shelves_before = folders(), shelves()
    monkeypatch.setattr("jupyter_disttrain.launchers.folders._probe", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Folders.make("interrupted")
    assert (folders(), shelves()) == (before, shelves_before)


def test_folder_is_removed_although_an_exiting_process_still_writes_to_it(tmp_path: Path) -> None:
    folder = tmp_path / "shelf"
    folder.mkdir()
    began = threading.Event()

    def write() -> None:
        holder = os.open(folder, os.O_RDONLY)  # as MPI does: the path may no longer exist
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
