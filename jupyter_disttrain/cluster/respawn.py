"""A new process within the MPI job, in the place of a dead one.

Covers: having the living ranks start it together, knowing early that they can't.
Does not cover: MPI itself (``engine.mpi_world``), processes beside the job (``processes``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import LaunchError
from ..messages import RANK_REQUEST

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from .link import Link, Message
    from .rank_table import RankEntry


class Respawn:
    """One attempt of all living ranks to start a process."""

    def __init__(self, link: Link, table: Sequence[RankEntry], command: Sequence[str], host: str) -> None:
        self._link = link
        self._starters = [entry for entry in table if entry.state != "dead"]
        self._asked: dict[int, Future[Message]] = {}  # by rank: how it went so far
        for entry in self._starters:
            request = {"do": "respawn", "command": list(command), "host": host}
            link.request(entry.engine, RANK_REQUEST, request, beside=True)

    def check(self) -> None:
        """Raise a LaunchError once the process can't come: who starts it has died, or MPI has failed there.

        MPI does not tell the others, which would wait for the one where it has failed.
        """
        alive = [entry for entry in self._starters if entry.state != "dead"]
        if not alive:
            raise LaunchError("the ranks that were to start a new process have died")
        for entry in alive:
            rank = entry.info.rank
            answer = self._asked.get(rank)
            if answer is not None and not answer.done():
                continue
            failure = "" if answer is None or answer.exception() is not None else answer.result()["content"]["failure"]
            if failure:
                raise LaunchError(f"MPI failed on rank {rank} while a new process was started: {failure}")
            self._asked[rank] = self._link.request(entry.engine, RANK_REQUEST, {"do": "mpi_failure"}, beside=True)
