"""``jupyter disttrain doctor`` as a user runs it.

Covers: findings on this machine, a broken mpiexec, that torch stays out of its process.
Does not cover: machines with GPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

DOCTOR = [sys.executable, "-m", "jupyter_disttrain.cli", "doctor"]
PACKAGES = ("jupyter_disttrain", "torch", "ipyparallel", "ipykernel", "mpi4py", "jupyterlab")


def run_doctor(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DOCTOR, *options], capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environment}
    )


def findings_by_subject(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {finding["subject"]: finding for finding in json.loads(done.stdout)["findings"]}


@pytest.fixture(scope="module")
def examined() -> subprocess.CompletedProcess[str]:
    return run_doctor("--json")


def test_this_machine_has_no_error_and_every_other_problem_names_its_remedy(
    examined: subprocess.CompletedProcess[str],
) -> None:
    assert (examined.returncode, examined.stderr) == (0, "")
    assert json.loads(examined.stdout)["status"] in ("ok", "warning")
    for finding in json.loads(examined.stdout)["findings"]:
        assert finding["status"] in ("ok", "warning")
        assert (finding["status"] == "ok") == (finding["remedy"] is None)
        assert "\n" not in finding["text"] + (finding["remedy"] or "")


def test_versions_and_what_ran_are_reported(examined: subprocess.CompletedProcess[str]) -> None:
    found = findings_by_subject(examined)
    for package in PACKAGES:
        assert found[package]["text"].startswith(metadata.version(package))
    assert "runs two processes" in found["mpiexec"]["text"]
    assert "MPI" in found["mpiexec"]["text"].partition(", with ")[2]
    assert "all_reduce over" in found["two ranks (mpi)"]["text"]


def test_broken_mpiexec_is_an_error_with_its_remedy_and_ranks_start_without_it(tmp_path: Path) -> None:
    broken = tmp_path / "mpiexec"
    broken.write_text("#!/bin/sh\necho 'libmpi.so.40: cannot open shared object file' >&2\nexit 127\n")
    broken.chmod(0o755)
    done = run_doctor("--json", PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert done.returncode == 1
    assert json.loads(done.stdout)["status"] == "error"
    found = findings_by_subject(done)
    assert found["mpiexec"]["status"] == "error"
    assert str(broken) in found["mpiexec"]["text"]
    assert "libmpi.so.40: cannot open shared object file" in found["mpiexec"]["text"]
    assert f"remove {tmp_path} from PATH" in found["mpiexec"]["remedy"]
    assert found["two ranks (local)"]["status"] == "ok"


def test_text_is_ascii_in_an_ascii_locale_and_torch_and_mpi_are_not_imported() -> None:
    code = (
        "import sys; from jupyter_disttrain.cli import main; status = main(['doctor']); "
        "print(status, sorted({'torch', 'mpi4py.MPI'} & set(sys.modules)))"
    )
    ascii_locale = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    environment = {**os.environ, **ascii_locale}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout
    assert done.stdout.isascii()
    assert "\033" not in done.stdout
    assert f"torch: {metadata.version('torch')}" in done.stdout


def test_closed_pipe_is_not_an_error() -> None:
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {' '.join(DOCTOR)} | head -n 1; exit $?"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stderr, done.returncode) == ("", 141)
