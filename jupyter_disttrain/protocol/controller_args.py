"""Build the command that starts a controller.

Covers: its arguments, for ranks of one machine, for ranks on other hosts, for a notebook on another host; its ports.
Does not cover: the controller itself (``client.transport.controller``), supervising its process.

A notebook starts it for its own ranks (``client.transport.controller_process``), and so does the first process of a job
whose ranks a notebook joins later (``features.batch_jobs.join``).
"""

from __future__ import annotations

import json
import random
import signal
import socket
import sys
from pathlib import Path

from .time_limits import HEARTBEAT_MS

LOWEST_PORT = 10_000  # ports below are those of services
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
USUAL_EPHEMERAL = (32768, 60999)
MISSED_BEATS = 20
RANK_ENDED = signal.SIGUSR1  # sent to a job's controller once rank 0 has ended, registered or not


def controller_arguments(
    *, sockets: str, listen: str = "", engine_ports: str = "", client_ports: str = "", **options: object
) -> list[str]:
    """Return the command: no more threads and processes than are used.

    ``sockets`` is the prefix of its Unix sockets' names, ``listen`` the one address at which it is reached by TCP,
    empty if it isn't. ``engine_ports`` and ``client_ports`` are the ports there, separated by commas; without ports for
    clients, these connect by Unix sockets. ``options`` are those of ``DisttrainController``; lists are of folders.
    """
    return [
        sys.executable,
        "-m",
        "jupyter_disttrain.client.transport.controller",
        # Unix sockets in a folder of the user's own: no port that others could take first, or listen to.
        "--transport=ipc",
        f"--ip={sockets}",
        "--ports=1-40",  # the suffixes of the sockets' names
        *(_over_tcp("engine", listen, engine_ports) if listen else ()),
        *(_over_tcp("client", listen, client_ports) if listen and client_ports else ()),
        *(("--IPController.enable_curve=True",) if listen else ()),
        "--log-level=ERROR",
        "--nodb",
        f"--HeartMonitor.period={HEARTBEAT_MS}",
        f"--HeartMonitor.max_heartmonitor_misses={MISSED_BEATS}",
        "--IPController.use_threads=True",
        "--TaskScheduler.scheme_name=none",
        *(f"--DisttrainController.{name}={_as_text(value)}" for name, value in options.items()),
    ]


def _as_text(value: object) -> object:
    return json.dumps([str(each) for each in value]) if isinstance(value, list) else value


def _over_tcp(who: str, listen: str, ports: str) -> list[str]:
    return [
        f"--IPController.{who}_transport=tcp",
        f"--IPController.{who}_ip={f'[{listen}]' if ':' in listen else listen}",
        f"--IPController.{who}_ports={ports}",
    ]


def choose_ports(address: str, count: int) -> list[int]:
    """Return free ports, if possible outside the range from which the system assigns ports.

    The controller binds them a moment later, while ``mpiexec`` and others start and request ports. Where the system's
    range covers nearly all ports, one may be taken meanwhile; then the controller exits with an error.

    Raises an OSError if there are too few.
    """
    try:
        first, last = map(int, EPHEMERAL.read_text().split())
    except OSError:
        first, last = USUAL_EPHEMERAL
    # Two clusters that start at the same moment would both find the first ones free.
    candidates = random.SystemRandom().sample(range(LOWEST_PORT, 2**16), 2**16 - LOWEST_PORT)
    chosen: list[int] = []
    for port in sorted(candidates, key=lambda port: first <= port <= last):
        if is_free(address, port):
            chosen.append(port)
        if len(chosen) == count:
            return chosen
    raise OSError(f"only {len(chosen)} of {count} ports are free on {address}")


def is_free(address: str, port: int) -> bool:
    """Whether no process listens there."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the controller's sockets do
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
