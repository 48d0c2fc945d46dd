"""Machines with GPUs, simulated: what is decided, reported and set there.

Covers: a CPU build of torch beside GPUs, GPUs that torch doesn't see, several ranks on one GPU, the variables of ranks
with GPUs, figures of GPUs. The GPUs are those of ``fake_nvml.c``.
Does not cover: CUDA and NCCL (``jupyter disttrain gpu-check`` on a machine with GPUs), waits (``test_device_waits``).
"""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_disttrain.client.cells.cell_state import CellState
from jupyter_disttrain.client.cells.events import Died
from jupyter_disttrain.client.recovery import memory_shortage
from jupyter_disttrain.client.startup.gpus import (
    choose_backend,
    choose_gpus,
    devices_of_job,
    note_of_devices,
    usable_gpus,
)
from jupyter_disttrain.config.cluster import ClusterConfig
from jupyter_disttrain.config.frameworks import OF_SESSION_GROUPS
from jupyter_disttrain.errors import UsageError
from jupyter_disttrain.features.scripts.failure_report import how_shown, report_of
from jupyter_disttrain.features.scripts.runner import of_rank
from jupyter_disttrain.launchers.rank_environment import library_defaults
from jupyter_disttrain.protocol.messages import RankHello, RankVitals
from jupyter_disttrain.protocol.rank_death import RankDeath
from jupyter_disttrain.rank.kernel import requests
from jupyter_disttrain.rank.libraries import defaults as on_rank
from jupyter_disttrain.rank.libraries import gpu_errors

from ..records import rank_info

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
INFO = rank_info(1, 2, backend="nccl", device="cuda:1")


@pytest.mark.parametrize(
    ("options", "seen", "shown", "message"),
    [
        ({}, (4, 4), 8, None),
        ({"n": 8}, (1,) * 8, 8, "the driver reports 8 GPUs on vm, and torch on a rank sees 1 "),
        ({"n": 8, "share_gpus": True}, (1,) * 8, 8, None),
        ({"backend": "nccl"}, (0, 0), 2, "sees none of its 2 GPUs: it is built for CUDA 13.0, which this driver"),
    ],
)
def test_gpus_are_those_that_torch_sees(
    options: dict[str, Any], seen: tuple[int, ...], shown: int, message: str | None
) -> None:
    hellos = [replace(HELLO, pid=pid, cuda_devices=count) for pid, count in enumerate(seen)]
    if message is not None:
        with pytest.raises(UsageError, match=message):
            usable_gpus(ClusterConfig(**options), hellos, {"vm": shown})
        return
    found = usable_gpus(ClusterConfig(**options), hellos, {"vm": shown})
    assert found == {"vm": seen[0]}
    shares = len(seen) > seen[0]
    assert choose_backend(ClusterConfig(**options), hellos, found) == ("gloo" if shares else "nccl")


def test_hosts_are_refused_if_only_some_have_torch_for_their_gpus() -> None:
    hellos = [HELLO, replace(HELLO, host="other", cuda_devices=0, accelerator="CPU")]
    with pytest.raises(UsageError, match=r"on other sees none of its 2 GPUs: it is a CPU build \(torch on other hosts"):
        usable_gpus(ClusterConfig(), hellos, {"vm": 2, "other": 2})


def test_job_may_give_each_rank_one_gpu_and_nccl_needs_one() -> None:
    pinned = [replace(HELLO, pid=pid, cuda_devices=1, visible_gpus=str(pid)) for pid in range(8)]
    backend, count, note = devices_of_job(ClusterConfig(), pinned)
    assert (backend, count) == ("nccl", 1)
    assert note.startswith("each rank of this job sees 1 GPU of its own, so torch.cuda.set_device(LOCAL_RANK) fails: ")
    assert devices_of_job(ClusterConfig(), [replace(each, visible_gpus="") for each in pinned]) == ("gloo", 0, "")
    assert devices_of_job(ClusterConfig(), [replace(HELLO, pid=pid) for pid in range(2)]) == ("nccl", 2, "")
    blind = [HELLO, replace(HELLO, host="other", cuda_devices=0, accelerator="CPU")]
    with pytest.raises(UsageError, match="on other sees none: it is a CPU build; start the job with --backend gloo"):
        devices_of_job(ClusterConfig(backend="nccl"), blind)
    assert devices_of_job(ClusterConfig(), blind) == ("gloo", 0, "")


@pytest.mark.parametrize("accelerator", ["ROCm 6.4", "XPU", "MPS"])
def test_unsupported_accelerators_are_named(accelerator: str) -> None:
    hellos = [replace(HELLO, cuda_devices=0, accelerator=accelerator)]
    assert f"is built for {accelerator}, which is not supported yet" in note_of_devices(ClusterConfig(), hellos, {})
    assert note_of_devices(ClusterConfig(backend="gloo"), hellos, {}) == ""


def test_ranks_sharing_a_gpu_with_nccl_get_distinct_host_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jupyter_disttrain.client.startup.gpus.count_gpus", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = ClusterConfig(n=2, backend="nccl", share_gpus=True)
    with pytest.raises(UsageError, match="NCCL supports one rank per GPU"):
        choose_gpus(config)
    monkeypatch.setenv("NCCL_HOSTID", "host-{rank}")
    assert choose_gpus(config) == ["0"]
    assert requests._host_id(1) == {"NCCL_HOSTID": "host-1"}


def test_nccl_watchdog_is_off_in_sessions_and_on_in_scripts_unless_set_by_the_user(
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


@pytest.mark.parametrize(
    ("text", "is_lost", "message"),
    [
        ("CUDA error: device-side assert triggered", True, "CUDA_LAUNCH_BLOCKING=1"),
        ("CUDA error: an illegal memory access was encountered", True, "CUDA_LAUNCH_BLOCKING=1"),
        ("CUDA error: invalid device ordinal", False, "in jobs that assign one GPU to each process"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB.", False, "torch.cuda.empty_cache()"),
        ("NCCL error in: x.cpp:1, unhandled system error (run with NCCL_DEBUG=INFO)", False, "NCCL_DEBUG=WARN"),
        ("something else", False, ""),
    ],
)
def test_gpu_errors_have_advice(text: str, is_lost: bool, message: str) -> None:
    error = RuntimeError(text)
    assert gpu_errors.is_context_lost(str(error)) == is_lost
    assert message in gpu_errors.advice(error, str(error))
    assert bool(gpu_errors.advice(error, str(error))) == bool(message)


def test_lost_context_of_a_program_is_not_the_rank_s() -> None:
    shell = SimpleNamespace(colors="nocolor", InteractiveTB=SimpleNamespace(mode="Plain"))
    report = report_of(RuntimeError("CUDA error: device-side assert triggered"), how_shown(shell))
    assert not report.get("device_lost")
    assert "gets a new one" not in report["evalue"]
    assert "CUDA_LAUNCH_BLOCKING=1" in report["evalue"]


def test_gpu_out_of_memory_is_reported_with_gpu_memory() -> None:
    error = {"ename": "OutOfMemoryError", "evalue": "CUDA out of memory. Tried to allocate 2.00 GiB."}
    gpu = {"memory_used_bytes": 79 * 2**30, "memory_total_bytes": 80 * 2**30, "others": 1}
    vitals = {0: RankVitals(time_s=0.0, beat_s=0.0, state="idle", gpu=gpu)}
    text = memory_shortage.after_failure(error, [], lambda: vitals)
    assert text == "GPU memory in use: rank 0 79.0 of 80.0 GiB (with 1 other process)"
    error = {"ename": "RuntimeError", "evalue": "DefaultCPUAllocator: can't allocate memory"}
    assert memory_shortage.after_failure(error, [], lambda: vitals).startswith("memory held: ")


def test_death_by_cuda_or_watchdog_is_reported_with_its_line() -> None:
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
