"""The JupyterLab extension's package: its version and the layout of its sources."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from jupyter_disttrain import __version__

LABEXTENSION = Path(__file__).parents[2] / "labextension"
MOST_MODULES = 12  # per folder, as in the Python packages


def test_both_packages_have_the_same_version() -> None:
    package = LABEXTENSION / "package.json"
    assert json.loads(package.read_text())["version"] == __version__


def test_no_folder_of_the_sources_has_more_than_12_modules() -> None:
    modules = (LABEXTENSION / "src").rglob("*.ts")
    counts = Counter(module.parent.relative_to(LABEXTENSION) for module in modules)
    assert counts
    assert {str(folder): count for folder, count in counts.items() if count > MOST_MODULES} == {}
