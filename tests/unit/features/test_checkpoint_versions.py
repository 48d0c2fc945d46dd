"""Checkpoints: why a version can't be written."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_disttrain.features.checkpoints.versions import reason_of

if TYPE_CHECKING:
    import pytest


def fail(*_: object) -> bool:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_reason_is_given_also_where_the_file_system_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "a.distcp")
    assert " MiB free; free disk space, or name another folder" in reason_of(full, tmp_path / "none")
    assert reason_of(missing, tmp_path).startswith("No such file or directory: a.distcp on ")
    for function in ((Path, "is_dir"), (shutil, "disk_usage")):
        monkeypatch.setattr(*function, fail)
        assert "(Stale file handle); free disk space" in reason_of(full, tmp_path)
        monkeypatch.undo()
