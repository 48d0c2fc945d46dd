"""Run ``%dist_run`` on this rank.

Covers: choosing how a script runs: in this process, in a separate one, once per node.
Does not cover: running it (``in_process``, ``subprocess_run``), the client's side (``features.scripts.client``).
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from ...config.frameworks import framework_environment
from ...rank.libraries.reserved_ports import ReservedPort
from ..horovod.subprocess_env import HorovodRendezvous, has_gloo, horovod_environment
from .in_process import fill_in, run_script
from .subprocess_run import Programs, command_of, of_node, of_rank

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...config.cluster import Roles
    from ...protocol.ranks import RankInfo
    from ...rank.process_group.group import Group
    from ..horovod.world import HorovodWorld


class Scripts:
    """Runs scripts; called by cells."""

    def __init__(self) -> None:
        self.programs = Programs()
        self._identity: dict[str, str] = {}
        self._info: RankInfo | None = None
        self._group: Group | None = None
        self._horovod: HorovodWorld | None = None
        self._roles: Roles = ()
        self._place: ReservedPort | None = None  # held for the last program, which binds a port
        self._node_port: ReservedPort | None = None  # held for the last programs of nodes
        self._horovod_rendezvous: HorovodRendezvous | None = None
        self._stores: list[Any] = []  # the store of the last program

    def enter(self, info: RankInfo, identity: dict[str, str], group: Group | None, horovod: HorovodWorld) -> None:
        """Set this rank's identity."""
        self._info, self._group, self._horovod = info, group, horovod
        self._identity = identity

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

    def open_horovod(self) -> int:
        """Return the rendezvous port of programs that use Horovod; 0 without Horovod or its Gloo."""
        if self._horovod_rendezvous is not None:
            self._horovod_rendezvous.end()
        self._horovod_rendezvous = HorovodRendezvous(self.master) if has_gloo() else None
        return 0 if self._horovod_rendezvous is None else self._horovod_rendezvous.port

    def open_port(self, *, served: bool) -> int:
        """Return a rendezvous port for programs; ``served``: at a store that this rank serves, as torchrun's agent."""
        if self._group is None or not served:
            self._node_port = ReservedPort(self.master)
            return self._node_port.port
        self._stores[:] = [self._group.make_store(self.master)]
        return int(self._stores[0].port)

    def run(
        self,
        target: str,
        arguments: Sequence[str],
        *,
        is_module: bool,
        folder: str,
        how: str,
        run_id: str,
        rendezvous: Mapping[str, Any],
        nodes: int,
    ) -> None:
        """Run a script; see :func:`features.scripts.in_process.run_script`, and ``client.Scripts.run`` for ``how``.

        ``run_id`` is unique in the session. ``rendezvous`` has the ``"port"``; if all ranks run a program, also the
        ``"places"`` of other frameworks' servers, and the port ``"horovod"``. ``nodes`` is how many run a program.
        """
        assert self._info is not None
        identity = self._identity | {"TORCHELASTIC_RUN_ID": run_id}
        if how == "here":
            filled_in = fill_in(arguments, identity)
            self._run_here(target, filled_in, is_module=is_module, folder=folder, environment=identity)
            return
        port = rendezvous.get("port", 0)
        if rendezvous.get("places"):
            identity |= framework_environment(self._info.rank, rendezvous["places"], self._roles)
            if rendezvous["horovod"] and self._place is not None:
                master, address = self.master, self._place.address
                identity |= horovod_environment(self._info, master, rendezvous["horovod"], address)
        environment = of_rank(identity, port) if how == "fresh" else of_node(nodes, port)
        own = {name: environment[name] for name in (*identity, "NNODES", "MASTER_PORT") if name in environment}
        command = command_of(target, fill_in(arguments, own), is_module=is_module)
        sys.stdout.flush()
        generation = 0 if self._group is None else self._group.generation
        self.programs.run(command, target, environment, folder, generation)

    def _run_here(self, target: str, arguments: Sequence[str], **options: Any) -> None:
        assert self._horovod is not None
        with nullcontext() if self._group is None else self._group.hidden(), self._horovod.hidden():
            run_script(target, arguments, **options)
