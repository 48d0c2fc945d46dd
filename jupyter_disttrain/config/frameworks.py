"""Build the environment variables of frameworks other than torch.

Covers: TF_CONFIG, JAX's variables, what ranks with and without GPUs need, what torch was built for.
Does not cover: the ports in them (``rank.libraries.reserved_ports``), the requested roles (``cluster``).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .cluster import Roles

WITHOUT_GPUS = {
    "TORCH_FR_BUFFER_SIZE": "32",  # collectives that %dist_where can show; it reads them all
    "DS_ACCELERATOR": "cpu",  # DeepSpeed would guess the same, and warn
    "ACCELERATE_USE_CPU": "true",  # else Accelerator() takes each rank for the only one
}


# NCCL's process group ends its process (SIGABRT) once a collective fails, times out or its peer has died. A session
# aborts and forms its groups itself, and a released rank must keep its process. Programs of their own get torch's
# defaults.
OF_SESSION_GROUPS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # torch asks for it where groups are aborted: _abort_process_group
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # the watchdog sleeps for four times this before it ends
    "TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN": "0",
    # A release ends the initialization of a communicator by shutting down its sockets. NCCL's monitoring would poll a
    # listening one for ever then, and NCCL would try for a minute to connect to a rank that has died.
    "NCCL_RAS_ENABLE": "0",
    "NCCL_SOCKET_RETRY_CNT": "10",  # these attempts take 5.5 s
}
WITH_GPUS = {"TORCH_FR_BUFFER_SIZE": "64"} | OF_SESSION_GROUPS
# Torch's names of the session's backends. Cells mix devices: tensors on the CPU have a backend beside NCCL.
TORCH_BACKENDS = {"nccl": "cpu:gloo,cuda:nccl"}
HOST_ID = "NCCL_HOSTID"  # NCCL identifies hosts by it; "{rank}" in it stands for the rank
PCI_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # CUDA's order is then that of NVML and nvidia-smi


def accelerator_of(torch: Any) -> str:
    """Return what a torch was built for: ``"CUDA 13.0"``, ``"ROCm 6.4"``, ``"XPU"``, ``"MPS"``, or ``"CPU"``."""
    version = torch.version
    if version.cuda:
        return f"CUDA {version.cuda}"
    if getattr(version, "hip", None):
        return f"ROCm {version.hip}"
    if getattr(version, "xpu", None):
        return "XPU"
    mps = getattr(torch.backends, "mps", None)
    return "MPS" if mps is not None and mps.is_built() else "CPU"


def framework_environment(rank: int, places: Sequence[str], roles: Roles) -> dict[str, str]:
    """Return variables for one rank.

    JAX detects Open MPI by the name of a variable that Open MPI 5 no longer sets; it uses nothing of its value once it
    has the coordinator's address (jax/_src/clusters/ompi_cluster.py). ``places`` are the ``address:port`` of each rank;
    TF_CONFIG is set if there are roles.
    """
    coordinator, _, port = places[0].rpartition(":")
    environment = {
        "JAX_COORDINATOR_ADDRESS": places[0],
        "JAX_COORDINATOR_BIND_ADDRESS": places[0],
        "OMPI_MCA_orte_hnp_uri": f"0.0;tcp://{coordinator}:{port}",
    }
    if roles:
        environment["TF_CONFIG"] = json.dumps(tf_config(rank, places, roles))
    return environment


def tf_config(rank: int, places: Sequence[str], roles: Roles) -> dict[str, object]:
    """Return what TensorFlow's ``TFConfigClusterResolver`` reads; ranks take the roles in the order of ``roles``.

    >>> tf_config(2, ["a:1", "a:2", "b:1"], (("worker", 2), ("ps", 1)))
    {'cluster': {'worker': ['a:1', 'a:2'], 'ps': ['b:1']}, 'task': {'type': 'ps', 'index': 0}}
    """
    tasks: list[dict[str, object]] = [{"type": role, "index": at} for role, count in roles for at in range(count)]
    placed = list(zip(places, tasks, strict=False))
    cluster = {role: [place for place, task in placed if task["type"] == role] for role, _ in roles}
    return {"cluster": cluster, "task": tasks[rank] if rank < len(tasks) else {}}
