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
from .report import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

_GIB = 2**30
_NO_DRIVER = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)


def find() -> Iterator[Finding]:
    """Yield the GPUs and the driver, then what torch detects."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as failure:
        yield from _without_nvml(failure)
        return
    try:
        names = [_describe(index) for index in range(pynvml.nvmlDeviceGetCount())]
        sliced = [index for index in range(len(names)) if _has_mig(index)]
        driver, cuda = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion_v2()
    finally:
        pynvml.nvmlShutdown()
    yield from (Finding("ok", f"GPU {index}", name) for index, name in enumerate(names))
    if sliced:
        yield Finding(
            "warning",
            "MIG",
            f"on for GPU {', '.join(map(str, sliced))}: a process sees one instance, so one rank can use them",
            "nvidia-smi -mig 0 turns it off; else use -n 1, or --backend gloo for the CPU",
        )
    yield Finding("ok", "driver", f"{driver}, for CUDA up to {cuda // 1000}.{cuda % 1000 // 10}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        yield Finding("ok", "CUDA_VISIBLE_DEVICES", f"{visible!r}: ranks use these GPUs only")
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


def _without_nvml(failure: pynvml.NVMLError) -> Iterator[Finding]:
    if failure.value not in _NO_DRIVER or Path("/proc/driver/nvidia").exists():
        yield Finding(
            "warning",
            "GPUs",
            f"an NVIDIA driver is installed but does not respond: {failure}",
            "run nvidia-smi; reload the driver, or start the container with its GPUs; until then ranks use the CPU",
        )
    else:
        yield Finding("ok", "GPUs", "no NVIDIA GPU: ranks use the CPU and Gloo")
    accelerator = probe.torch_build()["accelerator"]
    if not accelerator.startswith(("CPU", "CUDA")):
        yield Finding(
            "warning",
            "accelerator",
            f"this torch is built for {accelerator}, which is not supported yet: ranks use the CPU and Gloo",
            "nothing to do; NVIDIA GPUs with a CUDA build of torch are supported",
        )


def _torch_with_gpus() -> Finding:
    build = probe.torch_build()
    accelerator, nccl = build["accelerator"], build["nccl"]
    if not accelerator.startswith("CUDA"):
        text = f"this torch is a {accelerator} build: ranks leave the GPUs idle"
        return Finding("warning", "torch on GPUs", text, "install a CUDA build of torch")
    if not build["gpus"]:
        text = f"torch, built for {accelerator}, can't use the GPUs with this driver"
        remedy = "install a newer driver, or a torch built for an older CUDA"
        return Finding("error", "torch on GPUs", text, remedy)
    if nccl is None:
        text = "this torch has none: GPUs communicate through Gloo, which is slow"
        return Finding("warning", "NCCL", text, "install a build of torch with NCCL")
    alone = "; two ranks need two GPUs to use it: jupyter disttrain gpu-check tries it on one"
    return Finding("ok", "NCCL", nccl + (alone if build["gpus"] == 1 else ""))
