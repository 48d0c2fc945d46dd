"""The session's process group on one rank.

Covers: the store, ``init_process_group``, the first collective that proves it.
Does not cover: releasing a stuck collective, bringing a lost rank back.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from ..ranks import RankInfo


class RendezvousError(RuntimeError):
    """The process group could not be made."""


class Group:
    """The default process group of this session."""

    def __init__(self, info: RankInfo, timeout_s: float) -> None:
        self.info = info
        self._timeout = timedelta(seconds=timeout_s)
        self._store: Any = None

    def open_store(self, address: str, port: int) -> int:
        """Open the store on rank 0 and return its port; port 0 lets the kernel choose, which leaves no race."""
        from torch.distributed import TCPStore  # noqa: PLC0415

        try:
            self._store = TCPStore(
                address, port, self.info.world_size, is_master=True, timeout=self._timeout, wait_for_workers=False
            )
        except (RuntimeError, OSError) as error:
            taken = "EADDRINUSE" in str(error) or "already in use" in str(error)
            remedy = "leave the port out, and a free one is chosen" if taken else "choose another address with -a"
            what = f"port {port} is taken" if taken else f"cannot listen on {address}:{port} ({error})"
            raise RendezvousError(f"{what}; {remedy}") from error
        return int(self._store.port)

    def join(self, address: str, port: int) -> None:
        """Make the process group and prove it by a first all_reduce."""
        import torch  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415

        info = self.info
        if self._store is None:
            self._store = dist.TCPStore(address, port, info.world_size, is_master=False, timeout=self._timeout)
        device = torch.device(info.device)
        dist.init_process_group(
            info.backend,
            store=dist.PrefixStore("disttrain/0", self._store),
            rank=info.rank,
            world_size=info.world_size,
            timeout=self._timeout,
            device_id=device if device.type == "cuda" else None,
        )
        total = torch.full((1,), float(info.rank), device=device)
        dist.all_reduce(total)
        expected = info.world_size * (info.world_size - 1) / 2
        if total.item() != expected:
            raise RendezvousError(
                f"the first all_reduce over {info.backend} gave {total.item()} instead of {expected}; two ranks share an identity"
            )

    def before_cell(self) -> None:
        """Let a cell that calls ``init_process_group`` by itself find unused keys in the store."""
        count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(count + 1)

    def after_cell(self) -> None:
        """Nothing yet is repaired here."""
