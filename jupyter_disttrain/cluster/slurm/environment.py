"""The variables that commands of a batch system are run with.

Covers: what of the notebook's own they may have, as an environment and as the beginning of a command.
Does not cover: a person's defaults for sbatch (``job``), the variables of ranks (``cluster.rank_environment``).

In a job, or in a step of one, nearly every option of srun is set as a variable: with SLURM_GPUS=8 of ``salloc -G8``
each step on one node asks for 8 GPUs there. Which those are differs with the version, so none is left but those that
say where Slurm is and who asks.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# What a notebook's server lets its kernels do is nothing that a job needs, and Slurm keeps a job's environment.
_SECRETS = frozenset({"JUPYTERHUB_API_TOKEN", "JPY_API_TOKEN", "JUPYTER_TOKEN", "JUPYTERHUB_COOKIE_SECRET"})
_OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_", "PMIX_", "PMI_")  # beginnings of variables that belong to the job around us
# Not SLURM_CLUSTERS: everything here is about the cluster of this host.
_KEPT_OF_A_JOB = frozenset({"SLURM_CONF", "SLURM_JWT"})


def without_tokens(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return this process's environment as a job of any batch system may have it."""
    return {name: value for name, value in environ.items() if name not in _SECRETS}


def slurm_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return this process's environment as Slurm's commands may have it: nothing of the job around it, no tokens."""
    return {
        name: value
        for name, value in without_tokens(environ).items()
        if name in _KEPT_OF_A_JOB or not name.startswith(_OF_A_JOB)
    }


def clean_env(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return what a command begins with that is to have :func:`slurm_environment`, whoever starts it."""
    kept = slurm_environment(environ)
    return ["env", *(word for name in environ if name not in kept for word in ("-u", name))]
