"""Check sessions on the GPUs of this machine (``jupyter disttrain gpu-check``).

Covers: the number of ranks, running the checks one after another, the table of results.
Does not cover: the checks (``gpu_check_cases``).

With one GPU several ranks share it over NCCL: NCCL_HOSTID makes each a host of its own, so that NCCL communicates
through sockets, as it does between hosts. ``--device cpu`` runs the checks that need no GPU on the CPU with Gloo: this
tests the checks, not the GPUs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import textwrap
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from ..client.startup.gpus import visible_gpus
from ..config.frameworks import HOST_ID
from . import probe
from .gpu_bench import Bench, NeedsGpuError
from .gpu_check_cases import CHECKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from jupyter_disttrain import Cluster

NO_GPU = 2  # exit status if there is nothing to check
ON_ONE_GPU = 4  # number of ranks
MOST = 8
LEAST_COLUMNS = 60
ALONE = {HOST_ID: "rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one check."""

    check: str
    result: str  # "ok", "failed", "skipped"
    seconds: float
    detail: str


def run(
    stream: TextIO, device: str = "cuda", ranks: int | None = None, only: Sequence[str] = (), *, long: bool = False
) -> int:
    """Run the checks and write a line for each; return the exit status: 1 if one failed, 2 without a GPU.

    Parameters
    ----------
    device
        ``"cuda"``, or ``"cpu"`` to try the checks themselves.
    ranks
        None: one per GPU, at most 8; four on one GPU; three on the CPU.
    only
        Names of checks; empty: all.
    long
        Watch released ranks for ten minutes each, in which torch's watchdogs could end them.
    """
    unknown = [name for name in only if name not in CHECKS]
    if unknown:
        stream.write(f"gpu-check: there is no check {unknown[0]!r}; choose from {', '.join(CHECKS)}\n")
        return NO_GPU
    if (why := why_not(device)) != "":
        stream.write(f"gpu-check: {why}\n")
        return NO_GPU
    with _environment(device):
        bench = Bench(device=device, starts=_starter(device, ranks), watch_s=_watch_s(device, long=long))
        outcomes = []
        try:
            for name, check in CHECKS.items():
                if only and name not in only:
                    continue
                outcomes.append(_try(name, check, bench))
                stream.write(_line(outcomes[-1]))
                stream.flush()
        finally:
            bench.close()
    failed = sum(outcome.result == "failed" for outcome in outcomes)
    skipped = sum(outcome.result == "skipped" for outcome in outcomes)
    stream.write(f"{len(outcomes) - failed - skipped} ok, {failed} failed, {skipped} skipped, on {device}\n")
    return int(failed > 0)


def why_not(device: str) -> str:
    """Return why there is no GPU to check; empty if there is one."""
    if device == "cpu":
        return ""
    if not visible_gpus():
        return "no NVIDIA GPU is visible here, so there is nothing to check (see jupyter disttrain doctor)"
    try:
        torch = probe.ask_torch()
    except probe.ProbeError as failure:
        return f"torch does not load: {failure}"
    if not torch["gpus"] or torch["nccl"] is None:
        return (
            f"this torch, built for {torch['accelerator']}, sees no GPU, or has no NCCL; install a CUDA build of torch"
        )
    return ""


@contextlib.contextmanager
def _environment(device: str) -> Iterator[None]:
    """Set the variables with which ranks share one GPU over NCCL, unless the user has set them."""
    is_alone = device != "cpu" and len(visible_gpus()) == 1
    added = {name: value for name, value in ALONE.items() if is_alone and name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _starter(device: str, ranks: int | None) -> Callable[..., Cluster]:
    """Return a function that starts the ranks; its arguments override the default options."""
    from jupyter_disttrain import Cluster  # noqa: PLC0415  (imports ipyparallel)

    if device == "cpu":
        options: dict[str, Any] = {"n": ranks or 3, "backend": "gloo"}
    else:
        gpus = len(visible_gpus())
        count = ranks or (ON_ONE_GPU if gpus == 1 else min(gpus, MOST))
        options = {"n": count, "backend": "nccl", "share_gpus": count > gpus}
    options |= {"launcher": "local", "grace_s": 2.0, "hang_after_s": 2.0, "sample_s": 0.5}

    def start(**more: Any) -> Cluster:
        return Cluster(**options | {"name": f"gpu-check-{os.getpid()}"} | more)

    return start


def _watch_s(device: str, *, long: bool) -> float:
    if device == "cpu":
        return 1.0
    return 600.0 if long else 75.0  # torch's watchdog sleeps for 60 s before it ends a process


def _try(name: str, check: Callable[[Bench], str], bench: Bench) -> Outcome:
    began = time.monotonic()
    try:
        result, detail = "ok", check(bench)
    except NeedsGpuError as reason:
        result, detail = "skipped", str(reason)
    except Exception as error:  # noqa: BLE001  (any error is the result of the check)
        result, detail = "failed", f"{type(error).__name__}: {error}"
        bench.close()  # the next check starts new ranks
    return Outcome(check=name, result=result, seconds=time.monotonic() - began, detail=" ".join(detail.split()))


def _line(outcome: Outcome) -> str:
    line = f"{outcome.check:<17} {outcome.result:<7} {outcome.seconds:5.0f} s  {outcome.detail}"
    columns = max(LEAST_COLUMNS, shutil.get_terminal_size().columns)
    return textwrap.fill(line, columns, subsequent_indent=" " * (len(line) - len(outcome.detail))) + "\n"
