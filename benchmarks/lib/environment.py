"""Describe the machine and the versions of packages.

Covers: the folders of this repository, the header of every results file.
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


def facts() -> list[str]:
    """Return what a reader must know to compare these figures with others."""
    one, five, _ = os.getloadavg()
    packages = ("jupyter_disttrain", "torch", "ipyparallel", "ipykernel", "mpi4py")
    return [
        f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        f"{len(os.sched_getaffinity(0))} cores ({_processor()}), {platform.system()} {platform.machine()}",
        f"load average at the start {one:.2f} (1 min), {five:.2f} (5 min)",
        ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in packages)]),
    ]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"
