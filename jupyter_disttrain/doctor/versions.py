"""Check what is installed here, and whether it loads.

Covers: Python, this package, its main dependencies, JupyterLab and this package's extension of it.
Does not cover: whether they work together (``ranks``), whether the extension works in a browser (the browser tests).
"""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from typing import TYPE_CHECKING

from jupyter_core.paths import jupyter_path

from . import probe
from .report import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

_PACKAGES = ("jupyter_disttrain", "ipyparallel", "ipykernel", "mpi4py", "torch")
LABEXTENSION = "jupyter-disttrain"


def find() -> Iterator[Finding]:
    """Yield one finding per version, then the state of the JupyterLab extension."""
    yield Finding("ok", "python", f"{platform.python_version()} ({sys.executable})")
    for package in _PACKAGES:
        version = installed(package)
        if version is None:
            remedy = f"{sys.executable} -m pip install {package}"
            yield Finding("error", package, "not installed in this environment", remedy)
        else:
            yield _torch(version) if package == "torch" else Finding("ok", package, version)
    yield from find_jupyterlab()


def installed(package: str) -> str | None:
    """Return the version of an installed package from its metadata, without an import."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _torch(version: str) -> Finding:
    try:
        build = probe.torch_build()
    except probe.ProbeError as failure:
        remedy = "install torch again, in a build for this machine"
        return Finding("error", "torch", f"{version} is installed, but {failure}", remedy)
    if not build["gloo"]:
        return Finding(
            "error",
            "torch",
            f"{version} was built without Gloo, which ranks on CPUs and object collectives need",
            "install a build of torch with torch.distributed and Gloo",
        )
    return Finding("ok", "torch", f"{version} ({build['accelerator']} build)")


def find_jupyterlab() -> Iterator[Finding]:
    """Yield JupyterLab's version, and whether this package's extension is installed there and enabled."""
    version = installed("jupyterlab")
    if version is None:
        yield Finding(
            "warning",
            "jupyterlab",
            "not in this environment; notebooks work in any front end, the side panel needs JupyterLab",
            "where JupyterLab is installed elsewhere, install jupyter_disttrain there too; else: "
            "pip install 'jupyter_disttrain[lab]'",
        )
        return
    yield Finding("ok", "jupyterlab", version)
    from jupyterlab_server.config import get_federated_extensions, get_page_config  # noqa: PLC0415  (of JupyterLab)

    subject, folders = "JupyterLab extension", jupyter_path("labextensions")
    found = get_federated_extensions(folders).get(LABEXTENSION)
    if found is None:
        yield Finding(
            "warning",
            subject,
            "not installed: there is no side panel and there are no palette commands; the magics work without it",
            "install jupyter_disttrain again; in a clone of the repository: make labextension",
        )
    elif LABEXTENSION in get_page_config(folders)["disabledExtensions"]:
        remedy = f"jupyter labextension enable {LABEXTENSION}"
        yield Finding("warning", subject, f"disabled ({found['ext_path']})", remedy)
    else:
        yield Finding("ok", subject, f"{found['version']}, enabled ({found['ext_path']})")
