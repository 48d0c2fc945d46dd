"""``%dist_sync_code``: how files are written on a node."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path

import pytest

from jupyter_disttrain.features.reloading.rank import LocalModules


def test_symlinks_of_a_node_are_not_followed_when_writing(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    lib = tmp_path_factory.mktemp("lib")
    (lib / "pack").mkdir()
    for name in ("pack/inner.py", "single.py"):
        (lib / name).write_text("theirs")
    (folder / "pack").symlink_to(lib / "pack")
    (folder / "single.py").symlink_to(lib / "single.py")
    (folder / "real").mkdir()
    (folder / "within").symlink_to("real")
    modules = LocalModules()
    hashes = {name: hashlib.sha256(b"theirs").hexdigest() for name in ("pack/inner.py", "single.py")}
    assert modules.compare(str(folder), hashes) == []
    with pytest.raises(ValueError, match=r"pack/inner\.py .* is reached through a link to .*/lib"):
        modules.write(str(folder), ["pack/inner.py"], [b"ours"])
    modules.write(str(folder), ["single.py", "within/new.py"], [b"ours", b"ours"])
    assert (folder / "single.py").read_text() == (folder / "real" / "new.py").read_text() == "ours"
    assert modules.remove(str(folder), {"pack/inner.py": hashes["pack/inner.py"]}) == []
    assert (lib / "pack" / "inner.py").read_text() == (lib / "single.py").read_text() == "theirs"
    for name in ("../single.py", str(lib / "single.py")):
        with pytest.raises(ValueError, match="is outside of"):
            modules.write(str(folder), [name], [b"ours"])


def test_ranks_that_write_one_file_use_different_temporary_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts may share the folder; ``os.getpid`` and the host's name tell their ranks apart."""
    written: list[str] = []
    write = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", lambda path, data: written.append(path.name) or write(path, data))
    for host, pid in (("node1", 7), ("node1", 8), ("node2", 7)):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        LocalModules().write(str(folder), ["own.py"], [b"ours"])
    assert len(set(written)) == 3
    assert [path.name for path in folder.iterdir()] == ["own.py"]
