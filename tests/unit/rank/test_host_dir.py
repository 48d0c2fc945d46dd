"""The cluster's folder on another host, used by processes of this one."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain import private_files
from jupyter_disttrain.client.registry.cluster_file import take_lease
from jupyter_disttrain.errors import LaunchError, UsageError
from jupyter_disttrain.file_lock import check_locks
from jupyter_disttrain.launchers import folders
from jupyter_disttrain.launchers.folders import Folders
from jupyter_disttrain.protocol import shared_memory
from jupyter_disttrain.protocol.environment import LOCAL_DIR, PROFILE_DIR
from jupyter_disttrain.protocol.shared_memory import NANNIES, NOTEBOOK
from jupyter_disttrain.rank.startup.host_dir import HostFolder
from jupyter_disttrain.rank.startup.startup_args import write_trouble
from jupyter_disttrain.rank_sessions import remove_unheld

if TYPE_CHECKING:
    from collections.abc import Callable


def test_nanny_that_starts_while_another_exits_locks_the_existing_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "disttrain-test"
    monkeypatch.setenv(LOCAL_DIR, str(folder))
    folder.mkdir(mode=0o700)
    going = os.open(folder / NANNIES, os.O_RDWR | os.O_CREAT)
    fcntl.flock(going, fcntl.LOCK_EX)
    opened = threading.Event()

    def lock(descriptor: int, how: int, flock: Callable[[int, int], None] = fcntl.flock) -> None:
        opened.set()
        flock(descriptor, how)

    found: list[HostFolder] = []
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", lock)
        coming = threading.Thread(target=lambda: found.append(HostFolder()))
        coming.start()
        assert opened.wait(10)
        (folder / NANNIES).unlink()
        (folder / NANNIES).touch()  # by a third process, which started after the folder was removed
        os.close(going)
        coming.join(10)
    with (folder / NANNIES).open() as there, pytest.raises(BlockingIOError):
        fcntl.flock(there, fcntl.LOCK_EX | fcntl.LOCK_NB)
    found[0].leave()
    assert not folder.exists()


def test_folder_that_was_made_again_meanwhile_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NANNIES).touch()

    def lock(descriptor: int, how: int, flock: Callable[[int, int], None] = fcntl.flock) -> None:
        (tmp_path / NANNIES).unlink()
        (tmp_path / NANNIES).touch()  # by a nanny that starts after another process has removed the folder
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", lock)
    remove_unheld(tmp_path, NANNIES)
    assert (tmp_path / NANNIES).exists()


def test_folder_of_another_user_or_open_to_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "disttrain-test"
    monkeypatch.setenv(LOCAL_DIR, str(folder))
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(LaunchError, match=r"existed already and is open to other users \(mode 755\)"):
        HostFolder()
    if os.geteuid() == 0:  # chown needs root
        folder.chmod(0o700)
        os.chown(folder, 65534, -1)
        with pytest.raises(LaunchError, match=r"belongs to another user \(nobody\), so it was not used; remove it"):
            HostFolder()
        (folder / NOTEBOOK).touch()  # as if it were the notebook's own, whose folder is not checked
        with pytest.raises(LaunchError, match=r"belongs to another user \(nobody\)"):
            HostFolder()
        (folder / NOTEBOOK).unlink()
    assert not list(folder.iterdir())


def test_message_for_the_client_is_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROFILE_DIR, str(tmp_path))
    seen = []
    write = private_files.write_private

    def look_after(path: Path, content: str) -> None:
        write(path, content)
        seen.append(list(tmp_path.glob("trouble-*.txt")))

    monkeypatch.setattr(private_files, "write_private", look_after)
    write_trouble("no room")
    assert seen == [[]]
    assert [path.read_text() for path in tmp_path.iterdir()] == ["no room"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(_descriptor: int, _how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for use in (check_locks, take_lease):
        text = f"{tmp_path} does not support locks .{os.strerror(number)}.*; mount it with locks"
        with pytest.raises(UsageError, match=text):
            use(tmp_path)


def test_folders_of_killed_nannies_are_removed_at_the_next_start_and_locked_ones_stay() -> None:
    left, held = (
        shared_memory.ROOT / f"{shared_memory.PREFIX}sweep-{name}-{os.getpid()}-test" for name in ("left", "held")
    )
    try:
        for folder in (left, held):
            folder.mkdir()
            (folder / NANNIES).touch()
        with (held / NANNIES).open() as nanny:
            fcntl.flock(nanny, fcntl.LOCK_SH)
            Folders.make("sweeps").remove()
            assert not left.exists()
            assert held.exists()
    finally:
        for folder in (left, held):
            shutil.rmtree(folder, ignore_errors=True)


def test_old_logs_are_removed_except_those_of_running_notebooks(tmp_path: Path) -> None:
    runs, profiles = tmp_path / "runs", tmp_path / "profiles"
    names = [f"21000101-00000{number}-default-{2**22 + number}-aaaaaa" for number in range(5)]
    own = f"{time.strftime('%Y%m%d-%H%M%S')}-default-{os.getpid()}-aaaaaa"  # whose folders are elsewhere
    ended = f"20260101-000000-default-{os.getpid()}-aaaaaa"  # of a process that had this one's pid
    foreign = "notes", f"{ended}.backup"
    for folder in (*(runs / name for name in (*names, own, ended, *foreign)), profiles / "default-4194305-aaaaaa"):
        folder.mkdir(parents=True)
    folders._prune(runs, profiles, keep=2)
    assert {folder.name for folder in runs.iterdir()} == {own, names[1], *names[-2:], *foreign}
