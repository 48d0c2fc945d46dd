"""The cluster's folder on another host, by processes of this one."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from jupyter_disttrain.engine.connection import LOCAL_DIR
from jupyter_disttrain.engine.host_folder import HostFolder
from jupyter_disttrain.shelf import NANNIES


def test_a_nanny_that_comes_while_the_last_one_goes_holds_the_folder_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "disttrain-test"
    monkeypatch.setenv(LOCAL_DIR, str(folder))
    folder.mkdir()
    going = os.open(folder / NANNIES, os.O_RDWR | os.O_CREAT)
    fcntl.flock(going, fcntl.LOCK_EX)
    opened = threading.Event()

    def lock(descriptor: int, how: int, flock: object = fcntl.flock) -> None:
        opened.set()
        flock(descriptor, how)  # type: ignore[operator]

    found: list[HostFolder] = []
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", lock)
        coming = threading.Thread(target=lambda: found.append(HostFolder()))
        coming.start()
        assert opened.wait(10)
        (folder / NANNIES).unlink()
        (folder / NANNIES).touch()  # by a third one, which has come after the folder was removed
        os.close(going)
        coming.join(10)
    with (folder / NANNIES).open() as there, pytest.raises(BlockingIOError):
        fcntl.flock(there, fcntl.LOCK_EX | fcntl.LOCK_NB)
    found[0].leave()
    assert not folder.exists()
