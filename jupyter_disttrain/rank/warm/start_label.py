"""Decide which starts share a warm process: those whose new Python would import the same code in the same way.

Covers: the label of a start, the environment that a warm process imports its modules in.
Does not cover: what is set after the fork, for each process (``forked``).

What a library reads when it is imported, what can't be changed after a fork (limits, capabilities, namespaces, cgroup)
and the installed code are part of the label. Starts with different labels have different warm processes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import os
import re
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ...protocol.environment import PREFIX, PRELOAD, WITHOUT_TORCH

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

PACKAGE = Path(__file__).parents[2]
# Variables that Python, the C library, torch, numpy and their threads read when they are loaded.
_READ_AT_IMPORT = (
    *("PYTHON", "LD_", "LC_", "MALLOC_", "GLIBC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMEXPR_"),
    *("NPY_", "TORCH", "PYTORCH_", "ATEN_", "CUDA_", "HIP_", "TRITON_"),
)
_NAMES_READ_AT_IMPORT = ("HOME", "LANG", "LANGUAGE", "TZ", PRELOAD, WITHOUT_TORCH)
# Of these, the variables that differ between ranks or jobs, and are read later: CUDA's when it is initialized.
# Torch reads those of process groups when it makes one. A warm process removes its folder from the path. The last ones
# are set by torch.compile, CUDA and Lightning in a running process.
_READ_LATER = (
    *("CUDA_VISIBLE_DEVICES", "TORCHELASTIC_", "TORCH_NCCL_", "TORCH_FR_", "PYTHONSAFEPATH"),
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_MODULE_LOADING", "PYTORCH_NVML_BASED_CUDA_CHECK"),
)
_OF_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
_OF_MPIEXEC = ("OMPI_", "OPAL_", "PMIX_", "PMI_", "PRTE_")
# Variables of one rank, cluster, job or terminal. All others count where the user has modules preloaded.
_OF_PROCESS = (
    *(*_OF_RANK, "CUDA_VISIBLE_DEVICES"),
    *(PREFIX, *_OF_MPIEXEC, "SLURM_", "JPY_", "SSH_", "XDG_SESSION"),
    *("PWD", "OLDPWD", "SHLVL", "_", "TERM", "COLUMNS", "LINES", "HYDRA_", "MPI_LOCAL", "GLOO_SOCKET_IFNAME"),
    # What ranks set when they start: defaults of libraries, addresses.
    *("LAUNCH_", "NODE_RANK", "NNODES", "MPLBACKEND", "DS_ACCELERATOR", "ACCELERATE_USE_CPU", "NCCL_HOSTID"),
    *("JAX_COORDINATOR_", "TF_CONFIG", "HOROVOD_", "FORCE_COLOR", "CLICOLOR", "PAGER", "GIT_PAGER"),
    *("TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
)
# Of those that are read at import, the ones that have no effect in a process that sets them itself, or still have one
# after torch is imported.
_AT_PROCESS_START = ("PYTHON", "LD_", "LC_", "MALLOC_", "GLIBC_")
_AFTER_TORCH = (
    *("CUDA_", "HIP_", "TRITON_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_HOME"),
    *("TORCH_EXTENSIONS_DIR", "TORCH_CUDA_ARCH_LIST", "TORCH_SHOW_CPP_STACKTRACES"),
)
_KEPT = (PRELOAD, WITHOUT_TORCH)  # of this package's own variables
_NAMESPACES = ("ipc", "mnt", "net", "pid", "user", "uts")
_RIGHTS = ("Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp:")  # of /proc/self/status
_LOGIN = re.compile(r"/session-[^/\n]*\.scope")  # each login has a cgroup of its own, with the limits of its user


def label_of(environment: Mapping[str, str]) -> str:
    """Return the label of a start from this process; ``environment`` is from :func:`import_environment`."""
    parts = [
        [sys.executable, sys.version],
        sorted(_at_import(environment)),
        sorted(_changes(environment)),
        [[number, resource.getrlimit(number)[1]] for number in limits()],
        [os.getpriority(os.PRIO_PROCESS, 0), *_of_system()],
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def import_environment(environment: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the environment of the warm process: that of no rank, cluster or MPI job.

    It works in another folder than the start's ``folder``, to which paths in PYTHONPATH may be relative.
    """
    own = (PREFIX, *_OF_MPIEXEC, *_OF_RANK)
    found = {name: value for name, value in environment.items() if name in _KEPT or not name.startswith(own)}
    if any(name.startswith(_OF_MPIEXEC) for name in environment):
        _remove_paths_of_mpiexec(found)
    if found.get("PYTHONPATH"):
        paths = found["PYTHONPATH"].split(os.pathsep)
        found["PYTHONPATH"] = os.pathsep.join(os.path.normpath(Path(folder, each)) for each in paths)
    return found


def preloaded(environment: Mapping[str, str]) -> list[str]:
    """Return the modules that the user has preloaded, as named by ``%config DistributedMagics.preload``."""
    return [name for name in environment.get(PRELOAD, "").split(",") if name]


def is_read_before_fork(name: str, environment: Mapping[str, str]) -> bool:
    """Return whether a process that the warm process has forked sets a variable too late, though a new Python does not.

    ``environment`` is the warm process's. Of modules that the user has preloaded, variables that begin with the name of
    their package count, and Hugging Face's.
    """
    packages = {each.partition(".")[0].upper() for each in preloaded(environment)}
    late = _READ_LATER if "TORCH" in packages else (*_READ_LATER, *_AFTER_TORCH)
    prefixes = (*_READ_AT_IMPORT, *packages, *(["HF_"] if packages else []))
    return name.startswith(prefixes) and not name.startswith((*_AT_PROCESS_START, *late))


def _at_import(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    has_modules = bool(preloaded(environment))
    for name, value in environment.items():
        is_read = name in _NAMES_READ_AT_IMPORT or name.startswith(_READ_AT_IMPORT)
        is_any = has_modules and not name.startswith(_OF_PROCESS)
        if (is_read or is_any) and not name.startswith(_READ_LATER):
            yield name, value


def _remove_paths_of_mpiexec(environment: dict[str, str]) -> None:
    """Remove what mpiexec has put in front of LD_LIBRARY_PATH, so that ranks beside its job share a warm process.

    The mpiexec of this Python's environment adds the folder of its libraries, once in each of its processes on the way.
    """
    folders = environment.get("LD_LIBRARY_PATH", "").split(":")
    own = os.path.realpath(Path(sys.prefix, "lib"))
    kept = [*itertools.dropwhile(lambda folder: bool(folder) and os.path.realpath(folder) == own, folders)]
    if any(kept):
        environment["LD_LIBRARY_PATH"] = ":".join(kept)
    else:  # set but empty, it would have no effect
        environment.pop("LD_LIBRARY_PATH", None)


def _changes(environment: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Yield when installed packages, this package and the user's preloaded modules last changed."""
    folders = [Path(each) for each in sys.path if each.endswith("-packages")]
    for folder in folders:  # pip changes it with each package
        yield str(folder), folder.stat().st_mtime_ns if folder.is_dir() else 0
    if not _is_in(PACKAGE, folders):
        yield str(PACKAGE), _newest([PACKAGE])
    for name in preloaded(environment):
        spec = importlib.util.find_spec(name.partition(".")[0])  # this imports nothing
        if spec is not None and spec.origin is not None and not _is_in(Path(spec.origin), folders):
            yield name, _newest([Path(spec.origin), *map(Path, spec.submodule_search_locations or ())])


def _is_in(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _newest(paths: Sequence[Path]) -> int:
    """Return when one of these files, or a Python file in one of these folders, last changed."""
    files = [path for path in paths if path.is_file()]
    for path in paths:
        for folder, _, names in os.walk(path):  # in half the time of Path.rglob
            files += [Path(folder, name) for name in names if name.endswith(".py")]
    return max((file.stat().st_mtime_ns for file in files if file.exists()), default=0)


def limits() -> list[int]:
    """Return the numbers of the limits of a process, as in ``resource``."""
    return sorted(value for name, value in vars(resource).items() if name.startswith("RLIMIT_"))


def _of_system() -> Iterator[str]:
    """Yield what a process can't change, or keeps when it is forked."""
    for name in _NAMESPACES:
        path = Path("/proc/self/ns", name)
        if path.exists():  # the kernel may be built without one of them
            yield str(path.readlink())
    for name in ("cgroup", "oom_score_adj"):
        path = Path("/proc/self", name)
        if path.exists():
            yield _LOGIN.sub("", path.read_text())
    status = Path("/proc/self/status")
    if status.exists():
        yield from (line for line in status.read_text().splitlines() if line.startswith(_RIGHTS))
