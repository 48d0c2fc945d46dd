"""Check whether ranks can train on this machine (``jupyter disttrain doctor``).

Covers: the order of the checks, and a check that itself fails.
Does not cover: the checks (``versions``, ``gpus``, ``ranks``, ``machine``, ``jupyter``), how findings are shown
(``report``).

torch and mpi4py are checked in processes of their own: as in a notebook, this process never imports them.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from . import gpus, jupyter, machine, ranks, versions
from .finding import Finding, error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

CHECKS = {
    "versions": versions.find,
    "GPUs": gpus.find,
    "machine": machine.find,
    "Jupyter": jupyter.find,
    "ranks": ranks.find,  # last, as it takes longest
}


def examine(group: str, find: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield the findings of a check as they are made.

    A check that fails by itself becomes an error, so that one broken part of a machine never hides the others.
    """
    try:
        yield from find()
    except Exception as failure:  # noqa: BLE001  (any failure is a finding)
        place = traceback.extract_tb(failure.__traceback__)[-1]
        yield error(
            group,
            f"this check raised an error: {type(failure).__name__}: {failure} ({place.filename}:{place.lineno})",
            "report this line to the authors; the other checks are not affected",
        )
