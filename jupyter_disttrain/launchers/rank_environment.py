"""Build the environment variables of a rank.

Covers: those that its process starts with, those that it receives with its identity, the part of the notebook's
environment that is forwarded to ranks on other hosts.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..config.frameworks import PCI_ORDER, WITH_GPUS, WITHOUT_GPUS
from ..errors import UsageError
from ..protocol.environment import (
    ADDRESSES,
    CLIENT,
    CONNECTION_FILE,
    IPYTHON_PROFILE,
    KEEP,
    LAUNCHER,
    LOCAL_DIR,
    NETWORK,
    NO_WARM,
    PRELOAD,
    PROFILE_DIR,
    REPORT_USE,
    SAMPLE_SECONDS,
    WITHOUT_TORCH,
)
from ..protocol.time_limits import LONGEST_UNREPORTED_SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..config.cluster import ClusterConfig
    from ..protocol.ranks import RankInfo
    from .folders import Folders
    from .placement import Placement


# Variables of the notebook that are forwarded to ranks on other hosts: module paths and settings of libraries.
FORWARDED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "IPYTHONDIR", "LANG", IPYTHON_PROFILE)
FORWARDED_PREFIXES = (
    *("CONDA_", "PYTHON", "LC_", "JUPYTER_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "NUMEXPR_", "NCCL_", "GLOO_"),
    "TORCH",
    *("PYTORCH_", "CUDA_", "CUBLAS_", "UCX_", "FI_", "OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "HOROVOD_", "DS_", "HF_"),
    *("TRANSFORMERS_", "ACCELERATE_", "TOKENIZERS_", "WANDB_", "TF_", "XLA_", "JAX_", "TRITON_"),
)
OF_THIS_MACHINE = ("CUDA_VISIBLE_DEVICES", "JUPYTER_SERVER_ROOT", "JUPYTER_SERVER_URL", "JUPYTER_TOKEN")


def forwarded(environment: Mapping[str, str], wanted: Sequence[str]) -> dict[str, str]:
    """Return the variables of the notebook that are forwarded to ranks on other hosts.

    ``wanted`` are further ones that the user requested: ``"NAME"``, or ``"NAME=VALUE"``.

    Raises a UsageError if a requested name is not set.
    """
    chosen = {
        name: value
        for name, value in environment.items()
        if name not in OF_THIS_MACHINE and (name in FORWARDED or name.startswith(FORWARDED_PREFIXES))
    }
    for each in wanted:
        name, has_value, value = each.partition("=")
        if not has_value and name not in environment:
            raise UsageError(f"-x {name}: the notebook has no variable of that name; write -x {name}=VALUE")
        chosen[name] = value if has_value else environment[name]
    return chosen


def rank_environment(
    config: ClusterConfig, folders: Folders, n: int, gpus: list[str], placement: Placement
) -> dict[str, str]:
    """Return the variables that every rank's process starts with, in addition to the notebook's environment."""
    environment = import_environment(config, n, gpus, placement) | {
        CONNECTION_FILE: str(folders.engine_file),
        CLIENT: folders.cluster_id,
        PROFILE_DIR: str(folders.profile),
        LAUNCHER: config.rank_launcher,
        LOCAL_DIR: str(folders.local),
        # mpiexec's own files are removed with the cluster, however it ends.
        "PRTE_MCA_prte_local_tmpdir_base": str(folders.local),
    }
    if config.keep:
        environment[KEEP] = "1"
    if config.sample_s:
        environment[SAMPLE_SECONDS] = str(config.sample_s)
    if config.idle_timeout_s:
        environment[REPORT_USE] = str(use_report_s(config.idle_timeout_s))
    if folders.shelf_name is not None:
        # Open MPI's shared memory is removed with the cluster, however its ranks end.
        environment["OMPI_MCA_btl_sm_backing_directory"] = folders.shelf_name
    return environment


def import_environment(config: ClusterConfig, n: int, gpus: list[str], placement: Placement) -> dict[str, str]:
    """Return the variables that determine how a rank's process, or its warm process, imports libraries."""
    # A folder named jupyter_disttrain in the working directory must not shadow the package.
    environment = {"PYTHONSAFEPATH": "1"}
    if config.backend == "none":
        environment[WITHOUT_TORCH] = "1"
    if config.preload:
        environment[PRELOAD] = ",".join(config.preload)
    if not config.warm:
        environment[NO_WARM] = "1"
    if gpus:  # set before CUDA starts, which counting its devices may do
        environment |= {name: value for name, value in PCI_ORDER.items() if name not in os.environ}
    if config.gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if "OMP_NUM_THREADS" not in os.environ:
        # Ranks that each start a thread per core would compete for the cores.
        environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // (placement.most or n)))
    if placement.hosts:
        environment |= {NETWORK: placement.network, **placement.variables}
        environment[ADDRESSES] = ",".join(placement.addresses.values())
    elif "GLOO_SOCKET_IFNAME" not in os.environ and config.address is None:
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # one host: use loopback
    return environment


def library_defaults(info: RankInfo) -> dict[str, str]:
    """Return library variables for one rank, which it sets unless the user has set them."""
    return WITH_GPUS if info.device.startswith("cuda") else WITHOUT_GPUS


def use_report_s(idle_timeout_s: float) -> float:
    """Return the longest delay, in seconds, before a rank reports its use."""
    return min(idle_timeout_s / 10, LONGEST_UNREPORTED_SECONDS)


def session_environment(info: RankInfo, run_id: str) -> dict[str, str]:
    """Return torchrun's and Open MPI's variables for one rank; ``run_id`` is the same on all."""
    return {
        "RANK": str(info.rank),
        "WORLD_SIZE": str(info.world_size),
        "LOCAL_RANK": str(info.local_rank),
        "LOCAL_WORLD_SIZE": str(info.local_world_size),
        "NODE_RANK": str(info.node_rank),
        "GROUP_RANK": str(info.node_rank),
        "GROUP_WORLD_SIZE": str(info.node_count),
        "OMPI_COMM_WORLD_RANK": str(info.rank),
        "OMPI_COMM_WORLD_SIZE": str(info.world_size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(info.local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(info.local_world_size),
        "OMPI_COMM_WORLD_NODE_RANK": str(info.local_rank),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(info.rank),
        "ROLE_WORLD_SIZE": str(info.world_size),
        # From the first of these, libraries recognise that they need not start processes, also in a Slurm job.
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # MASTER_ADDR:MASTER_PORT is the store that rank 0 already serves, as under torchrun.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
