"""The session's process group on one rank.

Covers: the store, ``init_process_group``, the first collective that proves it, scripts that make a group of their own.
Does not cover: releasing a stuck collective, bringing a lost rank back.
"""

from __future__ import annotations

import errno
import functools
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..ranks import RankInfo


class RendezvousError(RuntimeError):
    """The process group could not be made."""


class Group:
    """The default process group of this session."""

    def __init__(self, info: RankInfo, timeout_s: float) -> None:
        self.info = info
        self._timeout = timedelta(seconds=timeout_s)
        self._store: Any = None
        self._ours: Any = None  # the group that the session made
        self._cell = 0
        self._inits = 0  # of the cell that runs
        self._init = self._wrap_init()

    def open_store(self, address: str, port: int) -> int:
        """Open the store on rank 0 and return its port; port 0 lets the kernel choose, which leaves no race.

        The socket is made here because the store by itself would listen on every interface.
        """
        from torch._C._distributed_c10d import TCPStore  # noqa: PLC0415

        try:
            family, *_, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(where[:2], family=family, backlog=2048)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            remedy = "leave the port out, and a free one is chosen" if taken else "choose another address with -a"
            what = f"port {port} is taken" if taken else f"cannot listen on {address}:{port} ({error.strerror})"
            raise RendezvousError(f"{what}; {remedy}") from error
        port = listener.getsockname()[1]
        self._store = TCPStore(
            address,
            port,
            self.info.world_size,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return port

    def join(self, address: str, port: int, generation: int) -> None:
        """Make the process group and prove it by a first all_reduce.

        ``generation`` counts the groups of this session; all ranks name the same.
        """
        import torch  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415
        from torch._C._distributed_c10d import PrefixStore, TCPStore  # noqa: PLC0415

        info = self.info
        if self._store is None:
            self._store = TCPStore(address, port, info.world_size, is_master=False, timeout=self._timeout)
        device = torch.device(info.device)
        self._init(
            info.backend,
            store=PrefixStore(f"disttrain/{generation}", self._store),
            rank=info.rank,
            world_size=info.world_size,
            timeout=self._timeout,
            device_id=device if device.type == "cuda" else None,
        )
        self._ours = dist.group.WORLD
        total = torch.full((1,), float(info.rank), device=device)
        dist.all_reduce(total)
        expected = info.world_size * (info.world_size - 1) / 2
        if total.item() != expected:
            raise RendezvousError(
                f"the first all_reduce over {info.backend} gave {total.item()} instead of {expected}: "
                "two ranks share an identity; %dist_reset starts them anew"
            )

    @property
    def alive(self) -> bool:
        """Whether there is a default process group: the session's, or one that a cell made."""
        import torch.distributed as dist  # noqa: PLC0415

        return bool(dist.is_initialized())

    def before_cell(self, cell: int) -> None:
        """Take the cell's number: it is the same on every rank, so it can name what the ranks do together."""
        self._cell, self._inits = cell, 0

    def _wrap_init(self) -> Callable[..., None]:
        """Let a script's own ``init_process_group`` work in a cell; returns torch's.

        The session's group gives way to the script's. Over ``env://`` the script meets in the session's store under
        keys that no earlier cell has used; under torchrun it would find a fresh store.
        """
        import torch.distributed as dist  # noqa: PLC0415
        from torch._C._distributed_c10d import PrefixStore  # noqa: PLC0415

        original: Callable[..., None] = dist.init_process_group

        @functools.wraps(original)
        def init_process_group(
            backend: str | None = None,
            init_method: str | None = None,
            timeout: timedelta | None = None,
            world_size: int = -1,
            rank: int = -1,
            store: Any = None,
            *rest: Any,
            **options: Any,
        ) -> None:
            self._give_way()
            if init_method in (None, "env://") and store is None:
                self._inits += 1
                store = PrefixStore(f"script/{self._cell}/{self._inits}", self._store)
                rank = self.info.rank if rank < 0 else rank
                world_size = self.info.world_size if world_size < 0 else world_size
                init_method = None
            original(backend, init_method, timeout, world_size, rank, store, *rest, **options)

        # Both are the names by which scripts and libraries reach it.
        dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
        return original

    def _give_way(self) -> None:
        """End the session's group, if it is still there."""
        import torch.distributed as dist  # noqa: PLC0415

        ours, self._ours = self._ours, None
        if ours is not None and dist.group.WORLD is ours:
            dist.destroy_process_group()
