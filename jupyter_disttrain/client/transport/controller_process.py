"""Start the controller as a process of this machine.

Covers: its ports, arguments and environment, how it ended.
Does not cover: the controller itself (``controller``).
"""

from __future__ import annotations

import os
from typing import Any

from ipyparallel.cluster.launcher import LocalControllerLauncher
from traitlets import Float, Int, Integer, List, Unicode

from ...config.cluster import CONTROLLER_PORTS
from ...errors import LaunchError
from ...launchers.local import OneProcess
from ...protocol.controller_args import choose_ports, controller_arguments, is_free

# Of Python's own variables, those that locate modules and their compiled files. Others change the behaviour of code:
# PYTHONOPTIMIZE removes assertions, on which ipyparallel relies, and warnings may be errors.
PYTHON_VARIABLES = (
    *("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONPLATLIBDIR"),
    *("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"),
)


def free_ports(address: str, first: int, last: int) -> list[int]:
    """Return the free ports of a range; raises a LaunchError if there are too few for a controller."""
    free = [port for port in range(first, last + 1) if is_free(address, port)]
    if len(free) < CONTROLLER_PORTS:
        raise LaunchError(
            f"the controller needs {CONTROLLER_PORTS} ports on {address}, and {len(free) or 'none'} of {first} to "
            f"{last} can be used; name more with --controller-ports, or end the processes that use them, e.g. another "
            "cluster"
        )
    return free


def any_ports(address: str) -> list[int]:
    """Return ports for a controller; raises a LaunchError if too few are free."""
    try:
        return choose_ports(address, CONTROLLER_PORTS)
    except OSError as error:
        raise LaunchError(
            f"there are no free ports for the controller: {error}; name some with --controller-ports"
        ) from error


class ControllerProcess(OneProcess, LocalControllerLauncher):
    """Start ``jupyter_disttrain.client.transport.controller``."""

    owner_pid = Integer(0)
    idle_timeout_s = Float(0.0)
    remove_dirs = List(Unicode())
    sockets = Unicode("")
    ports = List(Int())  # ports for ranks of other hosts; empty: any that are free
    listen = Unicode("")  # address on which ranks of other hosts reach the controller; empty: there are none

    def find_args(self) -> list[Any]:
        """Return the command."""
        ports = (self.ports or any_ports(self.listen)) if self.listen else []
        return list(
            controller_arguments(
                sockets=self.sockets,
                listen=self.listen,
                engine_ports=",".join(map(str, ports)),
                owner_pid=self.owner_pid,
                idle_timeout=self.idle_timeout_s,
                remove_dirs=self.remove_dirs,
            )
        )

    def get_env(self) -> dict[str, str]:
        """Return the environment; modules in the notebook's folder can't be imported with it."""
        left_out = [name for name in os.environ if name.startswith("PYTHON") and name not in PYTHON_VARIABLES]
        return {**super().get_env(), **dict.fromkeys(left_out, ""), "PYTHONSAFEPATH": "1"}  # "" counts as not set

    @property
    def fate(self) -> str:
        """How the controller ended, and its last line of output if it exited by itself; empty if unknown."""
        last = [line.strip() for line in self.get_output().splitlines() if line.strip()][-1:]
        text = self.exit_text
        return f"{text} ({last[0]})" if last and text.startswith("exited") else text
