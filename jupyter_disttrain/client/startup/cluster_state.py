"""Hold the state of a cluster's processes, which the parts of a launch share.

Covers: what was decided before the start, the rank table, the link, MPI's state, why the cluster ended; the cluster
file's form of it.
Does not cover: what changes it (``launch``, ``rank_assignment``, ``client.recovery.replacement``), cells
(``client.cells.executor``).
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING

from ...errors import ClusterClosedError
from ...launchers.placement import Placement
from ...protocol.ranks import label_ranks
from ..recovery.collective_steps import Steps
from ..registry.cluster_file import VERSION, ClusterFile
from .rank_table import RankEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

    from ...config.cluster import ClusterConfig
    from ...launchers.folders import Folders
    from ..transport.link import Link
    from .processes import JobProcesses, Processes


@dataclass(slots=True, kw_only=True)
class ClusterState:
    """The state of one cluster's processes as the client knows it."""

    config: ClusterConfig
    start_deadline: float  # of ``time.monotonic``: the end of the time limit of the start

    # Decided before the start; unset until ``is_decided``.
    is_decided: bool = False
    folders: Folders = field(init=False)
    placement: Placement = field(init=False)
    gpus: list[str] = field(init=False)
    n: int = field(init=False)  # the number of ranks
    address: str = field(init=False)  # MASTER_ADDR
    started_s: float = field(init=False)  # seconds since the epoch

    # The running processes.
    processes: Processes | JobProcesses | None = None  # None before the start and after the end
    link: Link | None = None  # None before the start and after the end
    table: list[RankEntry] = field(default_factory=list)  # the same list throughout
    is_started: bool = False  # every rank has joined its process group, or runs already
    is_observer: bool = False  # another process has the lease
    came_up_s: float = 0.0  # seconds the ranks took to start; 0: another process started them
    note_of_devices: str = ""  # why ranks use the CPU although there is an accelerator
    cold_reasons: dict[str, list[int]] = field(default_factory=dict)  # why ranks were not forked from a warm process

    # The process group and MPI.
    generation: int = 0  # number of times the process group was formed
    steps: Steps = field(default_factory=Steps)
    mpi_heals: bool = False  # MPI can be repaired: after a death, or in a job after an interrupt
    mpi_lost: str = ""  # why MPI has no world of all ranks; empty if it has
    mpi_revoked: bool = False  # MPI's communicator was revoked; it is rebuilt with the process group

    # The end, and what the user is shown.
    closed_because: str = "was shut down"
    lost_because: str = ""  # why the ranks are unreachable, and what to do
    on_note: Callable[[str], None] = lambda _text: None  # receives notes for the user

    @classmethod
    def before_start(cls, config: ClusterConfig) -> Self:
        """Return the state of a cluster that is about to start."""
        return cls(config=config, start_deadline=time.monotonic() + config.start_timeout_s)

    @classmethod
    def from_file(cls, there: ClusterFile, config: ClusterConfig) -> Self:
        """Return the state of a running cluster, before this process connects to it."""
        self = cls.before_start(config)
        self.folders, self.placement, self.gpus = there.folders, Placement.load(there.placement), there.gpus
        self.n, self.address, self.started_s = len(there.table), there.address, there.started_s
        self.is_decided = True
        self.table = there.load_table()
        self.generation = there.generation
        self.mpi_heals, self.mpi_lost = there.mpi_heals, there.mpi_lost
        return self

    def to_file(self) -> ClusterFile:
        """Return the cluster file, with this process as the holder."""
        assert self.processes is not None
        kept = {each.name for each in fields(RankEntry) if each.metadata.get("kept")}
        return ClusterFile(
            version=VERSION,
            cluster_id=self.folders.cluster_id,
            host=socket.gethostname(),
            started_s=self.started_s,
            notebook=os.environ.get("JPY_SESSION_NAME", ""),
            holder_pid=os.getpid(),
            config=asdict(self.config),
            profile=str(self.folders.profile),
            run=str(self.folders.run),
            local=str(self.folders.local),
            address=self.address,
            placement=self.placement.as_dict(),
            gpus=self.gpus,
            generation=self.generation,
            mpi_heals=self.mpi_heals,
            mpi_lost=self.mpi_lost,
            table=[
                {name: getattr(entry, name) for name in kept} | {"info": asdict(entry.info)} for entry in self.table
            ],
            births=self.processes.births,
        )

    @property
    def notes_of_start(self) -> tuple[str, ...]:
        """Why ranks use the CPU although there is an accelerator, and why they started slowly, if they did."""
        cold = (cold_note(ranks, reason) for reason, ranks in self.cold_reasons.items())
        return tuple(filter(None, [self.note_of_devices, *cold]))

    @property
    def open_link(self) -> Link:
        """The sockets to the ranks; raises a ClusterClosedError if the cluster was shut down."""
        self.check_open()
        assert self.link is not None
        return self.link

    def check_open(self) -> None:
        """Raise a ClusterClosedError if the cluster was shut down or is no longer reachable."""
        if self.link is not None and self.lost_because:
            raise ClusterClosedError(self.lost_because)
        if self.link is None:
            raise self.closed_error()

    def closed_error(self, because: str = "") -> ClusterClosedError:
        """Return the error that states why the cluster has ended: the given reason, or the recorded one."""
        how = "" if self.config.job else "; start one with %dist_init"
        return ClusterClosedError(f"the cluster {self.config.name!r} {because or self.closed_because}{how}")


def cold_note(ranks: Sequence[int], reason: str) -> str:
    """Return the note that ranks were not forked from their node's warm process."""
    have = "has" if len(ranks) == 1 else "have"
    return f"{label_ranks(ranks)} {have} imported torch, which a warm process saves: {reason}"
