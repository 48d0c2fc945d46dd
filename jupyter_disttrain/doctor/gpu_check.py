"""Check sessions on the GPUs of this machine (``jupyter disttrain gpu-check``).

Covers: the number of ranks, running the checks one after another, the table of results.
Does not cover: the checks (``gpu_check_cases``).

With one GPU several ranks share it over NCCL: NCCL_HOSTID makes each a host of its own, so that NCCL communicates
through sockets, as it does between hosts. ``--device cpu`` runs the checks that need no GPU on the CPU with Gloo: this
tests the checks, not the GPUs.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import TYPE_CHECKING, TextIO

from ..client.startup.gpus import visible_gpus
from ..config.frameworks import HOST_ID
from . import probe
from .gpu_bench import Bench
from .gpu_check_cases import CHECKS, NEED_GPU

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NO_GPU = 2  # exit status if there is nothing to check
# With these, ranks that share one GPU use NCCL.
ALONE = {HOST_ID: "rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def run(
    stream: TextIO, device: str = "cuda", ranks: int | None = None, only: Sequence[str] = (), *, long: bool = False
) -> int:
    """Run the checks and write a line for each; return the exit status: 1 if one failed, 2 without a GPU.

    ``device`` is ``"cuda"``, or ``"cpu"`` to try the checks themselves; ``ranks`` None: one per GPU, at most 8; four on
    one GPU; three on the CPU; ``only`` are names of checks, empty for all. ``long`` watches released ranks for ten
    minutes each, in which torch's watchdogs could end them.
    """
    unknown = [name for name in only if name not in CHECKS]
    why = f"there is no check {unknown[0]!r}; choose from {', '.join(CHECKS)}" if unknown else why_not(device)
    if why:
        stream.write(f"gpu-check: {why}\n")
        return NO_GPU
    if device != "cpu" and len(visible_gpus()) == 1:
        for variable, value in ALONE.items():
            os.environ.setdefault(variable, value)
    results: Counter[str] = Counter()
    bench = Bench(device, ranks, long=long)
    try:
        for name, check in CHECKS.items():
            if only and name not in only:
                continue
            began = time.monotonic()
            result, detail = _try(name, check, bench)
            results[result] += 1
            detail = " ".join(detail.split())
            stream.write(f"{name:<17} {result:<7} {time.monotonic() - began:5.0f} s  {detail}\n")
            stream.flush()
    finally:
        bench.close()
    stream.write(f"{results['ok']} ok, {results['failed']} failed, {results['skipped']} skipped, on {device}\n")
    return int(results["failed"] > 0)


def why_not(device: str) -> str:
    """Return why there is no GPU to check; empty if there is one."""
    if device == "cpu":
        return ""
    if not visible_gpus():
        return "no NVIDIA GPU is visible here, so there is nothing to check (see jupyter disttrain doctor)"
    try:
        build = probe.torch_build()
    except probe.ProbeError as failure:
        return str(failure)
    if build["gpus"] and build["nccl"]:
        return ""
    return f"this torch, built for {build['accelerator']}, sees no GPU, or has no NCCL; install a CUDA build of torch"


def _try(name: str, check: Callable[[Bench], str], bench: Bench) -> tuple[str, str]:
    """Return the result of a check and what it observed."""
    if name in NEED_GPU and not bench.has_gpu:
        return "skipped", "it needs a GPU"
    try:
        return "ok", check(bench)
    except Exception as error:  # noqa: BLE001  (any error is the result of the check)
        bench.close()  # the next check starts new ranks
        return "failed", f"{type(error).__name__}: {error}"
