"""Generate the code around the cells of an exported script, and the file that launches it.

Covers: the variables that cells have predefined, the process group, one way to start for each launcher.
Does not cover: the cells (``cells``).
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...config.frameworks import TORCH_BACKENDS
from ...errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from .cells import Cell

MARK = "written by %dist_export"
LAUNCHES = ("torchrun", "slurm", "mpi", "horovodrun")

_BY_ENVIRONMENT = """\
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
node_rank = int(os.environ["GROUP_RANK"])"""

_BY_MPI = """\
comm = MPI.COMM_WORLD
rank, world_size = comm.Get_rank(), comm.Get_size()
on_this_node = comm.Split_type(MPI.COMM_TYPE_SHARED)
local_rank, local_world_size = on_this_node.Get_rank(), on_this_node.Get_size()
node_rank = sorted(set(comm.allgather(on_this_node.bcast(rank)))).index(on_this_node.bcast(rank))"""

_BY_HOROVOD = """\
hvd.init()
rank, world_size = hvd.rank(), hvd.size()
local_rank, local_world_size = hvd.local_rank(), hvd.local_size()
node_rank = hvd.cross_rank()"""

# Rank 0 opens a store on a free port, and broadcasts its address. Horovod names a broadcast after the type of the
# object, which the other ranks don't have, so without an explicit name they would wait forever.
_STORE = """\
store = dist.TCPStore(socket.gethostname(), 0, world_size, True, wait_for_workers=False) if rank == 0 else None
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = {broadcast}
if rank:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size, False)
os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local_rank))"""
_PLACE = "(socket.gethostname(), str(store.port)) if rank == 0 else None"

_LOG_METRICS = '''

def log_metrics(step=None, **values):
    """The notebook plotted these values; call your own logger here."""
'''
# Names of libraries that create the default process group unless there is one.
GROUP_MAKERS = {
    "Accelerator",
    "PartialState",
    "AcceleratorState",
    "Trainer",
    "TrainingArguments",
    "Fabric",
    "deepspeed",
}


_COPY = """\
def {copy}(source, targets, *names, rank=rank, world_size=world_size, {by}={by}):
    outside = sorted(each for each in (source, *targets) if each >= world_size)
    if outside:
        raise ValueError(f"there is no rank {{outside[0]}} to copy {{names[0]}}; start {{outside[-1] + 1}} ranks")
    values = [{{name: globals()[name] for name in names if name in globals()}} if rank == source else None]
    {exchange}
    missing = [name for name in names if name not in values[0]]
    if missing:
        raise NameError(f"rank {{source}} has no {{', '.join(map(repr, missing))}}")
    if rank in targets:
        globals().update(values[0])"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Helpers:
    """Names that the script adds, distinct from those that cells use."""

    pushed: str
    copy: str
    rank: str
    dist: str

    @classmethod
    def beside(cls, names: Container[str], changed: Container[str]) -> Helpers:
        """Choose names that are not among ``names``; ``changed`` are the names that cells assign."""

        def free(name: str) -> str:
            while name in names:
                name += "_"
            return name

        return cls(
            pushed=free("_pushed"),
            copy=free("_copy"),
            rank=free("_rank") if "rank" in changed else "rank",
            dist=free("_dist") if "dist" in changed else "dist",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The properties of the ranks."""

    world_size: int
    nodes: int
    backend: str  # "none" for ranks without torch
    on_gpus: bool
    threads: str  # OMP_NUM_THREADS of a rank: the last digit of sums over threads depends on it
    timeout_s: float

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on each node, rounded up."""
        return -(-self.world_size // self.nodes)

    def script(
        self, parts: Sequence[str], cells: Sequence[Cell], launch: str, values: str, helpers: Helpers, *, copies: bool
    ) -> str:
        """Return the whole script.

        Parameters
        ----------
        parts
            The body of the script.
        cells
            The cells in it.
        launch
            The launcher.
        values
            The name of the file with pushed variables; empty if there is none.
        helpers
            The names that the parts use.
        copies
            Whether a part copies variables from rank to rank.

        Raises
        ------
        UsageError
            If a cell uses something that the launcher does not provide.
        """
        used = set[str]().union(*(cell.names for cell in cells))
        self._check(cells, launch)
        head = [f'"""{self._title(launch)}"""']
        future = sorted({name for cell in cells for name in cell.future})
        if future:
            head.append(f"from __future__ import {', '.join(future)}")
        wants_hvd = any("hvd" in cell.names for cell in cells) and not any("horovod" in cell.imports for cell in cells)
        head.append("\n".join(self._imports(launch, values, wants_hvd=wants_hvd)))
        head.append("\n".join(self._identity(launch)))
        if wants_hvd and launch == "mpi":
            head.append("hvd.init()")
        if self.backend != "none":
            head.append("\n".join(self._device()))
        if not any(cell.makes_group for cell in cells):
            head += [line for line in [self._group(launch)] if line]
        kept = {"rank": helpers.rank} | ({} if self.backend == "none" else {"dist": helpers.dist})
        head += [f"{own} = {name}" for name, own in kept.items() if own != name]
        if values:
            beside = f"os.path.join(os.path.dirname(os.path.abspath(__file__)), {values!r})"
            head.append(f'with open({beside}, "rb") as {helpers.pushed}:')
            head[-1] += f'\n    {helpers.pushed} = pickle.load({helpers.pushed})["values"]'
        if copies:
            head.append(self._copy(launch, helpers.copy))
        if "log_metrics" in used:
            head.append(_LOG_METRICS.strip("\n"))
        if "display" in used:
            head.append("display = print")
        end = f"if {helpers.dist}.is_initialized():\n    {helpers.dist}.destroy_process_group()"
        tail = [end] if self.backend != "none" else []
        return "\n\n".join([*head, *(part.rstrip() for part in parts), *tail]) + "\n"

    def _title(self, launch: str) -> str:
        name = {"torchrun": "torchrun", "slurm": "Slurm", "mpi": "mpiexec", "horovodrun": "horovodrun"}[launch]
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"What ran on {ranks} in a notebook, in order, for {name}; {MARK}."

    def _check(self, cells: Sequence[Cell], launch: str) -> None:
        made = set[str]().union(*(cell.sets for cell in cells))
        makers = [at for at, cell in enumerate(cells) if cell.makes_group]
        for at, cell in enumerate(cells):
            if "comm" in cell.names - made and launch != "mpi":
                raise UsageError(
                    f"{cell.title} uses comm, MPI's world, which {launch} does not start; export with --mpi"
                )
            if launch in ("torchrun", "slurm") and ("horovod" in cell.imports or "hvd" in cell.names - made):
                raise UsageError(
                    f"{cell.title} uses Horovod, which finds no other rank under torchrun; export with --mpi or "
                    "--horovodrun"
                )
            before = next((each for each in reversed(cells[:at]) if each.ends_group or each.makes_group), None)
            if before is not None and before.ends_group and "dist" in cell.names and not cell.makes_group:
                raise UsageError(
                    f"{cell.title} uses the session's process group, which {before.title} has ended; a script has only "
                    "one: end it in the last cell or not at all, run the cells again and export again"
                )
            taken = sorted(GROUP_MAKERS & cell.names) if makers and at < makers[0] else []
            if taken or (makers and "dist" in cell.names and not makers[0] <= at <= makers[-1]):
                uses = (
                    f"uses {taken[0]}, which creates a process group," if taken else "uses the session's process group"
                )
                raise UsageError(
                    f"{cell.title} {uses} and {cells[makers[0]].title} creates another one; "
                    "a script has only one: leave init_process_group out there, run that cell again and export again"
                )

    def _imports(self, launch: str, values: str, *, wants_hvd: bool) -> list[str]:
        lines = ["import os"]
        lines += ["import pickle"] if values else []
        lines += ["import socket"] if launch in ("mpi", "horovodrun") and self.backend != "none" else []
        lines += ["from datetime import timedelta"] if self.backend != "none" else []
        lines += [""]
        lines += ["from mpi4py import MPI"] if launch == "mpi" else []
        lines += ["import horovod.torch as hvd"] if launch == "horovodrun" or wants_hvd else []
        lines += ["import torch", "import torch.distributed as dist"] if self.backend != "none" else []
        return lines

    def _identity(self, launch: str) -> list[str]:
        return [{"mpi": _BY_MPI, "horovodrun": _BY_HOROVOD}.get(launch, _BY_ENVIRONMENT)]

    def _device(self) -> list[str]:
        if not self.on_gpus:
            return ['device = torch.device("cpu")', "gpu_id = None"]
        return ['device = torch.device("cuda", local_rank)', "torch.cuda.set_device(device)", "gpu_id = local_rank"]

    def _copy(self, launch: str, name: str) -> str:
        """Return the function that replaces ``%dist_copy``, with the same checks."""
        if self.backend != "none":
            return _COPY.format(copy=name, by="dist", exchange="dist.broadcast_object_list(values, src=source)")
        if launch != "mpi":
            raise UsageError("without torch a script can copy between ranks only with MPI; export with --mpi")
        return _COPY.format(copy=name, by="comm", exchange="values = comm.bcast(values, root=source)")

    def _group(self, launch: str) -> str:
        if self.backend == "none":
            return ""
        backend = TORCH_BACKENDS.get(self.backend, self.backend)
        options = [f'"{backend}"', f"timeout=timedelta(seconds={self.timeout_s:g})"]
        if launch in ("torchrun", "slurm"):
            return f"dist.init_process_group({', '.join(options)}){self._all_are_in}"
        broadcast = f"comm.bcast({_PLACE})" if launch == "mpi" else f'hvd.broadcast_object({_PLACE}, name="place")'
        options += ["store=store", "rank=rank", "world_size=world_size"]
        return f"{_STORE.format(broadcast=broadcast)}\ndist.init_process_group({', '.join(options)}){self._all_are_in}"

    @property
    def _all_are_in(self) -> str:
        """A line that waits until all ranks are in the group: Gloo fails on a rank if another one leaves too early."""
        return "\ndist.barrier()" if self.backend == "gloo" else ""


def launch_file(script: str, frame: Frame, launch: str) -> tuple[str, str]:
    """Return the name and the text of the file that launches a script."""
    stem = script.rsplit(".", 1)[0]
    text, suffix = _FILES[launch]
    return f"{stem}{suffix}", textwrap.dedent(text(script, frame))


def _torchrun(script: str, frame: Frame) -> str:
    return f"""\
        #!/usr/bin/env bash
        # Starts {script}; {MARK}. On one node; on several give --nnodes, --node-rank and --master-addr as well.
        export OMP_NUM_THREADS={frame.threads}
        exec torchrun --nproc-per-node={frame.ranks_per_node} "$(dirname "$0")/{script}" "$@"
        """


def _slurm(script: str, frame: Frame) -> str:
    gpus = f"\n        #SBATCH --gpus-per-node={frame.ranks_per_node}" if frame.on_gpus else ""
    return f"""\
        #!/usr/bin/env bash
        # Starts {script}; {MARK}.
        #SBATCH --nodes={frame.nodes}
        #SBATCH --ntasks-per-node=1
        #SBATCH --cpus-per-task={frame.ranks_per_node * int(frame.threads)}{gpus}
        export OMP_NUM_THREADS={frame.threads}
        first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
        folder=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/ *Command=\\(.*\\)\\/.*/\\1/p')
        srun torchrun --nnodes="$SLURM_NNODES" --nproc-per-node={frame.ranks_per_node} \\
          --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$first:29500" "$folder/{script}" "$@"
        """


def _mpi(script: str, frame: Frame) -> str:
    return f"""\
        #!/usr/bin/env bash
        # Starts {script}; {MARK}. On one node; on several give --hostfile as well.
        export OMP_NUM_THREADS={frame.threads}
        exec mpiexec -n {frame.world_size} python "$(dirname "$0")/{script}" "$@"
        """


def _horovodrun(script: str, frame: Frame) -> str:
    return f"""\
        #!/usr/bin/env bash
        # Starts {script}; {MARK}. On one node; on several give -H host1:4,host2:4 as well.
        export OMP_NUM_THREADS={frame.threads}
        exec horovodrun --gloo -np {frame.world_size} python "$(dirname "$0")/{script}" "$@"
        """


_FILES: dict[str, tuple[Callable[[str, Frame], str], str]] = {
    "torchrun": (_torchrun, ".sh"),
    "slurm": (_slurm, ".sbatch"),
    "mpi": (_mpi, ".sh"),
    "horovodrun": (_horovodrun, ".sh"),
}
