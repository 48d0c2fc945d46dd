"""The environment variables of a rank.

Covers: those that its process starts with, those that it is given with its identity, what of the notebook's own
environment ranks on other hosts are given.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..framework_variables import HOST_ID, PCI_ORDER, WITH_GPUS, WITHOUT_GPUS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..config import ClusterConfig
    from ..ranks import RankInfo
    from .folders import Folders
    from .placement import Placement

LONGEST_UNTOLD_SECONDS = 30.0  # a rank was used

# Of the notebook's environment, what ranks on other hosts are given too: where modules are, and what libraries read.
FORWARDED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "IPYTHONDIR", "LANG")
FORWARDED_PREFIXES = (
    *(
        "CONDA_",
        "PYTHON",
        "LC_",
        "JUPYTER_",
        "OMP_",
        "MKL_",
        "KMP_",
        "OPENBLAS_",
        "NUMEXPR_",
        "NCCL_",
        "GLOO_",
        "TORCH",
    ),
    *("PYTORCH_", "CUDA_", "CUBLAS_", "UCX_", "FI_", "OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "HOROVOD_", "DS_", "HF_"),
    *("TRANSFORMERS_", "ACCELERATE_", "TOKENIZERS_", "WANDB_", "TF_", "XLA_", "JAX_", "TRITON_"),
)
OF_THIS_MACHINE = ("CUDA_VISIBLE_DEVICES", "JUPYTER_SERVER_ROOT", "JUPYTER_SERVER_URL", "JUPYTER_TOKEN")


def forwarded(environment: Mapping[str, str], wanted: Sequence[str]) -> dict[str, str]:
    """Return what ranks on other hosts are given of the notebook's environment.

    Parameters
    ----------
    environment
        The notebook's.
    wanted
        What the person wants beside that: ``"NAME"``, or ``"NAME=VALUE"``.

    Raises
    ------
    UsageError
        If a name is wanted that is not set.
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
    """Return what every rank's process starts with, beside the notebook's own environment."""
    environment = {
        "DISTTRAIN_CONNECTION_FILE": str(folders.engine_file),
        "DISTTRAIN_CLIENT": folders.cluster_id,
        "DISTTRAIN_PROFILE_DIR": str(folders.profile),
        "DISTTRAIN_LAUNCHER": config.rank_launcher,
        "DISTTRAIN_LOCAL_DIR": str(folders.local),
        # mpiexec's own files go with the cluster, however it ends.
        "PRTE_MCA_prte_local_tmpdir_base": str(folders.local),
        "PYTHONSAFEPATH": "1",  # a folder of this package's name in the working directory is not the package
    }
    if config.keep:
        environment["DISTTRAIN_KEEP"] = "1"
    if config.sample_s:
        environment["DISTTRAIN_SAMPLE_SECONDS"] = str(config.sample_s)
    if config.idle_timeout_s:
        environment["DISTTRAIN_TELL_USE"] = str(untold_s(config.idle_timeout_s))
    if folders.shelf is not None:
        # Open MPI's shared memory goes with the cluster, however its ranks end.
        environment["OMPI_MCA_btl_sm_backing_directory"] = str(folders.shelf)
    if config.backend == "none":
        environment["DISTTRAIN_WITHOUT_TORCH"] = "1"
    return environment | _of_libraries(config, n, gpus, placement)


def _of_libraries(config: ClusterConfig, n: int, gpus: list[str], placement: Placement) -> dict[str, str]:
    environment: dict[str, str] = {}
    if gpus:  # before CUDA starts, which counting its devices may do
        environment |= {name: value for name, value in PCI_ORDER.items() if name not in os.environ}
    if config.gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if "OMP_NUM_THREADS" not in os.environ:
        # Ranks that each start a thread per core fight over the cores.
        environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // (placement.most or n)))
    if placement.hosts:
        environment |= {"DISTTRAIN_NETWORK": placement.network, **placement.variables}
        environment["DISTTRAIN_ADDRESSES"] = ",".join(placement.addresses.values())
    elif "GLOO_SOCKET_IFNAME" not in os.environ and config.address is None:
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # one host: nothing has to leave it
    return environment


def library_defaults(info: RankInfo) -> dict[str, str]:
    """Return variables for the libraries of one rank, which it sets where the user has not."""
    return WITH_GPUS if info.device.startswith("cuda") else WITHOUT_GPUS


def untold_s(idle_timeout_s: float) -> float:
    """Return for how long the use of a rank may remain untold, in seconds."""
    return min(idle_timeout_s / 10, LONGEST_UNTOLD_SECONDS)


def session_environment(info: RankInfo, run_id: str) -> dict[str, str]:
    """Return torchrun's and Open MPI's variables for one rank; ``run_id`` is the same on all.

    NCCL_HOSTID with ``{rank}`` in it is filled in: ranks that NCCL takes for hosts of their own may share a GPU.
    """
    host_id = os.environ.get(HOST_ID, "")
    return ({HOST_ID: host_id.replace("{rank}", str(info.rank))} if "{rank}" in host_id else {}) | {
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
        # By the first of these libraries tell that they need not start processes, also in a Slurm job.
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # MASTER_ADDR:MASTER_PORT is the store that rank 0 already serves, as under torchrun.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
