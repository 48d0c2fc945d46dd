"""Serve the store through which ranks find each other, and connect to it.

Covers: listening on one address only, a server that dies meanwhile, code that names an address for its own store or
a backend that can't work.
Does not cover: what ranks do with it (``group``).
"""

from __future__ import annotations

import errno
import os
import socket
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import TCPStore

from .errors import RendezvousError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ...protocol.ranks import RankInfo

AGENT_SERVES = "TORCHELASTIC_USE_AGENT_STORE"
CONNECT_TIME = timedelta(seconds=2)  # timeout of one attempt to reach the store


def serve_store(address: str, port: int, world_size: int, timeout: timedelta) -> Any:
    """Return a new store that this process serves; port 0 lets the kernel choose one.

    The socket is made here because the store by itself would listen on every interface. Raises ``RendezvousError`` if
    it can't listen there.
    """
    try:
        family, *_, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(where[:2], family=family, backlog=2048)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        remedy = "leave the port out to use a free one" if taken else "choose another address with -a"
        what = f"port {port} is taken" if taken else f"cannot listen on {address}:{port} ({error.strerror})"
        raise RendezvousError(f"{what}; {remedy}") from error
    return TCPStore(
        address,
        listener.getsockname()[1],
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connect(address: str, port: int, world_size: int, timeout: timedelta, check: Callable[[], None]) -> Any:
    """Connect to the store of rank 0, which may have died meanwhile: torch would try until the timeout.

    ``check`` raises once the death is known.
    """
    until = time.monotonic() + timeout.total_seconds()
    while True:
        check()
        try:
            store: Any = TCPStore(address, port, world_size, is_master=False, timeout=CONNECT_TIME)
        except RuntimeError:
            if time.monotonic() > until:
                raise
        else:
            store.set_timeout(timeout)
            return store


@contextmanager
def serves_itself(init_method: str | None) -> Iterator[None]:
    """Have rank 0 serve the store at an address that code names; torchrun's variable would leave that to its agent."""
    served = os.environ.pop(AGENT_SERVES, None) if (init_method or "").startswith("tcp://") else None
    try:
        yield
    finally:
        if served is not None:
            os.environ[AGENT_SERVES] = served


def check_backend(backend: str | None, info: RankInfo, store: Any) -> None:
    """Refuse a backend that can't work before any rank waits for it; None lets torch choose.

    Raises ``RendezvousError`` if it needs GPUs and there are none, or if rank 0 has set another in ``store``.
    """
    wanted = (backend or "").lower()
    if "nccl" in wanted and not info.device.startswith("cuda"):
        raise RendezvousError(
            f"the backend {backend!r} needs a GPU, and rank {info.rank} on {info.host} has none; "
            "use init_process_group('gloo'), or leave the backend out"
        )
    if info.rank == 0:
        store.set("backend", wanted)
        return
    first = store.get("backend").decode()
    if first != wanted:
        raise RendezvousError(
            f"rank {info.rank} requests {_named(wanted)} and rank 0 {_named(first)}; use the same backend on all ranks"
        )


def _named(backend: str) -> str:
    return f"the backend {backend!r}" if backend else "the one that torch chooses"
