"""The GPUs of this machine and of hosts, seen without torch.

Covers: counting, CUDA_VISIBLE_DEVICES, which GPU each local rank gets, whether there are enough.
Does not cover: their figures (``engine.devices``).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..ranks import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..config import ClusterConfig
    from ..hosts import HostSlots


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the GPUs that CUDA would show, as CUDA_VISIBLE_DEVICES names them."""
    return shown_gpus(count_gpus(), environment.get("CUDA_VISIBLE_DEVICES"))


def shown_gpus(count: int, chosen: str | None) -> list[str]:
    """Return which of a machine's GPUs CUDA would show; ``chosen`` is CUDA_VISIBLE_DEVICES, None where it isn't set."""
    if chosen is None:
        return [str(index) for index in range(count)]
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    usable: list[str] = []
    for name in names:
        # CUDA stops at the first name that it does not know.
        if name == "-1" or (name.isdigit() and int(name) >= count) or not count:
            break
        usable.append(name)
    return usable


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs in this machine; 0 where none can be asked."""
    import pynvml  # noqa: PLC0415  (a machine without a driver pays only for the import)

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0  # no driver: no GPU
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()


def choose_gpus(config: ClusterConfig) -> list[str]:
    """Return the GPUs that the ranks of this machine share out; none means the CPU.

    Raises
    ------
    UsageError
        If GPUs were asked for that are not there, or more ranks than GPUs without ``--share-gpus``.
    """
    if config.backend in ("gloo", "none"):
        return []
    visible = visible_gpus()
    if config.backend == "nccl" and not visible:
        raise UsageError("the backend nccl needs an NVIDIA GPU, and none is visible here; use --backend gloo, or auto")
    chosen = visible
    if config.gpus is not None:
        outside = [gpu for gpu in config.gpus if gpu >= len(visible)]
        if outside:
            there = f"GPUs 0-{len(visible) - 1}" if visible else "no GPU"
            raise UsageError(
                f"there is no GPU {outside[0]}: this machine shows {there}; choose others with -g, or leave -g out"
            )
        chosen = [visible[gpu] for gpu in config.gpus]
    if chosen and config.count is not None and config.count > len(chosen) and not config.share_gpus:
        raise UsageError(
            f"{config.count} ranks need {config.count} GPUs, and {len(chosen)} can be used; "
            f"ask for -n {len(chosen)}, add --share-gpus to put several ranks on one, or --backend gloo for the CPU"
        )
    return chosen


def check_hosts(config: ClusterConfig, hosts: Sequence[HostSlots], gpus: Mapping[str, int]) -> None:
    """Refuse hosts with fewer GPUs than ranks, as this machine would be refused.

    Parameters
    ----------
    hosts
        With the number of their ranks.
    gpus
        Those that CUDA shows, by host; empty: the ranks use none.

    Raises
    ------
    UsageError
        If there are such hosts, and several ranks are not to share a GPU, or there is none to share.
    """
    if config.backend != "nccl" and not any(gpus.get(host.name) for host in hosts):
        return  # all of them use the CPU
    short = [
        f"{host.name} has {gpus.get(host.name) or 'none'} for {counted(host.slots or 0, 'rank')}"
        for host in hosts
        if gpus.get(host.name, 0) < (host.slots or 0) and not (config.share_gpus and gpus.get(host.name))
    ]
    if short:
        raise UsageError(
            f"each rank needs a GPU of its host, and {', '.join(short)}; name as many ranks as GPUs, e.g. --hosts "
            "node1:8,node2:4, add --share-gpus to put several ranks on one, or --backend gloo for the CPU"
        )
