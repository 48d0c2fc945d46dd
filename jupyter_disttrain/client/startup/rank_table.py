"""Assign ranks to processes.

Covers: deciding ranks, local ranks and node ranks from the hellos of the processes; which ranks are free for a cell.
Does not cover: sending identities (``client.startup.launch``).

The launcher's own rank is used if every process has one and all differ, because MPI counts that way. Otherwise the
order is by host, then by process id. Nothing else is used: engine ids, LOCAL_RANK and SLURM_PROCID were each observed
to be wrong.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...errors import LaunchError, UsageError
from ...protocol.ranks import RankInfo, label_ranks
from ...protocol.states import RankState

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from concurrent.futures import Future

    from ...protocol.messages import NannyHello, RankHello
    from ..transport.link import Message


def _kept(**options: Any) -> Any:
    """Declare a field that the cluster file contains, for clients that join later."""
    return field(metadata={"kept": True}, **options)


@dataclass(slots=True)
class RankEntry:
    """One rank as the client knows it."""

    info: RankInfo
    engine: str = _kept()
    nanny: str = _kept()
    nanny_pid: int = _kept()
    nanny_started: str = _kept(default="")  # its start time: a later process may have the same pid
    probe: str = _kept(default="")  # the nanny's socket for checks that its host can be reached
    launch_host: str = _kept(default="")  # the launcher's name for its host; empty for the notebook's own host
    state: RankState = RankState.IDLE
    # The tag of its process group: see ``rank.process_group.group.Group.tag``.
    group: str = _kept(default="")
    sees_shelf: bool = _kept(default=False)  # it shares memory with the client
    place: str = _kept(default="")  # address of servers of other frameworks on it, as "address:port"
    troubles: tuple[str, ...] = ()  # errors in the user's IPython profile when its session began
    request: str = ""  # message id of that cell's request
    has_ended: bool = False  # its death was reported, and is passed on once it is known whether its job has ended
    nanny_missed: int = 0  # consecutive checks that did not find the nanny's process
    cell: int | None = None  # number of the running cell, or of the last one
    failure: str = ""  # the error that this cell ended with, or how the process ended
    forming: Future[Message] | None = None  # its reply once it has joined a process group, or can't
    pid_gone: threading.Event = field(default_factory=threading.Event)  # its process has ended

    @classmethod
    def of(cls, info: RankInfo, hello: RankHello, nanny: NannyHello, launch_host: str = "") -> RankEntry:
        """Return the entry of a process that has become a rank; ``launch_host``: where its hello names none."""
        return cls(
            info=info,
            engine=hello.engine,
            nanny=nanny.nanny,
            nanny_pid=hello.nanny_pid,
            nanny_started=hello.nanny_started,
            probe=nanny.probe,
            launch_host=hello.launch_host or launch_host,
        )

    def take_identity_reply(self, reply: Mapping[str, Any]) -> None:
        """Take the rank's reply to its identity."""
        self.sees_shelf, self.place = reply["sees_shelf"], reply["place"]
        self.troubles = tuple(reply["troubles"])


def check_idle(
    table: Sequence[RankEntry],
    ranks: Sequence[int],
    remedy: str = "%dist_reset starts the ranks again",
    last_resort: str = "%dist_reset",
) -> None:
    """Raise a UsageError with the remedy if ranks died, or run a cell that may never end."""
    dead = [rank for rank in ranks if table[rank].state == RankState.DEAD]
    if dead:
        raise UsageError(f"{label_ranks(dead)} died; {remedy}, or leave them out with -r")
    busy = [rank for rank in ranks if table[rank].state == RankState.RUNNING]
    if busy:
        numbers = sorted({table[rank].cell or 0 for rank in busy})
        cells = f"{'cell' if len(numbers) == 1 else 'cells'} {', '.join(map(str, numbers))}"
        verb = "runs" if len(busy) == 1 else "run"
        raise UsageError(
            f"{label_ranks(busy)} still {verb} {cells}; wait with %dist_wait, interrupt with %dist_interrupt, "
            f"use other ranks with -r, or {last_resort}"
        )


def ended(table: Sequence[RankEntry], running: Collection[int]) -> dict[int, str]:
    """Return the ranks that have ended the cell which others still run, each with its error, if any."""
    cells = {table[rank].cell for rank in running}
    return {entry.info.rank: entry.failure for entry in table if entry.state == RankState.IDLE and entry.cell in cells}


def with_unique_hosts(hellos: Sequence[RankHello]) -> list[RankHello]:
    """Append a number to the host name of a machine if an earlier machine has that name and the launcher gives none."""
    boots: dict[str, list[str]] = {}
    renamed = []
    for hello in hellos:
        known = boots.setdefault(node_of(hello), [])
        if hello.boot not in known:
            known.append(hello.boot)
        number = known.index(hello.boot) + 1
        renamed.append(replace(hello, launch_host=f"{node_of(hello)}({number})") if number > 1 else hello)
    return renamed


def decide(
    hellos: Sequence[RankHello], backend: str, gpus: int | Mapping[str, int], hosts: Sequence[str] = ()
) -> list[tuple[RankInfo, RankHello]]:
    """Assign an identity to each process, in the order of the ranks.

    ``gpus`` are GPUs per node, or by host; 0 means that ranks use the CPU. ``hosts`` are the launcher's names of the
    hosts, in the order of their ranks; empty: order by host name. Raises a LaunchError if the launcher gave two
    processes the same rank.
    """
    ordered = _order(hellos, list(hosts))
    nodes = list(dict.fromkeys(map(node_of, ordered)))
    members = {node: [hello for hello in ordered if node_of(hello) == node] for node in nodes}
    decided = []
    for rank, hello in enumerate(ordered):
        node = node_of(hello)
        local_rank = members[node].index(hello)
        count = gpus if isinstance(gpus, int) else gpus.get(node, 0)
        info = RankInfo(
            rank=rank,
            world_size=len(ordered),
            local_rank=local_rank,
            local_world_size=len(members[node]),
            node_rank=nodes.index(node),
            node_count=len(nodes),
            host=hello.host,
            pid=hello.pid,
            backend=backend,
            device=f"cuda:{local_rank % count}" if count else "cpu",
        )
        decided.append((info, hello))
    return decided


def node_of(hello: RankHello) -> str:
    """Return the key of a process's host: two hosts may report the same host name."""
    return hello.launch_host or hello.host


def _order(hellos: Sequence[RankHello], hosts: list[str]) -> list[RankHello]:
    launch_ranks = [hello.launch_rank for hello in hellos]
    if None in launch_ranks:
        place = {host: at for at, host in enumerate(hosts)}
        return sorted(hellos, key=lambda hello: (place.get(node_of(hello), len(place)), node_of(hello), hello.pid))
    if sorted(launch_ranks, key=lambda rank: -1 if rank is None else rank) != list(range(len(hellos))):
        raise LaunchError(
            f"mpiexec has numbered {len(hellos)} processes as ranks {launch_ranks}; mpi4py and mpiexec belong "
            "to different MPI installations (run: jupyter disttrain doctor)"
        )
    return sorted(hellos, key=lambda hello: hello.launch_rank or 0)
