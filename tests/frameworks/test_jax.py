"""JAX on the ranks: ``jax.distributed.initialize()`` without arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import RankFailure

from ..integration.features.scripts.test_scripts import write

if TYPE_CHECKING:
    from pathlib import Path

START = "import jax; jax.distributed.initialize(); (jax.process_index(), jax.process_count())"
GATHER = """
import numpy as np
from jax.experimental import multihost_utils
multihost_utils.process_allgather(np.array([float(jax.process_index())])).ravel().tolist()
"""
SCRIPT = f"""
{START}
import sys
{GATHER.strip().replace("multihost_utils.process", "print(*multihost_utils.process")}, file=sys.stderr)
"""


@pytest.mark.parametrize("launcher", ["mpi", "local"])
def test_it_finds_all_ranks(launcher: str, folder: Path) -> None:
    script = write(folder, "gather.py", SCRIPT)
    with Cluster(n=2, launcher=launcher) as cluster:
        assert cluster.run(START).results == {0: (0, 2), 1: (1, 2)}
        assert cluster.run(GATHER).results == {0: [0.0, 1.0], 1: [0.0, 1.0]}
        for _ in range(2):
            run = cluster.scripts.run(script)
            assert {rank: text.split() for rank, text in run.stderr.items()} == {0: ["0.0", "1.0"], 1: ["0.0", "1.0"]}
        with pytest.raises(
            RankFailure, match=r"JAX starts only once per process: continue with the running one, use %dist_run"
        ):
            cluster.run(START)
        assert cluster.run("dist.get_world_size()").results == {0: 2, 1: 2}
