"""Group the processes of a session by role and measure each group.

Covers: ranks, nannies, controller, notebook; memory, processor time, open files, threads.
Does not cover: running cells (control_plane).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks.lib import processes

if TYPE_CHECKING:
    from benchmarks.lib.session import Session
    from tests.lab import Lab

ROLES = ("ranks", "nannies", "controller", "others", "notebook")
PIDS = "import json; print(json.dumps([[e.info.host, e.info.pid, e.nanny_pid] for e in cluster.table]))"


def _pids_on_this_machine(lab: Lab) -> dict[tuple[str, int], int]:
    """Return the pids on this machine, by host of the lab and pid in its namespace."""
    pids = {}
    for host in lab.hosts:
        for process in lab.processes(host):
            status = Path(f"/proc/{process.pid}/status").read_text()
            pid_in_namespace = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1]
            pids[host, int(pid_in_namespace)] = process.pid
    return pids


@dataclass(slots=True)
class SessionProcesses:
    """The processes of one session by role."""

    by_role: dict[str, list[psutil.Process]]

    @classmethod
    def find(cls, session: Session, lab: Lab | None) -> SessionProcesses:
        """Find the processes of a session whose ranks run on this machine or on hosts of ``lab``."""
        entries = json.loads(session.local(PIDS).text)
        pids = _pids_on_this_machine(lab) if lab else {}
        ranks, nannies = ({pids.get((host, pair[at]), pair[at]) for host, *pair in entries} for at in (0, 1))
        by_role: dict[str, list[psutil.Process]] = {role: [] for role in ROLES}
        for process in {*processes.with_token(session.kernel.token), *map(psutil.Process, ranks | nannies)}:
            if process.pid in ranks:
                role = "ranks"
            elif process.pid in nannies:
                role = "nannies"
            elif process.pid == session.kernel.pid:
                role = "notebook"
            else:
                role = "controller" if "controller" in processes.name_of(process) else "others"
            by_role[role].append(process)
        return cls(by_role)

    def memory_mb(self) -> dict[str, float]:
        """Return the total PSS by role."""
        return {
            role: sum(processes.memory_of(process.pid).pss_mb for process in found)
            for role, found in self.by_role.items()
        }

    def cpu_s(self) -> dict[str, float]:
        """Return the processor time used so far by role."""
        return {role: processes.cpu_seconds(found) for role, found in self.by_role.items()}

    def open_files(self) -> int:
        """Return the open files of the controller's process that has most."""
        return max(process.num_fds() for process in self.by_role["controller"])

    def threads(self) -> int:
        """Return the threads of all ranks and nannies."""
        return sum(process.num_threads() for role in ("ranks", "nannies") for process in self.by_role[role])

    def running(self) -> int:
        """Return how many processes other than the notebook still run."""
        return sum(
            process.is_running() for role, found in self.by_role.items() if role != "notebook" for process in found
        )
