"""Choose the environment variables for commands of a batch system.

Covers: the part of the notebook's variables that they receive, as an environment and as the beginning of a command.
Does not cover: the user's defaults for sbatch (``launchers.slurm.job``), the variables of ranks
(``launchers.rank_environment``).

In a job, or in a step of one, nearly every option of srun is set as a variable: with SLURM_GPUS=8 of ``salloc -G8``
each step on one node requests 8 GPUs there. The set of variables differs between versions, so all are removed except
those that locate Slurm and identify the user.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# A job needs no access to a notebook's server, and Slurm stores a job's environment.
_SECRETS = frozenset({"JUPYTERHUB_API_TOKEN", "JPY_API_TOKEN", "JUPYTER_TOKEN", "JUPYTERHUB_COOKIE_SECRET"})
_OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_", "PMIX_", "PMI_")  # prefixes of variables that belong to the job around us
# Not SLURM_CLUSTERS: all commands are about the cluster of this host.
_KEPT_OF_A_JOB = frozenset({"SLURM_CONF", "SLURM_JWT"})


def without_tokens(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return this process's environment without tokens, for a job of any batch system."""
    return {name: value for name, value in environ.items() if name not in _SECRETS}


def slurm_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return this process's environment for Slurm's commands: without tokens and variables of the job around it."""
    return {
        name: value
        for name, value in without_tokens(environ).items()
        if name in _KEPT_OF_A_JOB or not name.startswith(_OF_A_JOB)
    }


def clean_env(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return an ``env`` command that reduces any environment to :func:`slurm_environment`."""
    kept = slurm_environment(environ)
    return ["env", *(argument for name in environ if name not in kept for argument in ("-u", name))]
