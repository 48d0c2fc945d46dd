"""Define the peers: the other tools that run cells on ranks.

Covers: nbdistributed, jupyter-distributed, ipyparallel.
Does not cover: measuring (measures), installing the peers (peer_environment), jupyter_disttrain (lib.tools).
"""

from __future__ import annotations

import os
from pathlib import Path
from textwrap import dedent

from benchmarks.lib.environment import OPENMPI_AS_ROOT
from benchmarks.lib.tools import Tool

# Forms the process group for tools that do not form one.
_INIT_PROCESS_GROUP = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
"""


def _activated(python: str) -> dict[str, str]:
    """Return the variables that activating the virtual environment of ``python`` sets."""
    return {"PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"}


class NbDistributed(Tool):
    """nbdistributed. Its shutdown command is not used; see ``environment``."""

    def environment(self, ranks: int) -> dict[str, str]:  # noqa: ARG002
        """Put a ``pkill`` that does nothing first on the PATH.

        The tool ends processes by patterns such as ``python.*worker``, which also match processes of other programs.
        Its workers are ended by pid instead.
        """
        path = _activated(self.python)["PATH"]
        return {"PATH": f"{Path(__file__).parent / 'no_op_commands'}{os.pathsep}{path}"}

    def load_cells(self) -> list[str]:
        return ["%load_ext nbdistributed"]

    def start_cells(self, ranks: int) -> list[str]:
        """Start, then poll until every worker replies; a cell that is sent earlier is lost and fails after 30 s."""
        wait_for_workers = dedent("""
            %dist_mode -d
            while True:
                try:
                    get_ipython().magics_manager.registry["DistributedMagic"]._comm_manager.send_to_all(
                        "get_status", {}, timeout=0.2)
                    break
                except TimeoutError:
                    pass
            """)
        return [f"%dist_init -n {ranks}", wait_for_workers.lstrip()]


class JupyterDistributed(Tool):
    """jupyter-distributed, whose kernel runs every cell on all ranks and has no local cells."""

    def command(self) -> list[str]:
        return [self.python, "-m", "jupyter_distributed.kernel", "-f", "{connection_file}"]

    def environment(self, ranks: int) -> dict[str, str]:
        return {**_activated(self.python), "JUPYTER_DISTRIBUTED_WORLD_SIZE": str(ranks)}

    def comm_target(self) -> str | None:
        return "jupyter.distributed.rank_updates"  # live output is sent to clients that opened it

    def start_cells(self, ranks: int) -> list[str]:  # noqa: ARG002
        return [_INIT_PROCESS_GROUP]

    def on_all_ranks(self, code: str) -> str:
        return code

    def has_local_cells(self) -> bool:
        return False


class IpyParallel(Tool):
    """ipyparallel's ``%%px`` with MPI engines and default settings."""

    def environment(self, ranks: int) -> dict[str, str]:  # noqa: ARG002
        return {
            **_activated(self.python),
            **OPENMPI_AS_ROOT,
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        }

    def load_cells(self) -> list[str]:
        return ["import ipyparallel as ipp"]

    def start_cells(self, ranks: int) -> list[str]:
        group = dedent("""
            from mpi4py import MPI
            import os, socket
            comm = MPI.COMM_WORLD
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = comm.bcast(probe.getsockname()[1])
            os.environ.update(RANK=str(comm.rank), WORLD_SIZE=str(comm.size), LOCAL_RANK=str(comm.rank),
                              MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            """)
        return [self._cluster("mpi", ranks), f"%%px\n{group}{_INIT_PROCESS_GROUP}"]

    def torchless_start_cells(self, ranks: int) -> list[str] | None:
        return [self._cluster("local", ranks)]

    def on_all_ranks(self, code: str) -> str:
        return f"%%px\n{code}"

    def pull_cell(self, name: str) -> str:
        return f"{name} = rc[root][{name!r}]"

    def pull_conversion(self, name: str) -> str:
        return f"\n{name} = {name}.numpy()"  # a tensor takes twice as long and imports torch into the notebook

    def push_cell(self, name: str) -> str:
        return f"rc[:].push({{{name!r}: {name}}}, block=True);"

    def after_start_cells(self) -> list[str]:
        # Engine ids differ from ranks.
        return ["root = next(i for i, rank in zip(rc.ids, rc[:].pull('rank', block=True)) if rank == 0)"]

    def stop_cells(self) -> list[str]:
        return ["cluster.stop_cluster_sync()"]

    @staticmethod
    def _cluster(engines: str, ranks: int) -> str:
        return (
            f"cluster = ipp.Cluster(engines={engines!r}, n={ranks}, log_level=40)\n"
            "rc = cluster.start_and_connect_sync(activate=True)"
        )
