"""ResNet-50 on synthetic images with DDP or Horovod, and their all_reduce; rank 0 prints what they took, as JSON.

BENCH_ARM is ``ddp`` or ``horovod``. A step trains on BENCH_BATCH images of BENCH_IMAGE x BENCH_IMAGE pixels a rank;
each of BENCH_BLOCKS blocks has BENCH_STEPS steps. BENCH_SIZES, say ``1024,4096``, are the bytes to all_reduce.
Runs as it is in a cell, under torchrun (DDP) and under mpiexec (Horovod).
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
WARM_UP_STEPS = max(STEPS, 3)  # DDP settles its buckets after the first, cuDNN its kernels in the first
BLOCK_S, MOST_CALLS = 0.1, 1000  # of a block of all_reduce, and how many calls there are in it at most

gpu = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else None
place = gpu or torch.device("cpu")
if gpu is None:
    torch.set_num_threads(1)  # at every number of ranks: else one rank alone would have all the cores
else:
    torch.backends.cudnn.benchmark = True


class Bottleneck(nn.Module):
    """Convolutions 1x1, 3x3 and 1x1, and the way around them; the stride is that of the 3x3: version 1.5."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.around = nn.Sequential()
        if inputs != outputs or stride != 1:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.around(x))


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
    return model.to(place)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()


class Ddp:
    """DistributedDataParallel in the process group that is there, or in one of its own."""

    path = "nccl" if gpu else "gloo"

    def __init__(self) -> None:
        self.own_group = not dist.is_initialized()
        if self.own_group:
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
        if self.own_group:
            self.barrier()  # who leaves while another still reads its last message makes that one abort
            dist.destroy_process_group()


class Horovod:
    """Horovod's DistributedOptimizer, and beside it a model of its own with a plain one."""

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
        self.hvd.shutdown()  # else its thread goes on to poll, on a core that the next arm needs


class Took(NamedTuple):
    """Seconds that one action took on one rank."""

    wall: float
    thread: float  # of a core that the rank's own thread used
    others: float  # of a core that other threads of its process used: Horovod's, Gloo's


def time_of(action: Callable[[], None], count: int) -> Took:
    """Return what one of ``count`` actions takes here, begun by all ranks together."""
    arm.barrier()
    if gpu is not None:
        torch.cuda.synchronize()
    wall, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
    for _ in range(count):
        action()
    if gpu is not None:
        torch.cuda.synchronize()
    wall, thread, process = time.perf_counter() - wall, time.thread_time() - thread, time.process_time() - process
    return Took(wall / count, thread / count, (process - thread) / count)


def slowest(own: list[Took]) -> list[Took]:
    """Return each action as it was on the rank where it took longest."""
    by_rank = arm.gather(torch.tensor(own, dtype=torch.float64, device=place)).tolist()
    return [Took(*max(ranks)) for ranks in zip(*by_rank, strict=True)]


def all_reduce_seconds(size: int) -> list[float]:
    buffer = torch.zeros(size // 4, device=place)
    time_of(lambda: arm.add(buffer), 2)
    (guess,) = slowest([time_of(lambda: arm.add(buffer), 3)])
    count = max(1, min(MOST_CALLS, round(BLOCK_S / guess.wall)))
    return [took.wall for took in slowest([time_of(lambda: arm.add(buffer), count) for _ in range(BLOCKS)])]


arm = Horovod() if os.environ["BENCH_ARM"] == "horovod" else Ddp()
torch.manual_seed(arm.rank)
images = torch.randn(BATCH, 3, IMAGE, IMAGE, device=place)
labels = torch.randint(CLASSES, (BATCH,), device=place)

time_of(arm.step, WARM_UP_STEPS)
time_of(arm.step_without_communication, WARM_UP_STEPS)
steps, computes = [], []
for _ in range(BLOCKS):  # in turns, so that what the machine does meanwhile hits both
    steps.append(time_of(arm.step, STEPS))
    computes.append(time_of(arm.step_without_communication, STEPS))
computes = slowest(computes)
figures = {
    "path": arm.path,
    "device": "cpu" if gpu is None else torch.cuda.get_device_name(gpu),
    "step_s": [took.wall for took in slowest(steps)],
    "compute_s": [took.wall for took in computes],
    "thread_s": [took.thread for took in computes],
    "others_s": [took.others for took in computes],
    "all_reduce_s": {size: all_reduce_seconds(size) for size in SIZES},
}
if arm.rank == 0:
    print("figures", json.dumps(figures), flush=True)
arm.end()
