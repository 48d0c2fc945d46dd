"""Read the state of a rank's GPU from NVML.

Covers: utilization, memory, temperature, power, throttled clocks, ECC errors, processes of others.
Does not cover: which GPU a rank gets (``client.startup.gpus``).

NVML numbers all GPUs of the machine in the order of the bus. CUDA numbers those in CUDA_VISIBLE_DEVICES, in an order
that CUDA_DEVICE_ORDER chooses. So a GPU is looked up by its UUID in CUDA.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import TYPE_CHECKING, Any

import psutil

from ....protocol.environment import CLIENT

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

# Throttle reasons that indicate a problem; idling is not among them.
_LIMITS = {0x8: "hardware slowdown", 0x20: "too hot", 0x40: "too hot", 0x80: "power brake", 0x4: "power cap"}
_MILLI = 1000.0


def open_gpu(device: str, uuid: str = "") -> Gpu | None:
    """Return the GPU that torch calls ``device`` in this environment; None for a CPU or if NVML is not available.

    ``uuid`` is CUDA's, e.g. ``"GPU-8932f937-…"``; if it is empty, the GPU is found by its index.
    """
    if not device.startswith("cuda"):
        return None
    import pynvml  # noqa: PLC0415  (a rank on a CPU has no use for it)

    try:
        pynvml.nvmlInit()
        index = int(device.partition(":")[2] or 0)
        visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        name = visible[index] if visible else str(index)
        handle = _by_uuid(pynvml, uuid or name) if uuid or not name.isdigit() else None
        if handle is None:
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(name))
    except (pynvml.NVMLError, IndexError):
        return None
    return Gpu(pynvml, handle)


def _by_uuid(nvml: Any, uuid: str) -> Any:
    """Return the GPU whose UUID begins with ``uuid``, as CUDA allows; NVML itself requires the complete UUID."""
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        if str(nvml.nvmlDeviceGetUUID(handle)).startswith(uuid):
            return handle
    raise nvml.NVMLError(nvml.NVML_ERROR_NOT_FOUND)


class Gpu:
    """One GPU."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._name = str(self._ask(nvml.nvmlDeviceGetName) or "GPU")

    def read(self, own: Collection[int]) -> dict[str, Any]:
        """Return the figures; those that this GPU does not report are left out.

        ``own`` are the process IDs of the rank, and of all that works for it.
        """
        nvml = self._nvml
        # As nvidia-smi: without what the driver reserves, which older drivers count as used.
        info = nvml.nvmlDeviceGetMemoryInfo
        memory = self._ask(info, nvml.nvmlMemory_v2) or self._ask(info)
        power = self._ask(nvml.nvmlDeviceGetPowerUsage)
        limits = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0
        figures = {
            "name": self._name,
            "percent": getattr(self._ask(nvml.nvmlDeviceGetUtilizationRates), "gpu", None),
            "memory_used_bytes": getattr(memory, "used", None),
            "memory_total_bytes": getattr(memory, "total", None),
            "celsius": self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            "watts": None if power is None else round(power / _MILLI, 1),
            "limited_by": ", ".join(dict.fromkeys(name for bit, name in _LIMITS.items() if limits & bit)) or None,
            "ecc_errors": self._ask(
                nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            "others": self._others(own),
        }
        return {name: value for name, value in figures.items() if value is not None}

    def _others(self, own: Collection[int]) -> int | None:
        """Return the number of processes outside this cluster that use this GPU; None if unknown.

        In a container NVML reports the host's pids, so the rank's own is not among them.
        """
        processes = self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses) or []
        pids = {process.pid for process in processes}
        if pids.isdisjoint(own):
            return None
        return sum(not _is_of_cluster(pid) for pid in pids.difference(own))

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        with contextlib.suppress(self._nvml.NVMLError):  # not supported by this GPU, or no permission
            return question(self._handle, *arguments)
        return None


@functools.cache
def _is_of_cluster(pid: int) -> bool:
    """Whether a process is another rank of this cluster that shares the GPU."""
    try:
        return psutil.Process(pid).environ().get(CLIENT, "") == os.environ.get(CLIENT)
    except psutil.Error:
        return False  # it has ended, or belongs to another user
