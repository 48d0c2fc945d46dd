"""Describe the machine and the versions of packages.

Covers: the folders of this repository, variables that Open MPI needs, the facts at the top of every results file.
Does not cover: the environment in which the peers are installed (compare.peer_environment).
"""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
WORKLOADS = ROOT / "benchmarks" / "workloads"
OPENMPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_PACKAGES = ("jupyter_disttrain", "torch", "ipyparallel", "ipykernel", "mpi4py")


def core_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def facts() -> list[str]:
    """Return the date, the machine, its load and the versions, one line each."""
    one, five, _ = os.getloadavg()
    versions = [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in _PACKAGES)]
    return [
        f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        f"{core_count()} cores ({_processor()}), {platform.system()} {platform.machine()}",
        f"load average at the start {one:.2f} (1 min), {five:.2f} (5 min)",
        ", ".join(versions),
    ]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"
