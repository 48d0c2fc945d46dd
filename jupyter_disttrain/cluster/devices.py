"""The GPUs of this machine and of hosts, seen without torch.

Covers: counting, CUDA_VISIBLE_DEVICES, which GPU each local rank gets, whether there are enough, what torch sees of
them on the ranks, the backend that follows.
Does not cover: their figures (``engine.devices``).
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..framework_variables import HOST_ID
from ..ranks import counted
from .rank_table import node_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..config import ClusterConfig
    from ..hosts import HostSlots
    from ..messages import RankHello


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
        If GPUs were asked for that are not there, or more ranks than GPUs without ``--share-gpus``, or with NCCL.
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
    if chosen and config.count is not None and config.count > len(chosen):
        check_shared_nccl(config)
    return chosen


def check_shared_nccl(config: ClusterConfig) -> None:
    """Refuse NCCL for several ranks on one GPU, unless the user sets NCCL_HOSTID.

    Raises
    ------
    UsageError
        If that was asked for.
    """
    is_set = HOST_ID in os.environ or any(each.partition("=")[0] == HOST_ID for each in config.forward)
    if config.backend == "nccl" and not is_set:
        raise UsageError(
            "NCCL takes one rank per GPU and host (it fails with 'Duplicate GPU detected'), so --backend nccl can't go "
            "with --share-gpus; leave --backend out, and ranks that share a GPU use Gloo, or ask for fewer ranks"
        )


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
    if any(gpus.get(host.name, 0) < (host.slots or 0) for host in hosts):
        check_shared_nccl(config)


def usable_gpus(config: ClusterConfig, hellos: Sequence[RankHello], shown: Mapping[str, int]) -> dict[str, int]:
    """Return how many GPUs of each host its ranks can use; 0 everywhere if they use the CPU.

    The driver counts all GPUs of a machine. torch sees none of them if it is a CPU build, and fewer where a container,
    a cgroup or MIG hides some.

    Parameters
    ----------
    hellos
        One of each rank.
    shown
        GPUs that the driver shows, by host.

    Raises
    ------
    UsageError
        If torch sees fewer GPUs than the ranks of a host need, or none on some hosts only.
    """
    needed = Counter(map(node_of, hellos))
    seen = {node: min(each.cuda_devices for each in hellos if node_of(each) == node) for node in needed}
    usable = {node: min(shown.get(node, 0), seen[node]) for node in needed}
    blind = [each for each in hellos if shown.get(node_of(each), 0) and not seen[node_of(each)]]
    if blind and (config.backend == "nccl" or any(usable.values())):
        others = " (torch on other hosts sees theirs)" if any(usable.values()) else ""
        raise UsageError(
            f"torch {blind[0].torch} on {blind[0].host} sees none of its {counted(shown[node_of(blind[0])], 'GPU')}: "
            f"{_why_blind(blind[0])}{others}; install a CUDA build of torch there, or start with --backend gloo on "
            "the CPU"
        )
    for node, count in needed.items():
        wanted = min(count, shown.get(node, 0))
        if 0 < usable[node] < wanted and not config.share_gpus:
            raise UsageError(
                f"the driver shows {counted(shown[node], 'GPU')} on {node}, and torch on a rank sees {usable[node]} (a "
                "container, a cgroup, MIG or one GPU per task of Slurm hides the others); ask for as many ranks as "
                "torch sees GPUs, add --share-gpus to put several ranks on one, or --backend gloo for the CPU"
            )
    return usable


def check_nccl(backend: str, hellos: Sequence[RankHello], count: int) -> None:
    """Refuse NCCL for the ranks of a job that see no GPU.

    Raises
    ------
    UsageError
        If ``count``, of the GPUs that each rank sees, is 0 and the backend NCCL.
    """
    if backend == "nccl" and not count:
        blind = next(each for each in hellos if not each.cuda_devices)
        raise UsageError(
            f"the backend nccl needs a GPU for each rank, and torch {blind.torch} on {blind.host} sees none: "
            f"{_why_blind(blind)}; start the job with --backend gloo, or with GPUs"
        )


def _why_blind(hello: RankHello) -> str:
    if hello.accelerator == "CPU":
        return "it is a CPU build"
    if not hello.accelerator.startswith("CUDA"):
        return f"it is built for {hello.accelerator}, which is not supported"
    return f"it is built for {hello.accelerator}, which this driver or container does not give it"


def note_of_devices(config: ClusterConfig, hellos: Sequence[RankHello], shown: Mapping[str, int]) -> str:
    """Return why ranks use the CPU although there is an accelerator; empty if they don't, or if that was asked for."""
    if config.backend in ("gloo", "none"):
        return ""
    blind = next((each for each in hellos if shown.get(node_of(each), 0) and not each.cuda_devices), None)
    if blind is not None:
        count = counted(shown[node_of(blind)], "GPU")
        return (
            f"ranks use the CPU: torch {blind.torch} sees none of the {count} of {blind.host}, because "
            f"{_why_blind(blind)}; install a CUDA build of torch to use them"
        )
    other = next((each for each in hellos if each.accelerator not in ("", "CPU") and not _is_cuda(each)), None)
    if other is not None:
        return f"ranks use the CPU: torch {other.torch} is built for {other.accelerator}, which is not supported yet"
    return ""


def _is_cuda(hello: RankHello) -> bool:
    return hello.accelerator.startswith("CUDA")


def choose_backend(config: ClusterConfig, hellos: Sequence[RankHello], gpus: Mapping[str, int]) -> str:
    """Return the backend: NCCL where each rank has a GPU of its own, unless another was asked for."""
    if config.backend != "auto":
        return config.backend
    ranks = Counter(map(node_of, hellos))
    return "nccl" if all(gpus.get(node, 0) >= count for node, count in ranks.items()) else "gloo"
