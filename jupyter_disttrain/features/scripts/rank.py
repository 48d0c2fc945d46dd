"""Run ``%dist_run`` on this rank.

Covers: in which process a script runs: one of its own, one of the node, the rank's own; its environment.
Does not cover: running it (``runner``, ``in_session``), the client's side (``features.scripts.client``).
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from ...config.frameworks import framework_environment
from ...protocol.environment import NO_WARM, SAMPLE_SECONDS
from ...rank.libraries.reserved_ports import ReservedPort
from ...rank.warm.start_label import is_read_before_fork
from .failure_report import how_shown
from .find_code import fill_in
from .in_session import run_in_session
from .mpi_connection import MpiConnection
from .runner import Programs, of_node, of_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ...config.cluster import Roles
    from ...protocol.ranks import RankInfo
    from ...rank.nanny.ipc import RankEnd
    from ...rank.process_group.group import Group


class Scripts:
    """Runs scripts; called by cells. ``cell`` returns the kernel's record of the running cell."""

    def __init__(self, rank_end: RankEnd, shell: Any, cell: Callable[[], dict[str, Any] | None]) -> None:
        self.programs = Programs(rank_end)
        self._shell, self._cell = shell, cell
        self._identity: dict[str, str] = {}
        self._info: RankInfo | None = None
        self._group: Group | None = None
        self._roles: Roles = ()
        self._place: ReservedPort | None = None  # held for the last program, which binds a port
        self._node_port: ReservedPort | None = None  # held for the last programs of nodes
        self._mpi: MpiConnection | None = None  # for the next program, if it uses MPI
        self._store: Any = None  # of the last program
        self._explained: set[str] = set()  # scripts of which was reported why they are not forked

    def enter(self, info: RankInfo, identity: dict[str, str], group: Group | None) -> None:
        """Set this rank's identity."""
        self._info, self._identity, self._group = info, identity, group

    def know(self, address: str, places: Sequence[str], roles: Roles) -> None:
        """Set rank 0's address, and the variables of other frameworks: see ``config.frameworks``."""
        assert self._info is not None
        self._roles = roles
        variables = framework_environment(self._info.rank, places, roles) | {"MASTER_ADDR": address}
        os.environ.update(variables)
        self._identity |= variables

    @property
    def master(self) -> str:
        """The address of rank 0's host, as set by the client; cells may change the variable, or delete it."""
        return self._identity["MASTER_ADDR"]

    def open_place(self) -> str:
        """Return the address for servers of other frameworks in the next program of this rank."""
        self._place = ReservedPort(self.master)
        return self._place.name

    def open_mpi(self) -> str:
        """Return the name of the socket for the process that mpiexec will start for this rank."""
        if self._mpi is not None:
            self._mpi.close()
        self._mpi = MpiConnection()
        return self._mpi.name

    def open_port(self, *, served: bool) -> int:
        """Return a rendezvous port for programs; ``served``: at a store that this rank serves, as torchrun's agent."""
        if self._group is None or not served:
            self._node_port = ReservedPort(self.master)
            return self._node_port.port
        self._store = self._group.make_store(self.master)
        return int(self._store.port)

    def run(
        self,
        target: str,
        arguments: Sequence[str],
        *,
        is_module: bool,
        folder: str,
        how: str,
        variables: Sequence[tuple[str, str | None, bool]],
        run_id: str,
        rendezvous: Mapping[str, Any],
    ) -> None:
        """Run a script; see ``client.Scripts.run`` for ``how``, ``start_method.Sources`` for ``variables``.

        ``run_id`` is unique in the session. ``rendezvous`` has the ``"port"``; if all ranks run a program, also the
        ``"places"`` of other frameworks' servers; with one program per node the number of ``"nodes"``.
        """
        assert self._info is not None
        identity = self._identity | {"TORCHELASTIC_RUN_ID": run_id}
        if how == "session":
            filled_in = fill_in(arguments, identity)
            run_in_session(target, filled_in, self._shell.user_ns, is_module=is_module, folder=folder)
            return
        port = rendezvous.get("port", 0)
        if rendezvous.get("places"):
            identity |= framework_environment(self._info.rank, rendezvous["places"], self._roles)
        environment = of_node(rendezvous["nodes"], port) if how == "node" else of_rank(identity, port)
        mpi, self._mpi = (self._mpi, None) if how == "mpi" else (None, None)
        if not environment.get(NO_WARM) and (too_late := _set_too_late(variables, environment)):
            environment[NO_WARM] = "1"
            self._explain(target, too_late)
        own = {name: environment[name] for name in (*identity, "NNODES", "MASTER_PORT") if name in environment}
        sys.stdout.flush()
        content = {
            "target": target,
            "arguments": fill_in(arguments, own),
            "is_module": is_module,
            "run_id": run_id,
            "has_mpi": how != "fresh" or self._info.world_size == 1,
            "cell": self._cell(),
            "world_size": self._info.world_size,
            "samples": bool(os.environ.get(SAMPLE_SECONDS)),
            "shown": how_shown(self._shell),
        }
        self.programs.run(content, environment, folder, mpi)

    def _explain(self, target: str, variables: Mapping[str, bool]) -> None:
        """Report, once for each script, why it starts slowly."""
        if target in self._explained:
            return
        self._explained.add(target)
        them = "it" if len(variables) == 1 else "them"
        faster = f"; with %env before %dist_init to set {them}, it starts faster" if all(variables.values()) else ""
        why = f"because it sets {' and '.join(variables)}, which a new Python reads when it imports torch or numpy"
        sys.stderr.write(f"{target} starts in a new Python, {why}{faster}\n")


def _set_too_late(variables: Sequence[tuple[str, str | None, bool]], environment: Mapping[str, str]) -> dict[str, bool]:
    """Return the variables that a script changes before it imports torch, and that have no effect after the import.

    Each with whether its value is known.
    """
    found: dict[str, bool] = {}
    for name, value, is_default in variables:
        is_kept = name in environment if is_default else value == environment.get(name, "")
        if not is_kept and is_read_before_fork(name, environment):
            found[name] = value is not None
    return found
