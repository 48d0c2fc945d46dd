"""What frameworks other than torch have to know of the ranks.

Covers: TF_CONFIG, JAX's variables, what hosts without GPUs need.
Does not cover: the ports in them (``engine.meeting_place``), which roles a person asks for (``config``).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .config import Roles

WITHOUT_GPUS = {
    "TORCH_FR_BUFFER_SIZE": "32",  # collectives that %dist_where can tell of; it reads them all
    "DS_ACCELERATOR": "cpu",  # DeepSpeed would guess so, and warn
    "ACCELERATE_USE_CPU": "true",  # else Accelerator() takes each rank for the only one
}


def framework_environment(rank: int, places: Sequence[str], roles: Roles) -> dict[str, str]:
    """Return variables for one rank.

    JAX looks for Open MPI's by the name of one that Open MPI 5 no longer sets; of its value it uses nothing once it has
    the coordinator's address (jax/_src/clusters/ompi_cluster.py).

    Parameters
    ----------
    places
        ``address:port`` of each rank.
    roles
        TensorFlow's, as often as there are ranks of each; empty for no TF_CONFIG.
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

    Examples
    --------
    >>> tf_config(2, ["a:1", "a:2", "b:1"], (("worker", 2), ("ps", 1)))
    {'cluster': {'worker': ['a:1', 'a:2'], 'ps': ['b:1']}, 'task': {'type': 'ps', 'index': 0}}
    """
    cluster: dict[str, list[str]] = {}
    task: dict[str, object] = {}
    left = list(enumerate(places))
    for role, count in roles:
        members, left = left[:count], left[count:]
        cluster[role] = [place for _, place in members]
        task |= {"type": role, "index": rank - members[0][0]} if rank in dict(members) else {}
    return {"cluster": cluster, "task": task}
