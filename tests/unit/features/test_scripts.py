"""The environment of scripts, and what their source shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain.features.scripts.runner import outside_job
from jupyter_disttrain.features.scripts.start_method import read_sources
from jupyter_disttrain.protocol.environment import PRELOAD
from jupyter_disttrain.rank.warm.start_label import is_read_before_fork

if TYPE_CHECKING:
    from pathlib import Path


def test_script_gets_nothing_that_a_kernel_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the warm process was started with it, from a notebook."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    assert not {"FORCE_COLOR", "MPLBACKEND"} & outside_job().keys()
    monkeypatch.setenv("MPLBACKEND", "svg")
    assert outside_job()["MPLBACKEND"] == "svg"


def test_source_decides_whether_mpi_is_needed(tmp_path: Path) -> None:
    def uses_mpi(target: str, *, is_module: bool = False) -> bool:
        return read_sources(target, str(tmp_path), is_module=is_module).uses_mpi

    write(tmp_path, "plain.py", "import torch, helper")
    write(tmp_path, "helper.py", "import os")
    assert not uses_mpi("plain.py")
    write(tmp_path, "helper.py", "def main():\n    import horovod.torch as hvd")
    assert uses_mpi("plain.py")
    write(tmp_path, "pack/__init__.py", "")
    write(tmp_path, "pack/train.py", "from .comm import world")
    write(tmp_path, "pack/comm.py", "from mpi4py import MPI as world")
    assert uses_mpi("pack.train", is_module=True)
    write(tmp_path, "pack/comm.py", "world = None")
    write(tmp_path, "pack/__init__.py", "import mpi4py")
    assert uses_mpi("pack.train", is_module=True)
    write(tmp_path, "pack/__init__.py", "")
    assert not uses_mpi("pack.train", is_module=True)
    assert not uses_mpi("no_such_file.py")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('os.environ["A"] = "1"', [("A", "1", False)]),
        ('os.environ["A"] = str(n)', [("A", None, False)]),
        ('os.environ["A"] = os.environ["B"] = "1"', [("A", "1", False), ("B", "1", False)]),
        ('environ.setdefault("A", "1")', [("A", "1", True)]),
        ('os.environ.update(A="1", **more)', [("A", "1", False)]),
        ('os.environ.update({"A": "1", name: "2", **more})', [("A", "1", False)]),
        ('os.environ |= dict(A="1")', [("A", "1", False)]),
        ('os.putenv("A", "1")', [("A", "1", False)]),
        ('os.environ.pop("A", None)', [("A", "", False)]),
        ('del os.environ["A"]', [("A", "", False)]),
        ('os.unsetenv("A")', [("A", "", False)]),
        ('os.environ["A"], b = "1", 2', [("A", None, False)]),
        ('os.environ["A"] += ":b"', [("A", None, False)]),
        ('os.environ["A"] = os.environ.get("A", "1")', [("A", "1", True)]),
        ('os.environ["A"] = os.getenv("B", "1")', [("A", None, False)]),
        ('print(os.environ["A"], os.environ.get("A"), dict(A="1"))', []),
        ('settings["A"] = "1"; settings.update(A="1")', []),
        ("os.environ[name] = value", []),
    ],
)
def test_variables_that_a_script_sets_are_found(
    tmp_path: Path, line: str, expected: list[tuple[str, str | None, bool]]
) -> None:
    write(tmp_path, "sets.py", f"import os\ndef main():\n    {line}\n")
    write(tmp_path, "main.py", "import sets")
    assert read_sources("main.py", str(tmp_path), is_module=False).variables == expected
    write(tmp_path, "sets.py", f"import os\nif True:\n    {line}\nfrom torch import nn\nos.environ['LATE'] = '1'")
    assert read_sources("main.py", str(tmp_path), is_module=False).variables == expected
    unused = "if TYPE_CHECKING:\n    import torch\nfrom .torch import x\ndef f():\n    import torch\n"
    write(tmp_path, "sets.py", f"{unused}{line}\n")
    assert read_sources("main.py", str(tmp_path), is_module=False).variables == expected
    write(tmp_path, "sets.py", f"import torch.nn as nn\n{line}\n")
    assert read_sources("main.py", str(tmp_path), is_module=False).variables == []


@pytest.mark.parametrize(
    ("name", "preloaded", "expected"),
    [
        ("OMP_NUM_THREADS", "", True),
        ("TORCH_LOGS", "", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "", True),  # the name of its backend
        ("CUDA_VISIBLE_DEVICES", "", False),
        ("PYTHONHASHSEED", "", False),  # no effect in a process that sets it
        ("WANDB_MODE", "torch._dynamo", False),
        ("TORCHDYNAMO_DISABLE", "", False),
        ("TORCHDYNAMO_DISABLE", "torch._dynamo", True),
        ("HF_HOME", "", False),
        ("HF_HOME", "transformers", True),
        ("LIGHTNING_HOME", "lightning.pytorch,numpy", True),
    ],
)
def test_variables_count_that_a_new_python_would_read(name: str, preloaded: str, *, expected: bool) -> None:
    assert is_read_before_fork(name, {PRELOAD: preloaded}) == expected


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
