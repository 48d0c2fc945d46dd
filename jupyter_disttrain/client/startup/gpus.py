"""Choose GPUs and the backend, without importing torch.

Covers: counting GPUs of this machine and of hosts, CUDA_VISIBLE_DEVICES, which GPU each local rank gets, whether there
are enough, how many torch sees on the ranks, the backend that follows.
Does not cover: GPU utilization and memory (``features.telemetry.rank.gpu_stats``).
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

from ...config.frameworks import HOST_ID
from ...errors import UsageError
from ...protocol.ranks import counted
from .rank_table import node_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...config.cluster import ClusterConfig
    from ...config.hosts import HostSlots
    from ...protocol.messages import RankHello


def visible_gpus() -> list[str]:
    """Return the GPUs that are visible to CUDA, named as in CUDA_VISIBLE_DEVICES."""
    return shown_gpus(count_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def shown_gpus(count: int, chosen: str | None) -> list[str]:
    """Return which of ``count`` GPUs are visible to CUDA; ``chosen`` is CUDA_VISIBLE_DEVICES, None if it isn't set."""
    if chosen is None:
        return [str(index) for index in range(count)]
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    usable: list[str] = []
    for name in names:
        # CUDA ignores the names from the first unknown one on.
        if name == "-1" or (name.isdigit() and int(name) >= count) or not count:
            break
        usable.append(name)
    return usable


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs in this machine; 0 without a driver."""
    import pynvml  # noqa: PLC0415  (a machine without a driver only has the cost of the import)

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0  # no driver: no GPU
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()


def choose_gpus(config: ClusterConfig) -> list[str]:
    """Return the GPUs for the ranks of this machine; an empty list means that they use the CPU.

    Raises a UsageError if the configuration names GPUs that don't exist, or has more ranks than GPUs without
    ``--share-gpus`` or with NCCL.
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
    if chosen and config.count is not None and config.count > len(chosen):
        if not config.share_gpus:
            raise UsageError(
                f"{config.count} ranks need {config.count} GPUs, and {len(chosen)} can be used; "
                f"use -n {len(chosen)}, add --share-gpus to put several ranks on one, or --backend gloo for the CPU"
            )
        _check_shared_nccl(config)
    return chosen


def _check_shared_nccl(config: ClusterConfig) -> None:
    """Refuse NCCL for several ranks on one GPU with a UsageError, unless NCCL_HOSTID is set here or forwarded."""
    is_set = HOST_ID in os.environ or any(each.partition("=")[0] == HOST_ID for each in config.forward)
    if config.backend == "nccl" and not is_set:
        raise UsageError(
            "NCCL supports one rank per GPU of a host (else: 'Duplicate GPU detected'), so --backend nccl can't be "
            "combined with --share-gpus; leave --backend out, so that ranks that share a GPU use Gloo, or start fewer "
            "ranks"
        )


def check_hosts(config: ClusterConfig, hosts: Sequence[HostSlots], gpus: Mapping[str, int]) -> None:
    """Refuse hosts with fewer GPUs than ranks with a UsageError, by the same rules as for this machine.

    ``hosts`` have the number of their ranks; ``gpus`` are the numbers of GPUs that are visible to CUDA, by host, and
    empty if the ranks use none.
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
        _check_shared_nccl(config)


def usable_gpus(config: ClusterConfig, hellos: Sequence[RankHello], shown: Mapping[str, int]) -> dict[str, int]:
    """Return how many GPUs the ranks of each host can use, by host; 0 everywhere if they use the CPU.

    The driver counts all GPUs of a machine (``shown``, by host). torch sees none of them if it is a CPU build, and
    fewer where a container, a cgroup or MIG hides some. Raises a UsageError if torch sees fewer GPUs than the ranks of
    a host need, or none on some hosts only.
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
                f"the driver reports {counted(shown[node], 'GPU')} on {node}, and torch on a rank sees {usable[node]} "
                "(a container, a cgroup, MIG or one GPU per task of Slurm hides the others); start as many ranks as "
                "torch sees GPUs, add --share-gpus to put several ranks on one, or --backend gloo for the CPU"
            )
    return usable


def devices_of_job(config: ClusterConfig, hellos: Sequence[RankHello]) -> tuple[str, int, str]:
    """Return the backend of a job's ranks, the number of GPUs that each rank can use, and a note for the user.

    The job's launcher may assign one GPU to each process, which then sees only that one. Raises a UsageError if the
    backend is NCCL, and a rank sees no GPU.
    """
    count = min(each.cuda_devices for each in hellos)
    ranks = max(Counter(map(node_of, hellos)).values())
    is_pinned = 0 < count < ranks and len({(node_of(each), each.visible_gpus) for each in hellos}) == len(hellos)
    backend = config.backend
    if backend == "auto":
        backend = "nccl" if is_pinned or count >= ranks else "gloo"
    if backend == "gloo":
        return backend, 0, note_of_devices(config, hellos, {})
    if backend == "nccl" and not count:
        blind = next(each for each in hellos if not each.cuda_devices)
        raise UsageError(
            f"the backend nccl needs a GPU for each rank, and torch {blind.torch} on {blind.host} sees none: "
            f"{_why_blind(blind)}; start the job with --backend gloo, or with GPUs"
        )
    if is_pinned:
        own = f"each rank of this job sees {counted(count, 'GPU')} of its own"
        return backend, count, f"{own}, so torch.cuda.set_device(LOCAL_RANK) fails: use the variable device"
    return backend, count, ""


def _why_blind(hello: RankHello) -> str:
    if hello.accelerator == "CPU":
        return "it is a CPU build"
    if not hello.accelerator.startswith("CUDA"):
        return f"it is built for {hello.accelerator}, which is not supported"
    return f"it is built for {hello.accelerator}, which this driver or container does not provide"


def note_of_devices(config: ClusterConfig, hellos: Sequence[RankHello], shown: Mapping[str, int]) -> str:
    """Return a note on why ranks use the CPU despite an accelerator; empty if they don't, or if configured so."""
    if config.backend in ("gloo", "none"):
        return ""
    blind = next((each for each in hellos if shown.get(node_of(each), 0) and not each.cuda_devices), None)
    if blind is not None:
        count = counted(shown[node_of(blind)], "GPU")
        return (
            f"ranks use the CPU: torch {blind.torch} sees none of the {count} of {blind.host}, because "
            f"{_why_blind(blind)}; install a CUDA build of torch to use them"
        )
    supported = ("", "CPU", "CUDA")
    other = next((each for each in hellos if each.accelerator.partition(" ")[0] not in supported), None)
    if other is not None:
        return f"ranks use the CPU: torch {other.torch} is built for {other.accelerator}, which is not supported yet"
    return ""


def choose_backend(config: ClusterConfig, hellos: Sequence[RankHello], gpus: Mapping[str, int]) -> str:
    """Return the configured backend; for ``auto`` NCCL if each rank has a GPU of its own, else Gloo."""
    if config.backend != "auto":
        return config.backend
    ranks = Counter(map(node_of, hellos))
    return "nccl" if all(gpus.get(node, 0) >= count for node, count in ranks.items()) else "gloo"
