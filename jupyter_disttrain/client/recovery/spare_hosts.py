"""Choose the host on which the ranks of a host start again.

Covers: their own host, a spare if that is lost, the user's options where there is none.
Does not cover: detecting that a host is lost (``heartbeat``), starting processes (``client.startup.processes``).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ...errors import HostLostError
from ...protocol.ranks import format_ranks
from ...protocol.states import RankState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...config.cluster import ClusterConfig
    from ..startup.rank_table import RankEntry
    from ..transport.link import Link
    from .host_heartbeats import HostHeartbeat

GO_ON = "the other ranks can be used with -r"


class SpareHosts:
    """Lost hosts and the spares in their place."""

    def __init__(self, config: ClusterConfig, table: Sequence[RankEntry], heartbeat: HostHeartbeat) -> None:
        self._config = config
        self._table = table
        self._heartbeat = heartbeat
        self._moved: dict[str, str] = {}
        self._failed: set[str] = set()  # spares on which no process could be started

    def host_for(self, host: str) -> str:
        """Return the host on which the ranks of a host start again; empty for the notebook's own.

        Raises
        ------
        HostLostError
            If the host is lost and there is no spare, or if an MPI job over hosts was lost with it.
        """
        lost = self._heartbeat.lost_hosts
        survives = self._config.launcher != "mpi" or not lost
        if survives and host not in lost:
            return host
        used = {entry.launch_host for entry in self._table} | set(self._moved.values()) | self._failed
        spare = self._moved.get(host) or next((spare for spare in self._config.spares if spare not in used), None)
        if spare is None or not survives:
            raise HostLostError(self.why_lost)
        self._moved[host] = spare
        return spare

    def give_up(self, host: str, spare: str) -> None:
        """Exclude a spare on which no replacement for the ranks of ``host`` could be started."""
        self._failed.add(spare)
        self._moved.pop(host, None)

    def try_all_again(self, link: Link) -> None:
        """Consider every host usable again: the user states that hosts may be back."""
        self._heartbeat.forget_lost(link)
        self._failed.clear()

    @property
    def _lost(self) -> list[str]:
        return [host for host in self._heartbeat.lost_hosts if host not in self._moved]

    @property
    def lost_ranks(self) -> list[int]:
        """The dead ranks of lost hosts without a spare; if an MPI job lost a host, all dead ranks."""
        lost = self._lost
        of_all = self._config.launcher == "mpi" and bool(lost)
        dead = [entry for entry in self._table if entry.state == RankState.DEAD]
        return [entry.info.rank for entry in dead if of_all or entry.launch_host in lost]

    @property
    def why_lost(self) -> str:
        """Which hosts are lost without a spare, and the user's options; empty if there are none."""
        lost = self._lost
        if not lost or self._config.job:
            return ""
        if self._config.launcher == "mpi":
            counts = Counter(entry.launch_host for entry in self._table if entry.launch_host not in lost)
            left = ",".join(f"{name}:{count}" for name, count in counts.items())
            return (
                f"an MPI job does not survive the loss of a host ({', '.join(lost)}); run %dist_shutdown, then "
                f"%dist_init {f'--hosts {left}' if left else 'on other hosts'}, or use --launcher ssh --spare HOST, "
                "which survives it"
            )
        ranks = format_ranks(entry.info.rank for entry in self._table if entry.launch_host in lost)
        are, they, their = ("is", "it is", "its") if len(lost) == 1 else ("are", "they are", "their")
        other = (
            "no spare is left" if self._config.spares else "--spare HOST at the start reserves a host for such ranks"
        )
        if self._config.launcher == "slurm":
            other = "%dist_shutdown and %dist_init request other nodes from Slurm"
        return (
            f"{', '.join(lost)} {are} lost; once {they} reachable again, %dist_reset -r {ranks} starts {their} ranks "
            f"there; {other}"
        )
