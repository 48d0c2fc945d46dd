"""Generate the code around the cells of an exported script, and the file that launches it.

Covers: the variables that cells have predefined, the process group, one way to start for each launcher.
Does not cover: the cells (``cells``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...config.frameworks import TORCH_BACKENDS
from ...errors import UsageError
from ...protocol.ranks import counted
from .cells import RANK

if TYPE_CHECKING:
    from collections.abc import Sequence

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

_ON_CPU = """\
device = torch.device("cpu")
gpu_id = None"""

_ON_GPU = """\
device = torch.device("cuda", local_rank)
torch.cuda.set_device(device)
gpu_id = local_rank"""

_VALUES = """\
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), {values!r}), "rb") as _disttrain_pushed:
    _disttrain_pushed = pickle.load(_disttrain_pushed)["values"]"""

_LOG_METRICS = '''\
def log_metrics(step=None, **values):
    """The notebook plotted these values; call your own logger here."""'''

# Names that the script adds, besides those that every rank has: cells may set ``rank`` and ``dist``.
PUSHED, COPY, DIST = "_disttrain_pushed", "_disttrain_copy", "_disttrain_dist"

_COPY = """\
def _disttrain_copy(source, targets, *names, rank=rank, world_size=world_size, {by}={by}):
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
class Frame:
    """The properties of the ranks."""

    world_size: int
    nodes: int
    backend: str  # "none" for ranks without torch
    on_gpus: bool
    threads: str  # OMP_NUM_THREADS of a rank: the last digit of sums over threads depends on it
    timeout_s: float

    def script(self, parts: Sequence[str], cells: Sequence[Cell], launch: str, values: str, *, copies: bool) -> str:
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
        copies
            Whether a part copies variables from rank to rank.

        Raises
        ------
        UsageError
            If a cell uses something that the launcher does not provide.
        """
        used = set[str]().union(*(cell.names for cell in cells))
        imports = set[str]().union(*(cell.imports for cell in cells))
        has_torch = self.backend != "none"
        self._check(cells, launch)
        ran_on, name = counted(self.world_size, "rank"), {"slurm": "Slurm", "mpi": "mpiexec"}.get(launch, launch)
        head = [f'"""What ran on {ran_on} in a notebook, in order, for {name}; {MARK}."""']
        future = sorted({name for cell in cells for name in cell.future})
        if future:
            head.append(f"from __future__ import {', '.join(future)}")
        wants_hvd = "hvd" in used and "horovod" not in imports
        head.append("\n".join(self._imports(launch, wants_hvd=wants_hvd)))
        head.append({"mpi": _BY_MPI, "horovodrun": _BY_HOROVOD}.get(launch, _BY_ENVIRONMENT))
        if wants_hvd and launch == "mpi":
            head.append("hvd.init()")
        if has_torch:
            head.append(_ON_GPU if self.on_gpus else _ON_CPU)
            if not any(cell.makes_group for cell in cells):
                head.append(self._group(launch))
        head.append(f"{RANK} = rank" + (f"\n{DIST} = dist" if has_torch else ""))
        if values:
            head.append(_VALUES.format(values=values))
        if copies:
            head.append(self._copy(launch))
        if "log_metrics" in used:
            head.append(_LOG_METRICS)
        if "display" in used:
            head.append("display = print")
        tail = [f"if {DIST}.is_initialized():\n    {DIST}.destroy_process_group()"] if has_torch else []
        return "\n\n".join([*head, *(part.rstrip() for part in parts), *tail]) + "\n"

    def _check(self, cells: Sequence[Cell], launch: str) -> None:
        made = set[str]().union(*(cell.sets for cell in cells))
        for cell in cells:
            if "comm" in cell.names - made and launch != "mpi":
                raise UsageError(
                    f"{cell.title} uses comm, MPI's world, which {launch} does not start; export with --mpi"
                )
            if launch in ("torchrun", "slurm") and ("horovod" in cell.imports or "hvd" in cell.names - made):
                raise UsageError(
                    f"{cell.title} uses Horovod, which finds no other rank under torchrun; export with --mpi or "
                    "--horovodrun"
                )

    def _imports(self, launch: str, *, wants_hvd: bool) -> list[str]:
        lines = ["import os", "import pickle", "import socket", "from datetime import timedelta", ""]
        lines += ["from mpi4py import MPI"] if launch == "mpi" else []
        lines += ["import horovod.torch as hvd"] if launch == "horovodrun" or wants_hvd else []
        lines += ["import torch", "import torch.distributed as dist"] if self.backend != "none" else []
        return lines

    def _copy(self, launch: str) -> str:
        """Return the function that replaces ``%dist_copy``, with the same checks."""
        if self.backend != "none":
            return _COPY.format(by="dist", exchange="dist.broadcast_object_list(values, src=source)")
        if launch != "mpi":
            raise UsageError("without torch a script can copy between ranks only with MPI; export with --mpi")
        return _COPY.format(by="comm", exchange="values = comm.bcast(values, root=source)")

    def _group(self, launch: str) -> str:
        backend = TORCH_BACKENDS.get(self.backend, self.backend)
        options = [f'"{backend}"', f"timeout=timedelta(seconds={self.timeout_s:g})"]
        # Gloo fails on a rank if another one leaves before all are in the group.
        end = "\ndist.barrier()" if self.backend == "gloo" else ""
        if launch in ("torchrun", "slurm"):
            return f"dist.init_process_group({', '.join(options)}){end}"
        broadcast = f"comm.bcast({_PLACE})" if launch == "mpi" else f'hvd.broadcast_object({_PLACE}, name="place")'
        options += ["store=store", "rank=rank", "world_size=world_size"]
        return f"{_STORE.format(broadcast=broadcast)}\ndist.init_process_group({', '.join(options)}){end}"


def launch_file(script: str, frame: Frame, launch: str) -> tuple[str, str]:
    """Return the name and the text of the file that launches a script."""
    stem = script.rsplit(".", 1)[0]
    per_node = -(-frame.world_size // frame.nodes)  # rounded up
    fields = {"script": script, "mark": MARK, "threads": frame.threads, "here": per_node}
    if launch == "slurm":
        gpus = f"\n#SBATCH --gpus-per-node={per_node}" if frame.on_gpus else ""
        cpus = per_node * int(frame.threads)
        return f"{stem}.sbatch", _SBATCH.format(**fields, nodes=frame.nodes, cpus=cpus, gpus=gpus)
    command, several = _COMMANDS[launch]
    return f"{stem}.sh", _SHELL.format(**fields, command=command.format(n=frame.world_size, **fields), several=several)


_COMMANDS = {  # and the options for several nodes
    "torchrun": ("torchrun --nproc-per-node={here}", "--nnodes, --node-rank and --master-addr"),
    "mpi": ("mpiexec -n {n} python", "--hostfile"),
    "horovodrun": ("horovodrun --gloo -np {n} python", "-H host1:4,host2:4"),
}

_SHELL = """\
#!/usr/bin/env bash
# Starts {script}; {mark}. On one node; on several give {several} as well.
export OMP_NUM_THREADS={threads}
exec {command} "$(dirname "$0")/{script}" "$@"
"""

_SBATCH = """\
#!/usr/bin/env bash
# Starts {script}; {mark}.
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={cpus}{gpus}
export OMP_NUM_THREADS={threads}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
folder=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/ *Command=\\(.*\\)\\/.*/\\1/p')
srun torchrun --nnodes="$SLURM_NNODES" --nproc-per-node={here} \\
  --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$first:29500" "$folder/{script}" "$@"
"""
