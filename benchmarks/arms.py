"""The contenders: one class for each, with the cells that a person would type.

Covers: the kernel to start, the cells that start the ranks, run a cell on all of them and move a variable.
Does not cover: measuring (``measures``), the environment of the peers (``environment``).

An arm's words are its own documentation's: each peer is used as its authors show it, and where several ways exist the
fastest is taken.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

# A process group for the arms that leave it to the notebook.
_OWN_GROUP = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One contender; the values here are those of a person who types into an ordinary kernel."""

    name: str
    python: str = sys.executable
    start_includes_kernel: bool = False  # where the ranks come with the kernel, its start counts as theirs
    limit_s: float = 60.0  # for one cell
    budget_s: float = 3600.0  # for one number of ranks, all measures together

    def command(self) -> list[str]:
        return [self.python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]

    def environment(self, ranks: int) -> dict[str, str]:  # noqa: ARG002
        return {}

    def comm_target(self) -> str | None:
        """Name the comm that the contender's own page opens, if its output comes over one."""
        return None

    def load_cells(self) -> list[str]:
        """Cells before the clock starts."""
        return []

    def start_cells(self, ranks: int) -> list[str]:
        """Cells until the first all_reduce can be sent."""
        raise NotImplementedError

    def torchless_start_cells(self, ranks: int) -> list[str] | None:  # noqa: ARG002
        """Cells that start ranks which have no torch, or None where it can't be had."""
        return None

    def has_ranks_without_torch(self) -> bool:
        return self.torchless_start_cells(1) is not None

    def after_start_cells(self) -> list[str]:
        """Cells after the clock has stopped."""
        return []

    def on_all_ranks(self, code: str) -> str:
        return f"%%distributed\n{code}"

    def has_local_cells(self) -> bool:
        return True

    def pull_cell(self, name: str) -> str | None:  # noqa: ARG002
        """Bring rank 0's ``name`` into the notebook."""
        return None

    def push_cell(self, name: str) -> str | None:  # noqa: ARG002
        """Bring the notebook's ``name`` to every rank."""
        return None

    def pull_conversion(self, name: str) -> str:  # noqa: ARG002
        """Code for the ranks, before the clock starts, that makes a tensor what can be pulled fastest."""
        return ""

    def stop_cells(self) -> list[str]:
        return []


class Ours(Arm):
    """jupyter_disttrain, as DESIGN shows it."""

    def load_cells(self) -> list[str]:
        return ["%load_ext jupyter_disttrain"]

    def start_cells(self, ranks: int) -> list[str]:
        return [f"%dist_init -n {ranks}"]

    def torchless_start_cells(self, ranks: int) -> list[str] | None:
        return [f"%dist_init -n {ranks} --launcher local --backend none"]

    def pull_cell(self, name: str) -> str:
        return f"%dist_pull -r 0 {name}"

    def push_cell(self, name: str) -> str:
        return f"%dist_push {name}"

    def stop_cells(self) -> list[str]:
        return ["%dist_shutdown"]


def _with_tools_of(python: str) -> dict[str, str]:
    """Put the environment's own commands first, as activating it does."""
    return {"PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"}


class NbDistributed(Arm):
    """nbdistributed. It is never asked to shut down: see ``environment``."""

    def environment(self, ranks: int) -> dict[str, str]:  # noqa: ARG002
        """Put a ``pkill`` that does nothing first on its PATH.

        Its shutdown ends processes by patterns such as ``python.*worker``, which would reach processes of other people.
        Its workers are ended by their pids instead.
        """
        path = _with_tools_of(self.python)["PATH"]
        return {"PATH": f"{Path(__file__).parent / 'harmless'}{os.pathsep}{path}"}

    def load_cells(self) -> list[str]:
        return ["%load_ext nbdistributed"]

    def start_cells(self, ranks: int) -> list[str]:
        """Start, then ask until every worker answers: a cell sent earlier is lost, and fails after 30 s."""
        until_they_answer = dedent("""
            %dist_mode -d
            while True:
                try:
                    get_ipython().magics_manager.registry["DistributedMagic"]._comm_manager.send_to_all(
                        "get_status", {}, timeout=0.2)
                    break
                except TimeoutError:
                    pass
            """)
        return [f"%dist_init -n {ranks}", until_they_answer.lstrip()]


class JupyterDistributed(Arm):
    """jupyter-distributed, whose kernel is the ranks: no cell runs anywhere else."""

    def command(self) -> list[str]:
        return [self.python, "-m", "jupyter_distributed.kernel", "-f", "{connection_file}"]

    def environment(self, ranks: int) -> dict[str, str]:
        return {**_with_tools_of(self.python), "JUPYTER_DISTRIBUTED_WORLD_SIZE": str(ranks)}

    def comm_target(self) -> str | None:
        return "jupyter.distributed.rank_updates"  # its live output, to whoever opened this

    def start_cells(self, ranks: int) -> list[str]:  # noqa: ARG002
        return [_OWN_GROUP]

    def on_all_ranks(self, code: str) -> str:
        return code

    def has_local_cells(self) -> bool:
        return False


class IpyParallel(Arm):
    """ipyparallel's ``%%px`` over MPI engines, with its own defaults."""

    def environment(self, ranks: int) -> dict[str, str]:  # noqa: ARG002
        return {
            **_with_tools_of(self.python),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
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
        return [self._cluster("mpi", ranks), f"%%px\n{group}{_OWN_GROUP}"]

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
        # An engine's number is not its rank.
        return ["root = next(i for i, rank in zip(rc.ids, rc[:].pull('rank', block=True)) if rank == 0)"]

    def stop_cells(self) -> list[str]:
        return ["cluster.stop_cluster_sync()"]

    @staticmethod
    def _cluster(engines: str, ranks: int) -> str:
        return (
            f"cluster = ipp.Cluster(engines={engines!r}, n={ranks}, log_level=40)\n"
            "rc = cluster.start_and_connect_sync(activate=True)"
        )
