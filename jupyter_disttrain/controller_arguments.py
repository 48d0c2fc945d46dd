"""The command that starts a controller.

Covers: its arguments, for ranks of one machine, for ranks on other hosts, for a notebook on another host.
Does not cover: the controller itself (``cluster.controller``), looking after its process.

A notebook starts it for its own ranks (``cluster.controller_launcher``), and so does the first process of a job whose
ranks a notebook joins later (``engine.join``).
"""

from __future__ import annotations

import sys

HEARTBEAT_MS = 500  # a rank is known to ipyparallel's own clients only at a beat
MISSED_BEATS = 20


def controller_arguments(
    *, sockets: str, listen: str = "", engine_ports: str = "", client_ports: str = "", **options: object
) -> list[str]:
    """Return the command: no more threads and processes than are used.

    Parameters
    ----------
    sockets
        What the names of its Unix sockets begin with.
    listen
        The one address at which it is reached by TCP; empty: it isn't.
    engine_ports, client_ports
        The ports there, with commas; without ports for clients, these reach it by Unix sockets.
    **options
        Of ``DisttrainController``.
    """
    return [
        sys.executable,
        "-m",
        "jupyter_disttrain.cluster.controller",
        # Unix sockets in a folder of the user's own: no port that others could take first, or listen to.
        "--transport=ipc",
        f"--ip={sockets}",
        "--ports=1-40",  # the ends of their names
        *(_over_tcp("engine", listen, engine_ports) if listen else ()),
        *(_over_tcp("client", listen, client_ports) if listen and client_ports else ()),
        *(("--IPController.enable_curve=True",) if listen else ()),
        "--log-level=ERROR",
        "--nodb",
        f"--HeartMonitor.period={HEARTBEAT_MS}",
        f"--HeartMonitor.max_heartmonitor_misses={MISSED_BEATS}",
        "--IPController.use_threads=True",
        "--TaskScheduler.scheme_name=none",
        *(f"--DisttrainController.{name}={value}" for name, value in options.items()),
    ]


def _over_tcp(who: str, listen: str, ports: str) -> list[str]:
    return [
        f"--IPController.{who}_transport=tcp",
        f"--IPController.{who}_ip={listen}",
        f"--IPController.{who}_ports={ports}",
    ]
