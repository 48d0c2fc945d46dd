"""Machines with GPUs, simulated: what is decided, reported and set there.

Covers: a CPU build of torch beside GPUs, figures of GPUs, gpu-check. The GPUs are those of ``fake_nvml.c``.
Does not cover: CUDA and NCCL (``jupyter disttrain gpu-check`` on a machine with GPUs), waits (``test_device_waits``).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ...support.notebook_driver import Notebook


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for LD_LIBRARY_PATH with a library that reports FAKE_GPUS GPUs."""
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).parents[2] / "support" / "fake_nvml.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True)
    return str(folder)


def test_torch_without_cuda_beside_gpus_uses_the_cpu_and_reports_why(nvml: str) -> None:
    environment = os.environ | {"LD_LIBRARY_PATH": nvml, "FAKE_GPUS": "2"}
    with Notebook(env=environment) as notebook:
        notebook.run("%load_ext jupyter_disttrain").check()
        refused = notebook.run("%dist_init -n 4 --backend nccl --share-gpus --launcher local")
        assert "NCCL supports one rank per GPU" in refused.error
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


FIGURES = """
import os
from jupyter_disttrain.features.telemetry.rank.gpu_stats import open_gpu
from jupyter_disttrain.doctor import gpus
uuid = "GPU-00000000-0000-0000-0000-000000000001"
print(open_gpu("cuda:0", uuid).read([])["name"])  # NVML's order may be another
print(open_gpu("cuda:0").read([])["memory_used_bytes"] / 2**30)  # without what the driver reserves
print("others" in open_gpu("cuda:0").read([os.getpid()]))  # a process that is not here: the host's number of our own
os.environ["FAKE_GPU_PID"] = str(os.getpid())
print(open_gpu("cuda:0").read([os.getpid()])["others"])
os.environ["CUDA_VISIBLE_DEVICES"] = "1,GPU-00000000-0000-0000-0000-0000000000"
print(open_gpu("cuda:0").read([])["name"], "|", open_gpu("cuda:1").read([])["name"])
os.environ["FAKE_MIG"] = "1"
print([finding.subject for finding in gpus.find() if finding.status == "warning"])
"""


def test_gpu_figures_are_those_of_the_rank_and_omit_unattributable_processes(nvml: str) -> None:
    environment = os.environ | {"LD_LIBRARY_PATH": nvml, "FAKE_GPUS": "2"}
    done = subprocess.run([sys.executable, "-c", FIGURES], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "FAKE H100 1",
        "1.0",
        "False",
        "0",
        "FAKE H100 1 | FAKE H100 0",
        "['MIG', 'torch on GPUs']",
    ], done.stderr


GPU_CHECK = [sys.executable, "-m", "jupyter_disttrain.cli", "gpu-check"]


def test_gpu_check_reports_a_missing_gpu(nvml: str) -> None:
    environment = os.environ | {"LD_LIBRARY_PATH": nvml, "FAKE_GPUS": "0"}
    done = subprocess.run(GPU_CHECK, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.startswith("gpu-check: no NVIDIA GPU is visible here")
    environment["FAKE_GPUS"] = "1"
    done = subprocess.run(GPU_CHECK, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.startswith("gpu-check: this torch, built for CPU, sees no GPU")) == (2, True)


def test_gpu_check_drives_real_ranks() -> None:
    checks = "start,failure,death in forming,out of memory"
    command = [*GPU_CHECK, "--device", "cpu", "--only", checks]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    results = {row[:17].strip(): row[18:25].strip() for row in done.stdout.splitlines()[:-1]}
    expected = dict.fromkeys(checks.split(","), "ok") | {"out of memory": "skipped"}
    assert results == expected, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "3 ok, 0 failed, 1 skipped, on cpu"
    assert done.returncode == 0
