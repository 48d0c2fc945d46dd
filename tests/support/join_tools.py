"""Processes of jobs that a notebook joins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ENGINE = [sys.executable, "-m", "jupyter_disttrain.rank"]
LAUNCHED_BY_HAND = {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
HOLD = "import os, signal; kept = rank * 11; os.getpid()"
LIMIT_S = 40.0


class Job:
    """A process that is part of a job, or starts all of it; its output is kept."""

    def __init__(self, command: list[str], log: Path, **environment: str) -> None:
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=os.environ | environment,
                cwd=log.parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return self._log.read_text()

    def wait_for_file(self, file: Path) -> dict[str, Any]:
        """Wait until the job has written its file; return the file's content."""
        deadline = time.monotonic() + LIMIT_S
        while not file.exists():
            assert self._process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.02)
        content: dict[str, Any] = json.loads(file.read_text())
        return content

    def end(self) -> int:
        """Wait for the end; return the exit code."""
        return self._process.wait(LIMIT_S)

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self.end()


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Jobs that are killed at the end of the test."""
    started: list[Job] = []
    yield started
    for each in started:
        each.terminate()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "job.json"


def start_process(jobs: list[Job], file: Path, rank: int, world_size: int, *more: str, log: str = "") -> Job:
    """Start one process as torchrun would."""
    variables = LAUNCHED_BY_HAND | {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    command = [*ENGINE, "--join", str(file), "--backend", "none", *more]
    jobs.append(Job(command, file.with_name(log or f"rank{rank}.log"), **variables))
    return jobs[-1]
