"""Identify ranks and form their process group.

Covers: the identity and settings that each rank receives, the store, the group, waiting for the ranks' replies.
Does not cover: starting their processes (``launch``), when a group is formed again (``client.recovery.state_machine``).
"""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, wait
from typing import TYPE_CHECKING, Any

from ...errors import LaunchError
from ...launchers.environment import library_defaults, session_environment
from ...protocol.requests import Form, Identify, OpenStore
from ...protocol.states import RankState
from .rank_table import RankEntry
from .registration import Arrivals, check_reply, too_late

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from ...config.cluster import ClusterConfig
    from ...launchers.folders import Folders
    from ...launchers.placement import Placement
    from ...protocol.messages import NannyHello, RankHello
    from ...protocol.ranks import RankInfo
    from ..recovery.collective_steps import Steps
    from ..transport.link import Link, Message


class Introduction:
    """The part of a launch that turns processes into ranks."""

    config: ClusterConfig
    folders: Folders
    placement: Placement
    table: list[RankEntry]
    address: str  # MASTER_ADDR
    generation: int  # number of times the process group was formed
    mpi_lost: str  # why MPI has no world of all ranks; empty if it has
    mpi_revoked: bool  # whether MPI's world was revoked and must be created again with the group
    steps: Steps
    _arrivals: Arrivals
    _started: bool
    _deadline: float

    @property
    def open_link(self) -> Link:
        """The sockets to the ranks."""
        raise NotImplementedError

    def _introduce(self, entries: list[tuple[RankInfo, RankHello, NannyHello]]) -> None:
        """Send each rank its identity, and have all ranks form the process group."""
        self.table = [
            RankEntry(
                info=info,
                engine=hello.engine,
                nanny=nanny.nanny,
                nanny_pid=hello.nanny_pid,
                probe=nanny.probe,
                launch_host=hello.launch_host or self.placement.host_of(info.rank),
            )
            for info, hello, nanny in entries
        ]
        told = [(entry, self._identify(entry)) for entry in self.table]
        for entry, content in zip(self.table, self._wait(told, "answer"), strict=True):
            entry.know(content)
        self.form()

    def _identify(self, entry: RankEntry) -> Future[Message]:
        request = Identify(
            info=entry.info.as_dict(),
            environment=session_environment(entry.info, self.folders.cluster_id),
            defaults=library_defaults(entry.info),
            log_path=str(self.folders.rank_log(entry.info.rank)),
            address=self.address,
            timeout_s=self.config.timeout_s,
            shelf=self.folders.shelf_name,
            shelf_token=self.folders.shelf_token,
            uses_tensorflow=bool(self.config.tf_roles),
        )
        return self.open_link.request(entry.engine, request)

    def form(self) -> dict[str, list[int]]:
        """Have all ranks form a process group, over a store that rank 0 opens on a new port.

        Returns
        -------
        dict of str to list of int
            What could not be created again of earlier groups: a line of text for each part, with the ranks that lost
            it.

        Raises
        ------
        LaunchError
            If a rank does not join.
        """
        self.generation += 1
        if not self.config.address and self.placement.hosts:  # rank 0 may have moved to another host
            self.address = self.placement.addresses[self.table[0].launch_host]
        wanted_port = self.config.port if self.generation == 1 else 0
        store = OpenStore(address=self.address, port=wanted_port, generation=self.generation)
        opened = self.open_link.request(self.table[0].engine, store)
        request = Form(
            address=self.address,
            port=self._wait([(self.table[0], opened)], "open the store")[0]["port"],
            generation=self.generation,
            mpi_lost=self.mpi_lost,
            mpi_revoked=self.mpi_revoked,
            places=[entry.place for entry in self.table],
            tf_roles=self.config.tf_roles,
        )
        asked = [(entry, self.open_link.request(entry.engine, request)) for entry in self.table]
        for entry, future in asked:
            entry.forming = future
        lost: dict[str, list[int]] = {}
        reports: dict[int, Message] = {}
        group = "none" if self.config.backend == "none" else f"session/{self.generation}"
        for entry, content in zip(self.table, self._wait(asked, "join its process group"), strict=True):
            for line in content["lost"]:
                lost.setdefault(line, []).append(entry.info.rank)
            self.mpi_lost = self.mpi_lost or content["mpi_lost"]
            entry.group = group
            reports[entry.info.rank] = content
        self.mpi_revoked = False
        self.steps.formed(reports, group)
        return self.form() if self.mpi_lost != request.mpi_lost else lost  # again, so that all ranks get `mpi_lost`

    def _wait(
        self, asked: Sequence[tuple[RankEntry, Future[Message]]], what: str, *, is_new: bool = False
    ) -> list[dict[str, Any]]:
        """Wait for the ranks' replies and return their contents.

        Raises
        ------
        LaunchError
            If a rank replies with an error, dies, or does not reply in time; the first failure is reported.
        """
        deadline = time.monotonic() + self.config.start_timeout_s if self._started else self._deadline
        pause = 0.01 if self._started else 0.002
        pending = list(asked)
        while pending:
            wait([future for _, future in pending], pause, FIRST_COMPLETED)
            for entry, future in pending:
                check_reply(entry, future)
            pending = [(entry, future) for entry, future in pending if not future.done()]
            if not self._started or is_new:
                self._arrivals.heed_deaths([entry for entry, _ in pending], others=not self._started)
            for entry, _ in pending:
                if entry.state == RankState.DEAD:
                    raise LaunchError(f"rank {entry.info.rank} died")
            if pending and time.monotonic() > deadline:
                entry = pending[0][0]
                raise too_late(entry, what, self.config.start_timeout_s, self.folders.rank_log(entry.info.rank))
        return [future.result()["content"] for _, future in asked]
