"""Do one all_reduce and write when it was done: the baseline for starts.

Usage: first_all_reduce.py FOLDER [hold]. Rank 0 writes ``done`` (seconds since the epoch); with ``hold`` each rank
writes ``rank-R.pid`` and waits until ``hold`` is removed from the folder or its parent exits.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

folder = Path(sys.argv[1])
parent = os.getppid()
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
ones = torch.ones(1, device="cuda" if torch.cuda.is_available() else "cpu")
dist.all_reduce(ones)
assert ones.item() == dist.get_world_size()
if dist.get_rank() == 0:
    (folder / "done").write_text(repr(time.time()))
if "hold" in sys.argv:
    (folder / f"rank-{dist.get_rank()}.pid").write_text(str(os.getpid()))
    while (folder / "hold").exists() and os.getppid() == parent:
        time.sleep(0.05)
dist.barrier()  # a rank that exits while another still reads its last message makes that one abort
dist.destroy_process_group()
