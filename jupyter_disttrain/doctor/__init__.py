"""Check whether ranks can train on this machine (``jupyter disttrain doctor``).

Covers: the order of the checks.
Does not cover: the checks (``versions``, ``gpus``, ``machine``, ``ranks``), how findings are shown (``report``).

torch and mpi4py are checked in processes of their own: as in a notebook, this process never imports them.
"""

from __future__ import annotations

from . import gpus, machine, ranks, versions

CHECKS = {
    "versions": versions.find,
    "GPUs": gpus.find,
    "machine": machine.find,
    "ranks": ranks.find,  # last, as it takes longest
}
