"""Inspect, interrupt or end a running cluster without holding it.

Covers: what its ranks do, interrupting them, ending it.
Does not cover: sending cells (``client.cluster``), which clusters there are (``cluster_file``).
"""

from __future__ import annotations

from concurrent.futures import wait
from typing import TYPE_CHECKING

from ...protocol.ranks import label_ranks
from ...protocol.requests import Interrupt, Release, Where
from ...protocol.time_limits import OBSERVER_ANSWER_SECONDS
from ..recovery.hang_explanation import waits_in_mpi
from ..startup.launch import Launch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .cluster_file import ClusterFile


def _join(there: ClusterFile) -> Launch:
    launch = Launch(there.load_config(), there)
    launch.dispatcher.open(None)
    launch.join(observer=True)
    return launch


def what_ranks_do(there: ClusterFile) -> str:
    """Return a text on what the ranks do at this moment."""
    launch = _join(there)
    try:
        asked = {entry.info.rank: launch.open_link.request(entry.engine, Where()) for entry in launch.table}
        wait(asked.values(), OBSERVER_ANSWER_SECONDS)
        doing: dict[str, list[int]] = {}
        for rank, answer in asked.items():
            doing.setdefault(_text(answer.result()["content"]) if answer.done() else "no reply", []).append(rank)
    finally:
        launch.leave()
    if len(doing) == 1:
        return next(iter(doing))
    return "; ".join(f"{label_ranks(ranks)}: {text}" for text, ranks in doing.items())


def _text(content: dict[str, object]) -> str:
    cell = content.get("cell")
    return f"cell {cell['execution_count']} runs" if isinstance(cell, dict) else "idle"


def interrupt(launch: Launch, ranks: Sequence[int]) -> None:
    """Interrupt ranks of a cluster that no process holds, and release those that wait in a collective.

    The next client that attaches forms the process group again.
    """
    entries = [launch.table[rank] for rank in ranks]
    link = launch.open_link
    asked = [link.request(entry.engine, Where()) for entry in entries]
    wait(asked, OBSERVER_ANSWER_SECONDS)
    contents = [answer.result()["content"] if answer.done() else {} for answer in asked]
    for entry, content in zip(entries, contents, strict=True):
        cell = content.get("cell")
        if isinstance(cell, dict):
            link.request(entry.nanny, Interrupt(cell=cell["request"]))
    release = Release(generation=launch.state.generation, forced=False, mpi=waits_in_mpi(contents))
    wait([link.request(entry.engine, release) for entry in entries], OBSERVER_ANSWER_SECONDS)


def stop(there: ClusterFile) -> None:
    """End every process of a cluster and remove its folders, whichever process holds it."""
    launch = _join(there)
    launch.folders.stop_mark.touch()  # the holder sees ranks end, and must not replace them
    launch.stop()
