"""Modules that are patched at import."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch.utils.file_baton import FileBaton

from jupyter_disttrain.rank.libraries import extension_builds
from jupyter_disttrain.rank.libraries.import_hooks import on_import

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


class OldFinder:
    """An import hook of the protocol before Python 3.4."""

    def find_module(self, _name: str, _path: Any = None) -> None:
        """Find nothing."""


def test_import_hook_of_the_old_protocol_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "watched_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [OldFinder(), *sys.meta_path])
    seen: list[Any] = []
    on_import("watched_module", seen.append)
    module = importlib.import_module("watched_module")
    assert (seen, module.value) == ([module], 1)
    del sys.modules["watched_module"]


def test_lock_of_a_build_ends_with_its_process_unless_it_is_of_another_program(tmp_path: Path) -> None:
    module: Any = SimpleNamespace(FileBaton=type("Baton", (FileBaton,), {}))
    extension_builds._watch(module)
    first, second = (module.FileBaton(str(tmp_path / "lock"), wait_seconds=0.01) for _ in range(2))
    assert (first.try_acquire(), second.try_acquire()) == (True, False)
    waiter = threading.Thread(target=second.wait)
    waiter.start()
    first.release()
    waiter.join()
    assert list(tmp_path.iterdir()) == []
    for wait_or_build in (second.wait, first.try_acquire):
        assert second.try_acquire()
        os.close(second.fd)  # as at the end of the process
        extension_builds._held.clear()
        wait_or_build()
    first.release()
    for target in ("lock-of-another-host", ""):  # where the lock of the folder does not count; of another program
        (tmp_path / target).touch()
        if target:
            (tmp_path / "lock").symlink_to(target)
        else:
            (tmp_path / "lock").touch()
        assert not first.try_acquire()
        (tmp_path / "lock").unlink()
