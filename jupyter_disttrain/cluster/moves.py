"""Where the ranks of a host are started anew.

Covers: their own host, a spare if that is lost, what a person can do where there is none.
Does not cover: noticing that a host is lost (``reach``), starting processes (``processes``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import LaunchError
from ..ranks import format_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..config import ClusterConfig
    from .rank_table import RankEntry
    from .reach import Reach


class Moves:
    """The hosts that were lost, and the spares in their place."""

    def __init__(self, config: ClusterConfig, reach: Reach) -> None:
        self._config = config
        self._reach = reach
        self._moved: dict[str, str] = {}

    def host_for(self, host: str, table: Sequence[RankEntry]) -> str:
        """Return where the ranks of a host are started anew; empty for the notebook's own.

        Raises
        ------
        LaunchError
            If it is lost and there is no spare, or if one MPI job was lost with it.
        """
        if self._config.launcher == "mpi" and self._reach.lost_hosts:
            raise LaunchError(self._lost_with_mpi(table))
        if not self._reach.is_lost(host):
            return host
        used = {entry.launch_host for entry in table} | set(self._moved.values())
        spare = self._moved.get(host) or next((spare for spare in self._config.spares if spare not in used), None)
        if spare is None:
            ranks = format_ranks(entry.info.rank for entry in table if entry.launch_host == host)
            other = "no spare is left" if self._config.spares else "a cluster with --spare HOST has one for such ranks"
            if self._config.launcher == "slurm":
                other = "%dist_shutdown and %dist_init ask Slurm for other nodes"
            raise LaunchError(
                f"{host} is lost; once it is there again %dist_reset -r {ranks} starts its ranks there, and {other}"
            )
        self._moved[host] = spare
        return spare

    def _lost_with_mpi(self, table: Sequence[RankEntry]) -> str:
        lost = self._reach.lost_hosts
        counts: dict[str, int] = {}
        for entry in table:
            if entry.launch_host not in lost:
                counts[entry.launch_host] = counts.get(entry.launch_host, 0) + 1
        left = ",".join(f"{name}:{count}" for name, count in counts.items())
        without = f"--hosts {left}" if left else "on other hosts"
        return (
            f"one MPI job over hosts does not outlive the loss of {', '.join(lost)}; %dist_shutdown, then %dist_init "
            f"{without}, or with --launcher ssh --spare HOST, which does"
        )
