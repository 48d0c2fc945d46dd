"""Set up the environment of a rank's process on another host.

Covers: the file with its environment, the name of its host, which of the host's interfaces is in the cluster's network,
variables that name interfaces which this host does not have.
Does not cover: what is in the file (``launchers.rank_environment``), the rank's identity (``rank.kernel.requests``).

On the notebook's own machine a process inherits its environment. On another host it starts with that host's: what it
needs of the notebook's is in a file that only the user can read, so that no value appears on a command line or crosses
the network unencrypted.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...errors import UsageError
from ...private_files import read_own, replace_private
from ...protocol.environment import ADDRESSES, HOST, NETWORK, PROFILE_DIR
from ...protocol.time_limits import JOIN_SECONDS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

# Torch, NCCL and Gloo choose their interface by these; "=" keeps NCCL from taking eth10 for eth1.
INTERFACE_VARIABLES = {"GLOO_SOCKET_IFNAME": "", "TP_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}


class Setup(NamedTuple):
    """The arguments of ``python -m jupyter_disttrain.rank``."""

    environment: str = ""  # a file; empty: only the inherited environment
    host: str = ""  # the launcher's name of it; empty: unknown
    ranks: int = 1  # number of processes to start

    # How the processes of a job become the ranks of a cluster: see ``features.batch_jobs.join``.
    join: str = ""  # a file; empty: a client has started this process
    join_timeout_s: float = JOIN_SECONDS  # timeout for the first process to write it
    interface: str = ""  # where the controller listens: an interface's name, or a network; empty: chosen
    backend: str = "auto"  # see ``config``
    name: str = ""  # name of the cluster; empty: that of the file


def read_arguments(arguments: Sequence[str]) -> Setup:
    """Parse the command line."""
    if not arguments:
        return Setup()  # most ranks start without arguments: leave out argparse
    import argparse  # noqa: PLC0415

    from ...config.cluster import BACKENDS, check_name  # noqa: PLC0415

    parser = argparse.ArgumentParser(prog="python -m jupyter_disttrain.rank", description="Start ranks on this host.")
    parser.set_defaults(**Setup()._asdict())
    parser.add_argument("--environment", metavar="FILE", help="the environment of ranks on other hosts")
    parser.add_argument("--host", help="the name by which this host is reached")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks to start here")
    of_jobs = parser.add_argument_group("in a job of mpirun, srun or torchrun, whose ranks a notebook joins")
    add = of_jobs.add_argument
    add("--join", metavar="FILE", help="for %%dist_attach FILE; a path that all hosts of the job share")
    add("--join-timeout", dest="join_timeout_s", type=float, metavar="S", help="until rank 0 has written it (120)")
    add("--interface", help="at which rank 0's host is reached: its name, or a network (default: chosen)")
    add("--backend", choices=BACKENDS, help="of the process group; none: ranks without torch")
    add("--name", help="of the cluster (default: that of FILE)")
    setup = Setup(**vars(parser.parse_args(arguments)))
    if setup.name:
        try:
            check_name(setup.name)  # in each process: else the others would wait for a rank 0 that has exited
        except UsageError as error:
            parser.error(f"argument --name: {error}")
    return setup


def enter(setup: Setup) -> None:
    """Load the environment that was written for this process, and choose its network interface.

    Raises SystemExit if the file can't be read, or this host is not in the cluster's network; the message names host
    and remedy.
    """
    if setup.environment:
        try:
            os.environ.update(json.loads(read_own(setup.environment)))
        except OSError as error:
            raise SystemExit(
                f"{socket.gethostname()} can't read {setup.environment}: {error.strerror}; ranks on other hosts need "
                "the notebook's folders at the same path: put JUPYTER_RUNTIME_DIR on a file system that all hosts share"
            ) from error
    if setup.host:
        os.environ[HOST] = setup.host
    network = os.environ.get(NETWORK)
    if network:
        name = interface_in(network, os.environ.get(ADDRESSES, "").split(","))
        for variable, sign in INTERFACE_VARIABLES.items():
            os.environ.setdefault(variable, sign + name)


def write_trouble(trouble: str) -> None:
    """Report in a file what keeps ranks from starting on this host, where the client can't be reached otherwise."""
    print(trouble, file=sys.stderr, flush=True)  # noqa: T201  (the launcher keeps it)
    path = Path(os.environ[PROFILE_DIR]) / f"trouble-{socket.gethostname()}-{os.getpid()}.txt"
    replace_private(path, trouble)  # the client checks often, and must not read half of it


def interface_in(network: str, chosen: Collection[str] = ()) -> str:
    """Return the name of this host's interface in a network; raises SystemExit if it has none there.

    ``chosen`` are addresses, one of which may be this host's: its interface is preferred over others that are in the
    network too.
    """
    import psutil  # noqa: PLC0415  (it would delay the start of ranks on one machine)

    wanted = ipaddress.ip_network(network)
    found = {
        address: name
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family in (socket.AF_INET, socket.AF_INET6)
        and ipaddress.ip_address(address := each.address.partition("%")[0]) in wanted
    }
    for address in [*chosen, *found]:
        if address in found:
            return found[address]
    raise SystemExit(
        f"{socket.gethostname()} has no address in {network}, the network of this cluster; choose one that all hosts "
        "are in with --interface"
    )


def wrong_interfaces() -> str:
    """Return a message about variables that name no interface of this host; empty if all are right."""
    import psutil  # noqa: PLC0415

    there = psutil.net_if_addrs()
    wrong = [f"{name}={value}" for name in INTERFACE_VARIABLES if (value := _missing(name, list(there)))]
    if not wrong:
        return ""
    found = ", ".join(
        f"{name} ({', '.join(each.address for each in addresses if each.family == socket.AF_INET) or 'no IPv4'})"
        for name, addresses in there.items()
    )
    names = " and ".join(wrong)
    verb = "names" if len(wrong) == 1 else "name"
    return f"{names} {verb} no network interface of {socket.gethostname()}, which has {found}; set or unset it before"


def _missing(variable: str, there: list[str]) -> str:
    """Return a variable's value if this host lacks the interfaces that it names; else an empty string."""
    value = os.environ.get(variable, "")
    if not value or value.startswith("^"):  # NCCL's sign for names to exclude
        return ""
    names = value.removeprefix("=").split(",")
    if variable == "NCCL_SOCKET_IFNAME" and not value.startswith("="):  # it takes prefixes, except after "="
        has_one = any(each.startswith(tuple(names)) for each in there)
    elif variable == "NCCL_SOCKET_IFNAME":
        has_one = any(name in there for name in names)
    else:
        has_one = all(name in there for name in names)  # Gloo listens on each of them
    return "" if has_one else value
