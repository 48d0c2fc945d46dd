"""The cells of the fault campaign: what is prepared, what runs when something breaks, what is checked after it."""

from __future__ import annotations

PREPARE = """
import ctypes, os, sys, time
from torch.utils.data import DataLoader, TensorDataset
from torch.nn.parallel import DistributedDataParallel
kept, tensor = {mark} + rank, torch.full((1000,), float({mark} + rank))

def strike(step):
    "Break, if it is this rank's turn."
    if rank != victim or step != at:
        return
    if fault == "raise":
        raise ValueError("broken on purpose")
    if fault == "sys.exit":
        sys.exit(3)
    if fault == "exit":
        os._exit(3)
    if fault == "segfault":
        ctypes.string_at(0)
    if fault == "hang":
        time.sleep(100_000)

victim, at, fault = {victim}, {at}, {fault!r}
"""

CELLS = {
    "python loop": """
step = 0
while True:
    strike(step)
    sum(range(2000))
    step += 1
""",
    "all_reduce": """
step = 0
while True:
    strike(step)
    dist.all_reduce(torch.ones(1000))
    step += 1
""",
    "ddp step": """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
step = 0
while True:
    strike(step)
    optimizer.zero_grad()
    ddp(torch.randn(16, 32)).pow(2).mean().backward()
    optimizer.step()
    step += 1
""",
    "data loader": """
loader = DataLoader(TensorDataset(torch.arange(64.0)), batch_size=8, num_workers=2)
step = 0
while True:
    for (batch,) in loader:
        strike(step)
        dist.all_reduce(batch)
        step += 1
""",
}

# With MPI: until all processes are dead that the job began with, its world comes back as well.
MPI_CELL = """
step = 0
while True:
    strike(step)
    step = comm.allreduce(step) // world_size + 1
"""

CHECK = """
import os
probe = torch.full((1000,), float(rank + 1))
dist.all_reduce(probe)
in_mpi = comm.allreduce(1) if {has_world} else world_size
held = globals().get("tensor", torch.zeros(1)).unique().tolist()
(os.getpid(), probe.unique().tolist(), in_mpi, globals().get("kept"), held)
"""

# The descriptors by kind: socket, pipe, anon_inode, or the file.
COUNT = """
import collections, os, pathlib, psutil
me = psutil.Process()
kinds = collections.Counter()
for descriptor in pathlib.Path("/proc/self/fd").iterdir():
    try:
        kinds[os.readlink(descriptor).split(":")[0]] += 1
    except FileNotFoundError:
        pass  # the one of this look itself
(os.getpid(), kinds, me.num_threads(), len(me.children(recursive=True)))
"""
