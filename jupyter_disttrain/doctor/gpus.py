"""The GPUs, their driver, and whether this torch can use them.

Covers: NVIDIA GPUs through NVML; the CUDA build of torch; NCCL.
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
    """Yield the GPUs and the driver, then how torch sees them."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as failure:
        yield _without_nvml(failure)
        return
    try:
        names = [_describe(index) for index in range(pynvml.nvmlDeviceGetCount())]
        driver, cuda = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion_v2()
    finally:
        pynvml.nvmlShutdown()
    yield from (ok(f"GPU {index}", name) for index, name in enumerate(names))
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


def _without_nvml(failure: pynvml.NVMLError) -> Finding:
    if failure.value in _NO_DRIVER and not Path("/proc/driver/nvidia").exists():
        return ok("GPUs", "no NVIDIA GPU: ranks use the CPU and Gloo")
    return warning(
        "GPUs",
        f"an NVIDIA driver is there but does not answer: {failure}",
        "try nvidia-smi; reload the driver, or give the container its GPUs; until then ranks use the CPU",
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
            "NCCL", "this torch has none: GPUs talk through Gloo, slowly", "install a build of torch with NCCL"
        )
    return ok("NCCL", build["nccl"])
