"""Where the ranks of a host are started anew.

Covers: their own host, a spare if that is lost, what a person can do where there is none.
Does not cover: noticing that a host is lost (``reach``), starting processes (``processes``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import HostLostError
from ..ranks import format_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..config import ClusterConfig
    from .rank_table import RankEntry
    from .reach import Reach

GO_ON = "the others go on, with -r"


class Moves:
    """The hosts that were lost, and the spares in their place."""

    def __init__(self, config: ClusterConfig, reach: Reach) -> None:
        self._config = config
        self._reach = reach
        self._moved: dict[str, str] = {}
        self._failed: set[str] = set()  # spares on which no process could be started

    def host_for(self, host: str, table: Sequence[RankEntry]) -> str:
        """Return where the ranks of a host are started anew; empty for the notebook's own.

        Raises
        ------
        HostLostError
            If it is lost and there is no spare, or if one MPI job was lost with it.
        """
        if self._config.launcher == "mpi" and self._reach.lost_hosts:
            raise HostLostError(self.why_lost(table))
        if not self._reach.is_lost(host):
            return host
        used = {entry.launch_host for entry in table} | set(self._moved.values()) | self._failed
        spare = self._moved.get(host) or next((spare for spare in self._config.spares if spare not in used), None)
        if spare is None:
            raise HostLostError(self.why_lost(table))
        self._moved[host] = spare
        return spare

    def give_up(self, host: str, spare: str) -> None:
        """Take the spare out: no process could be started on it in the place of those of ``host``."""
        self._failed.add(spare)
        self._moved.pop(host, None)

    def forget_failed(self) -> None:
        """Take each spare for one that can be used: a person says that hosts may be there again."""
        self._failed.clear()

    @property
    def _lost(self) -> list[str]:
        return [host for host in self._reach.lost_hosts if host not in self._moved]

    def lost_ranks(self, table: Sequence[RankEntry]) -> list[int]:
        """Return the dead ranks of hosts that no spare stands for; with one MPI job all that died are lost with it."""
        lost = self._lost
        of_all = self._config.launcher == "mpi" and bool(lost)
        return [entry.info.rank for entry in table if entry.state == "dead" and (of_all or entry.launch_host in lost)]

    def why_lost(self, table: Sequence[RankEntry]) -> str:
        """Return which hosts are lost that no spare stands for, and what a person can do; empty where there is none."""
        lost = self._lost
        if not lost or self._config.job:
            return ""
        if self._config.launcher == "mpi":
            return _lost_with_mpi(lost, table)
        ranks = format_ranks(entry.info.rank for entry in table if entry.launch_host in lost)
        are, they, their = ("is", "it is", "its") if len(lost) == 1 else ("are", "they are", "their")
        other = "no spare is left" if self._config.spares else "a cluster with --spare HOST has one for such ranks"
        if self._config.launcher == "slurm":
            other = "%dist_shutdown and %dist_init ask Slurm for other nodes"
        return (
            f"{', '.join(lost)} {are} lost; once {they} there again %dist_reset -r {ranks} starts {their} ranks there, "
            f"and {other}"
        )


def _lost_with_mpi(lost: Sequence[str], table: Sequence[RankEntry]) -> str:
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
