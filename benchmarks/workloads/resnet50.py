"""Train ResNet-50 on synthetic images with DDP or Horovod, and time their all_reduce; rank 0 prints the times as JSON.

BENCH_STRATEGY is ``ddp`` or ``horovod``. A step trains on BENCH_BATCH images of BENCH_IMAGE x BENCH_IMAGE pixels per
rank; each of BENCH_BLOCKS blocks has BENCH_STEPS steps. BENCH_SIZES, e.g. ``1024,4096``, are the bytes to all_reduce.
Runs unchanged in a cell, under torchrun (DDP) and under mpiexec (Horovod).
"""

import importlib
import json
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH, IMAGE, STEPS, BLOCKS = (int(os.environ[f"BENCH_{name}"]) for name in ("BATCH", "IMAGE", "STEPS", "BLOCKS"))
SIZES = [int(size) for size in os.environ.get("BENCH_SIZES", "").split(",") if size]
CLASSES, PARAMETERS = 1000, 25_557_032  # of torchvision's resnet50
WARM_UP_STEPS = max(STEPS, 3)  # DDP rebuilds its buckets after the first, cuDNN selects kernels in the first
BLOCK_S, MAX_CALLS = 0.1, 1000  # duration of a block of all_reduce calls, and the limit of their number

gpu = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else None
device = gpu or torch.device("cpu")
if gpu is None:
    torch.set_num_threads(1)  # at every number of ranks, so that a single rank does not use all cores
else:
    torch.backends.cudnn.benchmark = True


class Bottleneck(nn.Module):
    """Convolutions 1x1, 3x3 and 1x1 with a shortcut; the 3x3 has the stride, as in version 1.5."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut = nn.Sequential()
        if inputs != outputs or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet50() -> nn.Module:
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            layers.append(Bottleneck(inputs, width, 1 if number else stride))
            inputs = 4 * width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))
    found = sum(parameter.numel() for parameter in model.parameters())
    assert found == PARAMETERS, f"ResNet-50 has {PARAMETERS} parameters, not {found}"
    return model.to(device)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()


class Ddp:
    """DistributedDataParallel in the existing process group, or in a new one."""

    path = "nccl" if gpu else "gloo"

    def __init__(self) -> None:
        self.forms_group = not dist.is_initialized()
        if self.forms_group:
            dist.init_process_group(self.path)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.barrier, self.add = dist.barrier, dist.all_reduce
        self.model = DistributedDataParallel(resnet50(), device_ids=None if gpu is None else [gpu.index])
        self.optimizer = sgd(self.model)

    def step(self) -> None:
        train(self.model, self.optimizer)

    def step_without_communication(self) -> None:
        with self.model.no_sync():
            train(self.model, self.optimizer)

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own)
        return torch.stack(parts)

    def end(self) -> None:
        if self.forms_group:
            self.barrier()  # a rank that exits while another still reads its last message makes that one abort
            dist.destroy_process_group()


class Horovod:
    """Horovod's DistributedOptimizer, and a second model with a plain optimizer for steps without communication."""

    def __init__(self) -> None:
        hvd = self.hvd = importlib.import_module("horovod.torch")
        hvd.init()
        self.rank, self.size, self.barrier = hvd.rank(), hvd.size(), hvd.barrier
        self.path = "nccl" if gpu and hvd.nccl_built() else "mpi"
        self.model, self.plain_model = resnet50(), resnet50()
        named = self.model.named_parameters()
        self.optimizer = hvd.DistributedOptimizer(sgd(self.model), named_parameters=named)
        self.plain_optimizer = sgd(self.plain_model)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)

    def step(self) -> None:
        train(self.model, self.optimizer)

    def step_without_communication(self) -> None:
        train(self.plain_model, self.plain_optimizer)

    def add(self, tensor: torch.Tensor) -> None:
        self.hvd.allreduce_(tensor, op=self.hvd.Sum, name=f"sum of {tensor.numel()}")

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        return self.hvd.allgather(own[None], name=f"gather {own.numel()}")

    def end(self) -> None:
        self.hvd.shutdown()  # stops its polling thread, which uses a core that the next measurement needs


class Times(NamedTuple):
    """Times of one action on one rank, in seconds."""

    wall: float
    thread: float  # processor time of the rank's main thread
    others: float  # processor time of the other threads of its process (Horovod, Gloo)


def time_of(action: Callable[[], None], count: int) -> Times:
    """Return the times of one of ``count`` actions on this rank; all ranks begin together."""
    strategy.barrier()
    if gpu is not None:
        torch.cuda.synchronize()
    wall, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
    for _ in range(count):
        action()
    if gpu is not None:
        torch.cuda.synchronize()
    wall, thread, process = time.perf_counter() - wall, time.thread_time() - thread, time.process_time() - process
    return Times(wall / count, thread / count, (process - thread) / count)


def slowest(own: list[Times]) -> list[Times]:
    """Return the times of each action on the rank that took longest."""
    by_rank = strategy.gather(torch.tensor(own, dtype=torch.float64, device=device)).tolist()
    return [Times(*max(ranks)) for ranks in zip(*by_rank, strict=True)]


def all_reduce_seconds(size: int) -> list[float]:
    buffer = torch.zeros(size // 4, device=device)
    time_of(lambda: strategy.add(buffer), 2)
    (estimate,) = slowest([time_of(lambda: strategy.add(buffer), 3)])
    count = max(1, min(MAX_CALLS, round(BLOCK_S / estimate.wall)))
    return [times.wall for times in slowest([time_of(lambda: strategy.add(buffer), count) for _ in range(BLOCKS)])]


strategy = Horovod() if os.environ["BENCH_STRATEGY"] == "horovod" else Ddp()
torch.manual_seed(strategy.rank)
images = torch.randn(BATCH, 3, IMAGE, IMAGE, device=device)
labels = torch.randint(CLASSES, (BATCH,), device=device)

time_of(strategy.step, WARM_UP_STEPS)
time_of(strategy.step_without_communication, WARM_UP_STEPS)
steps, computes = [], []
for _ in range(BLOCKS):  # alternating, so that other load on the machine affects both
    steps.append(time_of(strategy.step, STEPS))
    computes.append(time_of(strategy.step_without_communication, STEPS))
computes = slowest(computes)
results = {
    "path": strategy.path,
    "device": "cpu" if gpu is None else torch.cuda.get_device_name(gpu),
    "step_s": [times.wall for times in slowest(steps)],
    "compute_s": [times.wall for times in computes],
    "thread_s": [times.thread for times in computes],
    "others_s": [times.others for times in computes],
    "all_reduce_s": {size: all_reduce_seconds(size) for size in SIZES},
}
if strategy.rank == 0:
    print("results", json.dumps(results), flush=True)
strategy.end()
