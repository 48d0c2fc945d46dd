"""Run scripts under torchrun, the yardstick that a person would use without this package.

Covers: one run until its end, a run that is held while it is weighed.
Does not cover: the scripts (``workloads``).
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

if TYPE_CHECKING:
    from collections.abc import Iterator

from benchmarks.lib.environment import WORKLOADS

LIMIT_S = 120.0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(
    script: str, ranks: int, arguments: list[str], environment: dict[str, str]
) -> tuple[subprocess.Popen[str], str]:
    token = processes.new_token()
    # torchrun's own default is port 29500, which another run on this machine may hold.
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
    """Run a workload to its end and return what it printed.

    Raises
    ------
    RuntimeError
        If it failed or took longer than two minutes.
    """
    process, token = _start(script, ranks, arguments, environment)
    try:
        text, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired as late:
        raise RuntimeError(f"torchrun {script} took longer than {LIMIT_S:.0f} s") from late
    finally:
        processes.end(token)
        process.wait()
    if process.returncode:
        said = [
            line for line in text.splitlines() if ("Error:" in line or "what()" in line) and "ChildFailed" not in line
        ]
        raise RuntimeError(f"torchrun {script} failed: {(said or ['without a word'])[0].strip()[:160]}")
    return str(text)


def seconds_to_first_all_reduce(ranks: int, environment: dict[str, str]) -> float:
    """Return the time from torchrun's start until its rank 0 had its first all_reduce done."""
    with tempfile.TemporaryDirectory(prefix="disttrain-bench-") as folder:
        started = time.time()
        run("first_all_reduce.py", ranks, [folder], environment)
        return float((Path(folder) / "done").read_text()) - started


def loop_seconds(ranks: int, model: str, environment: dict[str, str], *, tries: int = 3) -> float:
    """Return the seconds that the DDP loop took on rank 0; torchrun's ranks don't come up every time."""
    try:
        text = run("ddp_loop.py", ranks, [], {**environment, "BENCH_MODEL": model})
    except RuntimeError as problem:
        if tries == 1:
            raise
        print(f"    once more, because {problem}", flush=True)
        return loop_seconds(ranks, model, environment, tries=tries - 1)
    return float(text.split("loop seconds ")[1].split()[0])


@contextmanager
def held(ranks: int, environment: dict[str, str]) -> Iterator[tuple[int, list[int]]]:
    """Hold a torchrun whose ranks have done one all_reduce: the agent's pid and the ranks' pids."""
    with tempfile.TemporaryDirectory(prefix="disttrain-bench-") as name:
        folder = Path(name)
        (folder / "hold").touch()
        process, token = _start("first_all_reduce.py", ranks, [name, "hold"], environment)
        files = [folder / f"rank-{rank}.pid" for rank in range(ranks)]
        try:
            deadline = time.monotonic() + LIMIT_S
            while not all(file.exists() and file.read_text() for file in files):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("torchrun's ranks did not come up")
                time.sleep(0.05)
            time.sleep(0.5)  # both sides are weighed at rest
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
