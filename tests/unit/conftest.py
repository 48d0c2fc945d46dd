"""Fail a unit test that starts one of our processes.

Covers: Python, with or without the package, in a child process, and forks of this one.
Does not cover: other programs, such as a script that stands in for sbatch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine is not a failure
hypothesis.settings.load_profile("untimed")

started: list[str] = []


def note(event: str, arguments: tuple[object, ...]) -> None:
    if event == "subprocess.Popen" and "python" in (command := str(arguments[:2])):
        started.append(command)
    elif event in ("os.fork", "os.forkpty"):
        started.append(event)


sys.addaudithook(note)  # an audit hook cannot be removed


@pytest.fixture(autouse=True)
def no_process_is_started(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that starts a process: it belongs in tests/integration."""
    started.clear()
    yield
    assert not started, f"{Path(request.path).name} belongs in tests/integration, since it starts {started}"
