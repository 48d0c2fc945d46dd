"""Check the GPUs, their driver, and whether this torch can use them.

Covers: NVIDIA GPUs through NVML, MIG; the CUDA build of torch; NCCL; accelerators that are not supported.
Does not cover: whether a collective over them works (``ranks``).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pynvml

from . import probe
from .finding import Finding, error, ok, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

_GIB = 2**30
_NO_DRIVER = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)


def find() -> Iterator[Finding]:
    """Yield the GPUs and the driver, then what torch detects."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as failure:
        yield _without_nvml(failure)
        yield from _other_accelerators()
        return
    try:
        names = [_describe(index) for index in range(pynvml.nvmlDeviceGetCount())]
        sliced = [index for index in range(len(names)) if _has_mig(index)]
        driver, cuda = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion_v2()
    finally:
        pynvml.nvmlShutdown()
    yield from (ok(f"GPU {index}", name) for index, name in enumerate(names))
    if sliced:
        yield warning(
            "MIG",
            f"on for GPU {', '.join(map(str, sliced))}: a process sees one instance, so one rank can use them",
            "nvidia-smi -mig 0 turns it off; else use -n 1, or --backend gloo for the CPU",
        )
    yield ok("driver", f"{driver}, for CUDA up to {cuda // 1000}.{cuda % 1000 // 10}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        yield ok("CUDA_VISIBLE_DEVICES", f"{visible!r}: ranks use these GPUs only")
    if names and visible != "":
        yield _torch_with_gpus()


def _describe(index: int) -> str:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return f"{pynvml.nvmlDeviceGetName(handle)}, {memory.free / _GIB:.0f} of {memory.total / _GIB:.0f} GiB free"


def _has_mig(index: int) -> bool:
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(pynvml.nvmlDeviceGetHandleByIndex(index))
    except pynvml.NVMLError:
        return False  # the GPU or the driver does not support MIG
    return bool(current)


def _other_accelerators() -> Iterator[Finding]:
    """Yield a warning for an accelerator other than CUDA that torch was built for: ranks leave it idle."""
    try:
        accelerator = probe.ask_torch()["accelerator"]
    except probe.ProbeError:
        return  # the check of versions reports this
    if accelerator not in ("CPU", "") and not accelerator.startswith("CUDA"):
        yield warning(
            "accelerator",
            f"this torch is built for {accelerator}, which is not supported yet: ranks use the CPU and Gloo",
            "nothing to do; NVIDIA GPUs with a CUDA build of torch are supported",
        )


def _without_nvml(failure: pynvml.NVMLError) -> Finding:
    if failure.value in _NO_DRIVER and not Path("/proc/driver/nvidia").exists():
        return ok("GPUs", "no NVIDIA GPU: ranks use the CPU and Gloo")
    return warning(
        "GPUs",
        f"an NVIDIA driver is installed but does not respond: {failure}",
        "run nvidia-smi; reload the driver, or start the container with its GPUs; until then ranks use the CPU",
    )


def _torch_with_gpus() -> Finding:
    try:
        build = probe.ask_torch()
    except probe.ProbeError as failure:
        return error("torch on GPUs", f"torch does not load: {failure}", "install torch again")
    if not build["cuda_build"]:
        return warning(
            "torch on GPUs", "this torch is a CPU build: ranks leave the GPUs idle", "install a CUDA build of torch"
        )
    if not build["cuda_available"]:
        return error(
            "torch on GPUs",
            f"torch, built for CUDA {build['cuda_build']}, can't use the GPUs with this driver",
            "install a newer driver, or a torch built for an older CUDA",
        )
    if build["nccl"] is None:
        return warning(
            "NCCL",
            "this torch has none: GPUs communicate through Gloo, which is slow",
            "install a build of torch with NCCL",
        )
    if build["gpus"] == 1:
        return ok(
            "NCCL", f"{build['nccl']}; two ranks need two GPUs to use it: jupyter disttrain gpu-check tries it on one"
        )
    return ok("NCCL", build["nccl"])
