"""Versions of the JupyterLab extension and the Python package."""

from __future__ import annotations

import json
from pathlib import Path

from jupyter_disttrain import __version__


def test_both_packages_have_the_same_version() -> None:
    package = Path(__file__).parents[2] / "labextension" / "package.json"
    assert json.loads(package.read_text())["version"] == __version__
