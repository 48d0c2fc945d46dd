"""Import hooks that patch modules at import."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

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
