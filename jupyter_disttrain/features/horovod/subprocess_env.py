"""Prepare Horovod for programs that this rank starts.

Covers: their rendezvous server, their environment variables, as ``horovodrun --gloo`` would set them.
Does not cover: Horovod in this process (``world``), starting the programs (``features.scripts.subprocess_run``).

A rank's own Horovod uses MPI. A program that a rank starts is in no MPI job, so Horovod would silently run it as the
only process. With Gloo, the programs find each other through a small rendezvous server of Horovod.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from ...protocol.ranks import RankInfo


class HorovodRendezvous:
    """The rendezvous server for the programs of one run."""

    def __init__(self, address: str) -> None:
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer  # noqa: PLC0415

        self._server = RendezvousHTTPServer((address, 0), RendezvousHandler, verbose=0)
        self._server.init([])
        self.port = int(self._server.server_port)
        threading.Thread(target=self._server.serve_forever, name="horovod programs", daemon=True).start()

    def end(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()


@cache
def has_gloo() -> bool:
    """Whether Horovod is installed here and was built with Gloo."""
    spec = importlib.util.find_spec("horovod")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    libraries = sorted(folder.glob("torch/mpi_lib_v2*.so")) if folder is not None else []
    return bool(libraries) and bool(ctypes.CDLL(str(libraries[0])).horovod_gloo_built())


def horovod_environment(info: RankInfo, master: str, port: int, own: str) -> dict[str, str]:
    """Return a program's variables for Horovod; see ``create_slot_env_vars`` and ``create_run_env_vars`` of horovodrun.

    ``master`` and ``port`` are the server's; ``own``, this rank's address, determines the network interface to use.
    """
    return {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": master,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": _interface(own),
        "HOROVOD_HOSTNAME": info.host,
        "HOROVOD_RANK": str(info.rank),
        "HOROVOD_SIZE": str(info.world_size),
        "HOROVOD_LOCAL_RANK": str(info.local_rank),
        "HOROVOD_LOCAL_SIZE": str(info.local_world_size),
        "HOROVOD_CROSS_RANK": str(info.node_rank),
        "HOROVOD_CROSS_SIZE": str(info.node_count),
    }


def _interface(address: str) -> str:
    found: dict[str, Any] = psutil.net_if_addrs()
    return next((name for name, each in found.items() if any(it.address == address for it in each)), "lo")
