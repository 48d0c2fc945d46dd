"""Give advice on errors of CUDA and NCCL.

Covers: a lost CUDA context, GPU memory exhausted, an invalid device, NCCL errors without a cause.
Does not cover: the error itself (``rank.kernel.cell_errors``), replacing the rank (``client.recovery.supervisor``).
"""

from __future__ import annotations

import re

# After one of these errors every later CUDA call in the process fails; other CUDA errors leave the process usable.
_LOST = re.compile(
    r"(CUDA|HIP) error: .*(device-side assert|illegal memory access|illegal address|unspecified launch failure"
    r"|misaligned address|illegal instruction|invalid program counter|hardware stack|invalid address space"
    r"|uncorrectable|launch timed out|device lost|fallen off the bus)"
)
_OUT_OF_MEMORY = re.compile(r"CUDA (error: )?out of memory")
_NCCL = re.compile(r"NCCL error|unhandled (system|cuda) error|ncclSystemError|ncclUnhandledCudaError", re.IGNORECASE)


def is_context_lost(text: str) -> bool:
    """Return whether an error with this text means that the process can't use its GPU any more."""
    return bool(_LOST.search(text))


def advice(error: BaseException, text: str, *, in_program: bool = False) -> str:
    """Return advice on an error with this text, also of a program that a rank has run; empty if there is none."""
    if _LOST.search(text):
        if in_program:
            return (
                "with CUDA_LAUNCH_BLOCKING=1, which os.environ in a cell sets for later runs, the traceback names the "
                "call that failed"
            )
        return (
            "this process can't use its GPU any more, so it ends and the rank gets a new one; with "
            "CUDA_LAUNCH_BLOCKING=1 set before %dist_init the traceback names the call that failed"
        )
    if type(error).__name__ == "OutOfMemoryError" or _OUT_OF_MEMORY.search(text):
        return (
            "tensors of earlier cells stay in the GPU's memory: del those you don't need, then torch.cuda.empty_cache()"
        )
    if "invalid device ordinal" in text:
        return (
            "the variable device holds this rank's GPU; LOCAL_RANK is larger than the number of GPUs that a rank sees "
            "with --share-gpus, and in jobs that assign one GPU to each process"
        )
    if _NCCL.search(text):
        return (
            "NCCL_DEBUG=WARN, set before %dist_init (on other hosts it is passed on), has NCCL report the cause; a "
            "container needs --ipc=host or --shm-size=1g"
        )
    return ""
