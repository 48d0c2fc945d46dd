"""Check that Jupyter finds this package's extensions.

Covers: the JupyterLab extension: installed, and not disabled.
Does not cover: JupyterLab's version (``versions``), whether the extension works in a browser (the browser tests).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_core.paths import jupyter_config_path, jupyter_path

from .finding import Finding, ok, warning
from .versions import installed

if TYPE_CHECKING:
    from collections.abc import Iterator

LABEXTENSION = "jupyter-disttrain"


def find() -> Iterator[Finding]:
    """Yield the state of the JupyterLab extension, if JupyterLab is installed."""
    if installed("jupyterlab") is None:
        return
    yield _labextension()


def _labextension() -> Finding:
    subject = "JupyterLab extension"
    folders = [Path(path, LABEXTENSION) for path in jupyter_path("labextensions")]
    found = next((folder for folder in folders if (folder / "package.json").is_file()), None)
    if found is None:
        return warning(
            subject,
            "not installed: there is no side panel and there are no palette commands; the magics work without it",
            "install jupyter_disttrain again; in a clone of the repository: make labextension",
        )
    if _is_disabled():
        return warning(subject, f"disabled ({found})", f"jupyter labextension enable {LABEXTENSION}")
    version = json.loads((found / "package.json").read_text(encoding="utf-8"))["version"]
    return ok(subject, f"{version}, enabled ({found})")


def _is_disabled() -> bool:
    """Read the output of ``jupyter labextension disable``.

    As in JupyterLab, the first folder with an entry for the extension wins.
    """
    folders = [Path(path, "labconfig") for path in jupyter_config_path()]
    for file in (folder / "page_config.json" for folder in folders):
        if not file.is_file():
            continue
        disabled = json.loads(file.read_text(encoding="utf-8")).get("disabledExtensions", {})
        if isinstance(disabled, list):  # format of older versions
            disabled = dict.fromkeys(disabled, True)
        if LABEXTENSION in disabled:
            return bool(disabled[LABEXTENSION])
    return False
