"""Machines with GPUs, without one: what is decided, said and set there.

Covers: a CPU build of torch beside GPUs, GPUs that torch doesn't see, several ranks on one GPU, the variables of ranks
with GPUs, figures of GPUs. The GPUs are those of ``fake_nvml.c``.
Does not cover: CUDA and NCCL (``jupyter disttrain gpu-check`` on a machine with GPUs), waits (``test_device_waits``).
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_disttrain.cluster import memory
from jupyter_disttrain.cluster.cell_state import CellState
from jupyter_disttrain.cluster.devices import choose_backend, choose_gpus, note_of_devices, usable_gpus
from jupyter_disttrain.cluster.events import Died
from jupyter_disttrain.cluster.rank_environment import library_defaults, session_environment
from jupyter_disttrain.config import ClusterConfig
from jupyter_disttrain.engine import gpu_errors
from jupyter_disttrain.engine import library_defaults as on_rank
from jupyter_disttrain.engine.programs import of_rank
from jupyter_disttrain.errors import UsageError
from jupyter_disttrain.framework_variables import OF_SESSION_GROUPS
from jupyter_disttrain.messages import RankDeath, RankHello, RankVitals
from jupyter_disttrain.ranks import RankInfo

from .notebook_driver import Notebook

HELLO = RankHello(
    engine="engine",
    host="vm",
    pid=100,
    nanny_pid=200,
    launch_rank=None,
    mpi=None,
    torch="2.13.0",
    cuda_devices=2,
    accelerator="CUDA 13.0",
)
INFO = RankInfo(
    rank=1,
    world_size=2,
    local_rank=1,
    local_world_size=2,
    node_rank=0,
    node_count=1,
    host="vm",
    pid=1,
    backend="nccl",
    device="cuda:1",
)


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for LD_LIBRARY_PATH with a library that shows FAKE_GPUS GPUs."""
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True)
    return str(folder)


def test_torch_without_cuda_beside_gpus_works_on_the_cpu_and_says_why(nvml: str) -> None:
    environment = os.environ | {"LD_LIBRARY_PATH": nvml, "FAKE_GPUS": "2"}
    with Notebook(env=environment) as notebook:
        notebook.run("%load_ext jupyter_disttrain").check()
        refused = notebook.run("%dist_init -n 4 --backend nccl --share-gpus --launcher local")
        assert "NCCL takes one rank per GPU" in refused.error
        refused = notebook.run("%dist_init -n 1 --backend nccl --launcher local")
        assert refused.error.startswith("UsageError: torch 2.")
        assert "sees none of its 2 GPUs: it is a CPU build; install a CUDA build of torch there" in refused.error
        started = notebook.run("%dist_init --launcher local").check()  # one rank per GPU, as without the CPU build
        assert "cpu · gloo\nranks use the CPU: torch 2." in started.text
        assert "sees none of the 2 GPUs of" in started.text
        code = "import os; str(device), os.environ['ACCELERATE_USE_CPU'], os.environ['CUDA_DEVICE_ORDER']"
        seen = notebook.run(f"set(cluster.run({code!r}).results.values())").check()
        assert seen.text == "{('cpu', 'true', 'PCI_BUS_ID')}"
        notebook.run("%dist_shutdown").check()


@pytest.mark.parametrize(
    ("options", "seen", "shown", "says"),
    [
        ({}, (4, 4), 8, None),
        ({"n": 8}, (1,) * 8, 8, "the driver shows 8 GPUs on vm, and torch on a rank sees 1 "),
        ({"n": 8, "share_gpus": True}, (1,) * 8, 8, None),
        ({"backend": "nccl"}, (0, 0), 2, "sees none of its 2 GPUs: it is built for CUDA 13.0, which this driver"),
    ],
)
def test_what_torch_sees_of_the_gpus_counts(
    options: dict[str, Any], seen: tuple[int, ...], shown: int, says: str | None
) -> None:
    hellos = [replace(HELLO, pid=pid, cuda_devices=count) for pid, count in enumerate(seen)]
    if says is not None:
        with pytest.raises(UsageError, match=says):
            usable_gpus(ClusterConfig(**options), hellos, {"vm": shown})
        return
    found = usable_gpus(ClusterConfig(**options), hellos, {"vm": shown})
    assert found == {"vm": seen[0]}
    shares = len(seen) > seen[0]
    assert choose_backend(ClusterConfig(**options), hellos, found) == ("gloo" if shares else "nccl")


def test_hosts_of_which_only_some_have_a_torch_for_their_gpus_are_refused() -> None:
    hellos = [HELLO, replace(HELLO, host="other", cuda_devices=0, accelerator="CPU")]
    with pytest.raises(UsageError, match=r"on other sees none of its 2 GPUs: it is a CPU build \(torch on other hosts"):
        usable_gpus(ClusterConfig(), hellos, {"vm": 2, "other": 2})


@pytest.mark.parametrize("accelerator", ["ROCm 6.4", "XPU", "MPS"])
def test_accelerators_that_are_not_supported_are_named(accelerator: str) -> None:
    hellos = [replace(HELLO, cuda_devices=0, accelerator=accelerator)]
    assert f"is built for {accelerator}, which is not supported yet" in note_of_devices(ClusterConfig(), hellos, {})
    assert note_of_devices(ClusterConfig(backend="gloo"), hellos, {}) == ""


def test_ranks_may_share_a_gpu_with_nccl_as_hosts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jupyter_disttrain.cluster.devices.count_gpus", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = ClusterConfig(n=2, backend="nccl", share_gpus=True)
    with pytest.raises(UsageError, match="NCCL takes one rank per GPU"):
        choose_gpus(config)
    monkeypatch.setenv("NCCL_HOSTID", "host-{rank}")
    assert choose_gpus(config) == ["0"]
    assert session_environment(INFO, "run")["NCCL_HOSTID"] == "host-1"


def test_torch_s_watchdog_is_off_in_sessions_unless_the_user_sets_it_and_on_in_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    defaults = library_defaults(INFO)
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in library_defaults(replace(INFO, device="cpu"))
    monkeypatch.setattr(on_rank, "_set", {})
    for name in defaults:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        on_rank.set_defaults(defaults)
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
        assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1"
        program = of_rank({"RANK": "1"}, 29500)
    assert {name: program.get(name) for name in OF_SESSION_GROUPS} == dict.fromkeys(OF_SESSION_GROUPS) | {
        "TORCH_NCCL_ENABLE_MONITORING": "1"
    }


FIGURES = """
import os
from jupyter_disttrain.engine.devices import open_gpu
from jupyter_disttrain.doctor import gpus
uuid = "GPU-00000000-0000-0000-0000-000000000001"
print(open_gpu("cuda:0", os.getpid(), uuid).read()["name"])  # NVML's order may be another
print("others" in open_gpu("cuda:0", os.getpid()).read())  # a process that is not here: the host's number of our own
os.environ["FAKE_GPU_PID"] = str(os.getpid())
print(open_gpu("cuda:0", os.getpid()).read()["others"])
os.environ["CUDA_VISIBLE_DEVICES"] = "1,GPU-00000000-0000-0000-0000-0000000000"
print(open_gpu("cuda:0", 1).read()["name"], "|", open_gpu("cuda:1", 1).read()["name"])
os.environ["FAKE_MIG"] = "1"
print([finding.subject for finding in gpus.find() if finding.status == "warning"])
"""


def test_figures_are_those_of_the_rank_s_gpu_and_count_no_process_that_can_t_be_known(nvml: str) -> None:
    environment = os.environ | {"LD_LIBRARY_PATH": nvml, "FAKE_GPUS": "2"}
    done = subprocess.run([sys.executable, "-c", FIGURES], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "FAKE H100 1",
        "False",
        "0",
        "FAKE H100 1 | FAKE H100 0",
        "['MIG', 'torch on GPUs']",
    ], done.stderr


@pytest.mark.parametrize(
    ("text", "is_lost", "says"),
    [
        ("CUDA error: device-side assert triggered", True, "CUDA_LAUNCH_BLOCKING=1"),
        ("CUDA error: an illegal memory access was encountered", True, "CUDA_LAUNCH_BLOCKING=1"),
        ("CUDA error: invalid device ordinal", False, "the variable device"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB.", False, "torch.cuda.empty_cache()"),
        ("NCCL error in: x.cpp:1, unhandled system error (run with NCCL_DEBUG=INFO)", False, "NCCL_DEBUG=WARN"),
        ("something else", False, ""),
    ],
)
def test_errors_of_gpus_come_with_advice(text: str, is_lost: bool, says: str) -> None:
    error = RuntimeError(text)
    assert gpu_errors.is_context_lost(str(error)) == is_lost
    assert says in gpu_errors.advice(error, str(error))
    assert bool(gpu_errors.advice(error, str(error))) == bool(says)


def test_too_little_memory_of_a_gpu_is_told_with_the_memory_of_gpus() -> None:
    told = {"ename": "OutOfMemoryError", "evalue": "CUDA out of memory. Tried to allocate 2.00 GiB."}
    assert memory.is_shortage_of_gpu(told)
    assert not memory.is_shortage(told)
    assert memory.is_shortage({"ename": "RuntimeError", "evalue": "DefaultCPUAllocator: can't allocate memory"})
    gpu = {"memory_used_bytes": 79 * 2**30, "memory_total_bytes": 80 * 2**30, "others": 1}
    vitals = {0: RankVitals(time_s=0.0, beat_s=0.0, state="idle", gpu=gpu)}
    assert memory.held_on_gpus(vitals) == "GPU memory in use: rank 0 79.0 of 80.0 GiB (with 1 other process)"


def test_a_death_by_cuda_or_by_torch_s_watchdog_leads_with_its_line() -> None:
    death = RankDeath(
        engine="engine",
        pid=100,
        host="vm",
        exit_code=None,
        signal_number=6,
        crash="",
        stderr_tail="what():  [Rank 0] Process group watchdog thread terminated: CUDA error: an illegal\nx\n",
        expected=False,
    )
    state = CellState([0], {0: "vm"})
    state.apply(Died(rank=0, time_s=0.0, record=death))
    assert state.failures[0].evalue.startswith(
        "process 100 was killed by SIGABRT: what():  [Rank 0] Process group watch"
    )


GPU_CHECK = [sys.executable, "-m", "jupyter_disttrain.cli", "gpu-check"]


def test_gpu_check_says_that_there_is_no_gpu(nvml: str) -> None:
    environment = os.environ | {"LD_LIBRARY_PATH": nvml, "FAKE_GPUS": "0"}
    done = subprocess.run(GPU_CHECK, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.startswith("gpu-check: no NVIDIA GPU is visible here")
    environment["FAKE_GPUS"] = "1"
    done = subprocess.run(GPU_CHECK, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.startswith("gpu-check: this torch, built for CPU, sees no GPU")) == (2, True)


def test_gpu_check_drives_real_ranks() -> None:
    checks = "start,failure,death in forming,out of memory"
    done = subprocess.run(
        [*GPU_CHECK, "--device", "cpu", "--only", checks], capture_output=True, text=True, check=False
    )
    results = {line[:20].strip(): line[21:30].strip() for line in done.stdout.splitlines()[:-1]}
    expected = dict.fromkeys(checks.split(","), "ok") | {"out of memory": "skipped"}
    assert results == expected, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "3 ok, 0 failed, 1 skipped, on cpu"
    assert done.returncode == 0
