"""``%dist_sync_code``: how files are written on a node."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain.features.reloading.rank import LocalModules

if TYPE_CHECKING:
    from pathlib import Path


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
