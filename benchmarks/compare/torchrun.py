"""Run scripts under torchrun, the baseline for starts, loops and memory.

Covers: one run until its end, ranks that stay idle while their memory is measured.
Does not cover: the scripts (benchmarks.workloads).
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.lib import processes
from benchmarks.lib.environment import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Iterator
LIMIT_S = 120.0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(
    script: str, ranks: int, arguments: list[str], environment: dict[str, str]
) -> tuple[subprocess.Popen[str], str]:
    token = processes.new_token()
    # torchrun's default port, 29500, may be in use by another run on this machine.
    port = ["--master-port", str(_free_port())]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *port]
    process = subprocess.Popen(
        [*command, str(WORKLOADS / script), *arguments],
        env={**os.environ, **environment, processes.TOKEN_VARIABLE: token},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return process, token


def run(script: str, ranks: int, arguments: list[str], environment: dict[str, str]) -> str:
    """Run a workload and return its output.

    Raises
    ------
    RuntimeError
        If it failed or took longer than ``LIMIT_S``.
    """
    process, token = _start(script, ranks, arguments, environment)
    try:
        text, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"torchrun {script} took longer than {LIMIT_S:.0f} s") from error
    finally:
        processes.end(token)
        process.wait()
    if process.returncode:
        errors = [
            line for line in text.splitlines() if ("Error:" in line or "what()" in line) and "ChildFailed" not in line
        ]
        reason = errors[0].strip()[:160] if errors else f"exit status {process.returncode} without an error message"
        raise RuntimeError(f"torchrun {script} failed: {reason}")
    return str(text)


def seconds_to_first_all_reduce(ranks: int, environment: dict[str, str]) -> float:
    """Return the time from torchrun's start until rank 0 has done its first all_reduce."""
    with tempfile.TemporaryDirectory(prefix="disttrain-bench-") as folder:
        started = time.time()
        run("first_all_reduce.py", ranks, [folder], environment)
        return float((Path(folder) / "done").read_text()) - started


def loop_seconds(ranks: int, model: str, environment: dict[str, str], *, attempts: int = 3) -> float:
    """Return the seconds of the DDP loop on rank 0; retried, since torchrun's ranks do not start every time."""
    try:
        text = run("ddp_loop.py", ranks, [], {**environment, "BENCH_MODEL": model})
    except RuntimeError as error:
        if attempts == 1:
            raise
        print(f"    retrying: {error}", flush=True)
        return loop_seconds(ranks, model, environment, attempts=attempts - 1)
    return float(text.split("loop seconds ")[1].split()[0])


@contextmanager
def running_ranks(ranks: int, environment: dict[str, str]) -> Iterator[tuple[int, list[int]]]:
    """Run ranks that are idle after one all_reduce; yields the agent's pid and the ranks' pids."""
    with tempfile.TemporaryDirectory(prefix="disttrain-bench-") as name:
        folder = Path(name)
        (folder / "hold").touch()
        process, token = _start("first_all_reduce.py", ranks, [name, "hold"], environment)
        files = [folder / f"rank-{rank}.pid" for rank in range(ranks)]
        try:
            deadline = time.monotonic() + LIMIT_S
            while not all(file.exists() and file.read_text() for file in files):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("torchrun's ranks did not start")
                time.sleep(0.05)
            time.sleep(0.5)  # until the ranks are idle
            yield process.pid, [int(file.read_text()) for file in files]
        finally:
            (folder / "hold").unlink()
            try:
                process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                pass
            finally:
                processes.end(token)
                process.wait()
