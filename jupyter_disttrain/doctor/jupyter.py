"""Check that Jupyter finds this package's extensions.

Covers: the JupyterLab extension: installed, and not disabled.
Does not cover: JupyterLab's version (``versions``), whether the extension works in a browser (the browser tests).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jupyter_core.paths import jupyter_path

from .finding import Finding, ok, warning
from .versions import installed

if TYPE_CHECKING:
    from collections.abc import Iterator

LABEXTENSION = "jupyter-disttrain"


def find() -> Iterator[Finding]:
    """Yield the state of the JupyterLab extension, if JupyterLab is installed."""
    if installed("jupyterlab") is None:
        return
    from jupyterlab_server.config import get_federated_extensions, get_page_config  # noqa: PLC0415  (of JupyterLab)

    subject, folders = "JupyterLab extension", jupyter_path("labextensions")
    found = get_federated_extensions(folders).get(LABEXTENSION)
    if found is None:
        yield warning(
            subject,
            "not installed: there is no side panel and there are no palette commands; the magics work without it",
            "install jupyter_disttrain again; in a clone of the repository: make labextension",
        )
    elif LABEXTENSION in get_page_config(folders)["disabledExtensions"]:
        yield warning(subject, f"disabled ({found['ext_path']})", f"jupyter labextension enable {LABEXTENSION}")
    else:
        yield ok(subject, f"{found['version']}, enabled ({found['ext_path']})")
