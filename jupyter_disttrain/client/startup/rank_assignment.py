"""Identify ranks and form their process group.

Covers: assigning ranks to the processes that registered, the identity and settings that each rank receives, the store,
the group, waiting for the ranks' replies.
Does not cover: starting their processes (``launch``), when a group is formed again (``client.recovery.state_machine``).
"""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ...errors import LaunchError
from ...launchers.rank_environment import library_defaults, session_environment
from ...protocol.requests import Form, Identify, OpenStore
from ...protocol.states import RankState
from .gpus import choose_backend, note_of_devices, usable_gpus
from .rank_table import RankEntry, decide, node_of
from .registration import check_reply, too_late

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

    from ...protocol.messages import NannyHello, RankHello
    from ...protocol.ranks import RankInfo
    from ..transport.link import Message
    from .cluster_state import ClusterState
    from .registration import Registration


class RankAssignment:
    """Turns the registered processes of a cluster into ranks."""

    def __init__(self, state: ClusterState, registration: Registration) -> None:
        self._state = state
        self._registration = registration

    def assign(self, hellos: Sequence[RankHello]) -> list[tuple[RankInfo, RankHello]]:
        """Assign a rank and a device to each process; choose the backend."""
        state = self._state
        hosts = [host.name for host in state.placement.hosts]
        placed = [self._placed(hello) for hello in hellos]
        shown = state.placement.gpus if hosts else dict.fromkeys(map(node_of, placed), len(state.gpus))
        state.note_of_devices = note_of_devices(state.config, placed, shown)
        gpus = usable_gpus(state.config, placed, shown)
        return decide(placed, choose_backend(state.config, placed, gpus), gpus, hosts)

    def _placed(self, hello: RankHello) -> RankHello:
        """Add the host that mpiexec started this rank on: two hosts may report the same host name."""
        if hello.launch_host or hello.launch_rank is None:
            return hello
        return replace(hello, launch_host=self._state.placement.host_of(hello.launch_rank))

    def introduce(self, ranks: Sequence[tuple[RankInfo, RankHello]], nannies: Mapping[str, NannyHello]) -> None:
        """Send each rank its identity, and have all ranks form the process group."""
        state = self._state
        state.table[:] = [RankEntry.of(info, hello, nannies[hello.engine]) for info, hello in ranks]
        for info, hello in ranks:
            if hello.cold_reason:
                state.cold_reasons.setdefault(hello.cold_reason, []).append(info.rank)
        asked = [(entry, self.identify(entry)) for entry in state.table]
        for entry, content in zip(state.table, self.wait_for_replies(asked, "answer"), strict=True):
            entry.take_identity_reply(content)
        self.form()

    def identify(self, entry: RankEntry) -> Future[Message]:
        """Send a rank its identity and settings."""
        state = self._state
        request = Identify(
            info=asdict(entry.info),
            environment=session_environment(entry.info, state.folders.cluster_id),
            defaults=library_defaults(entry.info),
            log_path=str(state.folders.rank_log(entry.info.rank)),
            address=state.address,
            timeout_s=state.config.timeout_s,
            shelf=state.folders.shelf_name,
            shelf_token=state.folders.shelf_token,
            uses_tensorflow=bool(state.config.tf_roles),
        )
        return state.open_link.request(entry.engine, request)

    def form(self) -> dict[str, list[int]]:
        """Have all ranks form a process group, over a store that rank 0 opens on a new port.

        Returns what could not be created again of earlier groups: a line of text for each part, with the ranks that
        lost it. Raises a LaunchError if a rank does not join.
        """
        state = self._state
        state.generation += 1
        if not state.config.address and state.placement.hosts:  # rank 0 may have moved to another host
            state.address = state.placement.addresses[state.table[0].launch_host]
        wanted_port = state.config.port if state.generation == 1 else 0
        store = OpenStore(address=state.address, port=wanted_port, generation=state.generation)
        opened = state.open_link.request(state.table[0].engine, store)
        request = Form(
            address=state.address,
            port=self.wait_for_replies([(state.table[0], opened)], "open the store")[0]["port"],
            generation=state.generation,
            mpi_lost=state.mpi_lost,
            mpi_revoked=state.mpi_revoked,
            places=[entry.place for entry in state.table],
            tf_roles=state.config.tf_roles,
        )
        asked = [(entry, state.open_link.request(entry.engine, request)) for entry in state.table]
        for entry, future in asked:
            entry.forming = future
        lost: dict[str, list[int]] = {}
        reports: dict[int, Message] = {}
        group = "none" if state.config.backend == "none" else f"session/{state.generation}"
        for entry, content in zip(state.table, self.wait_for_replies(asked, "join its process group"), strict=True):
            for line in content["lost"]:
                lost.setdefault(line, []).append(entry.info.rank)
            state.mpi_lost = state.mpi_lost or content["mpi_lost"]
            entry.group = group
            reports[entry.info.rank] = content
        state.mpi_revoked = False
        state.steps.formed(reports, group)
        if state.mpi_lost != request.mpi_lost:  # again, so that all ranks get `mpi_lost`
            for line, ranks in self.form().items():
                lost[line] = sorted({*lost.get(line, []), *ranks})
        return lost

    def wait_for_replies(
        self, asked: Sequence[tuple[RankEntry, Future[Message]]], what: str, *, is_new: bool = False
    ) -> list[dict[str, Any]]:
        """Wait for the ranks' replies and return their contents.

        Raises a LaunchError at the first rank that replies with an error, dies, or does not reply in time.
        """
        state = self._state
        deadline = time.monotonic() + state.config.start_timeout_s if state.is_started else state.start_deadline
        pause = 0.01 if state.is_started else 0.002
        pending = list(asked)
        while pending:
            wait([future for _, future in pending], pause, FIRST_COMPLETED)
            for entry, future in pending:
                check_reply(entry, future)
            pending = [(entry, future) for entry, future in pending if not future.done()]
            if not state.is_started or is_new:
                self._registration.check_deaths([entry for entry, _ in pending], others=not state.is_started)
            for entry, _ in pending:
                if entry.state == RankState.DEAD:
                    raise LaunchError(f"rank {entry.info.rank} died")
            if pending and time.monotonic() > deadline:
                entry = pending[0][0]
                raise too_late(entry, what, state.config.start_timeout_s, state.folders.rank_log(entry.info.rank))
        return [future.result()["content"] for _, future in asked]
