"""Train 200 steps with DistributedDataParallel on synthetic digits; rank 0 prints the seconds.

BENCH_MODEL is ``mlp`` or ``cnn``. Runs unchanged under torchrun and as a cell; forms a process group if there is none.
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, WARM_UP_STEPS = 200, 10

forms_group = not dist.is_initialized()
if forms_group:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
torch.manual_seed(0)
gpu = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else None
device = gpu or torch.device("cpu")

if os.environ["BENCH_MODEL"] == "mlp":
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
else:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * 49, 10),
    )  # fmt: skip
ddp = DistributedDataParallel(model.to(device), device_ids=None if gpu is None else [gpu.index])
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
images = torch.randn(64, 1, 28, 28, device=device)
labels = torch.randint(0, 10, (64,), device=device)

started = 0.0
for step in range(WARM_UP_STEPS + STEPS):
    if step == WARM_UP_STEPS:
        dist.barrier()
        started = time.perf_counter()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(ddp(images), labels)
    loss.backward()
    optimizer.step()
if gpu is not None:
    torch.cuda.synchronize()
seconds = time.perf_counter() - started
if dist.get_rank() == 0:
    print(f"loop seconds {seconds:.6f} loss {loss.item():.4f}", flush=True)
if forms_group:
    dist.barrier()  # a rank that exits while another still reads its last message makes that one abort
    dist.destroy_process_group()
