"""Define the cells of the fault campaign.

Covers: the cell that prepares a round, the cells in which a fault occurs, the cells that check the session afterwards.
Does not cover: causing the faults (kinds, first_use).
"""

from __future__ import annotations

SET_VARIABLES = "number, tensor = {value} + rank, torch.full((1000,), float({value} + rank))"

IMPORTS = """
import ctypes, os, sys, time
from torch.utils.data import DataLoader, TensorDataset
from torch.nn.parallel import DistributedDataParallel
"""

PREPARE = (
    IMPORTS
    + """
def inject(step):
    "Cause the fault on the victim at its step."
    if rank != victim or step != fault_step:
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

victim, fault_step, fault = {victim}, {step}, {fault!r}
"""
)

CELLS = {
    "python loop": """
step = 0
while True:
    inject(step)
    sum(range(2000))
    step += 1
""",
    "all_reduce": """
step = 0
while True:
    inject(step)
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
    inject(step)
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
        inject(step)
        dist.all_reduce(batch)
        step += 1
""",
}

# With MPI: COMM_WORLD is restored too, as long as one of the job's first processes runs.
MPI_CELL = """
step = 0
while True:
    inject(step)
    step = comm.allreduce(step) // world_size + 1
"""

# Use what an interrupted cell used, and run to the end.
PROBES = {
    "ddp step": """
probed = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 1)))
optimizer = torch.optim.SGD(probed.parameters(), lr=1e-3)
probed(torch.randn(16, 32)).pow(2).mean().backward()
optimizer.step()
assert torch.is_grad_enabled() and all(each.grad is not None for each in probed.parameters())
""",
    "data loader": """
probed = DataLoader(TensorDataset(torch.arange(64.0)), batch_size=8, num_workers=2)
assert sum(float(batch.sum()) for (batch,) in probed) == 2016
""",
}

COMPILED = """
def of_{number}(x, w):
    return (torch.relu(x @ w) * {number}).softmax(-1).sin().sum(0)
x, w = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
compiled = torch.compile(of_{number}, backend={backend!r})(x, w)
assert torch.allclose(compiled, of_{number}(x, w), atol=1e-4)
compiled.sum().backward()
assert torch.is_grad_enabled() and w.grad is not None
"""

# First uses in a process, by kind and variant; each is run a second time, to its end.
FIRST_USES = {
    "torch.compile": {
        backend: COMPILED.replace("{backend!r}", repr(backend)) for backend in ("eager", "aot_eager", "inductor")
    },
    "DDP step": {
        optimizer: f"""
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)))
optimizer = torch.optim.{optimizer}(model.parameters(), lr=1e-3)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(16, 32) + {{number}} % 2).pow(2).mean().backward()
    optimizer.step()
assert torch.is_grad_enabled() and all(each.grad is not None for each in model.parameters())
"""
        for optimizer in ("SGD", "AdamW")
    },
    "import of transformers": {
        "BERT": """
from transformers import BertConfig, BertModel
config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=99)
assert BertModel(config)(torch.tensor([[{number} % 99]])).last_hidden_state.shape == (1, 1, 32)
""",
        "Trainer": """
from transformers import AutoModelForCausalLM, GPT2Config, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_config(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=99))
assert model(torch.tensor([[{number} % 99]])).logits.shape == (1, 1, 99)
""",
    },
}
CPU_S = {"torch.compile": 4.0, "DDP step": 1.5, "import of transformers": 3.4}  # processor time on each rank, about

# More output than fits on the small disk.
FLOOD = """
for line in range(20_000):
    print("x" * 60)
"""

CHECK = """
import os
probe = torch.full((1000,), float(rank + 1))
dist.all_reduce(probe)
mpi_size = comm.allreduce(1) if {has_world} else world_size
tensor_values = globals().get("tensor", torch.zeros(1)).unique().tolist()
(os.getpid(), probe.unique().tolist(), mpi_size, globals().get("number"), tensor_values)
"""

# The file descriptors by kind (socket, pipe, anon_inode or the path), the threads and the child processes.
COUNT = """
import collections, os, pathlib, psutil
this_process = psutil.Process()
kinds = collections.Counter()
for descriptor in pathlib.Path("/proc/self/fd").iterdir():
    try:
        kinds[os.readlink(descriptor).split(":")[0]] += 1
    except FileNotFoundError:
        pass  # the descriptor of this iteration
(os.getpid(), kinds, this_process.num_threads(), len(this_process.children(recursive=True)))
"""
