"""Ranks that continue after an interrupted cell returned control can still be reached from the notebook."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ...support.process_tools import wait_until
from ...support.recovery_tools import IGNORE_INTERRUPTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...support.notebook_driver import Notebook, Outcome


@pytest.fixture
def short_timeouts(notebook: Notebook) -> Iterator[None]:
    """The notebook returns control soon after the third interrupt, and %dist_interrupt waits long for the ranks."""
    names = "cell_run.GIVE_UP_SECONDS, executor.GIVE_UP_SECONDS"
    notebook.run(
        f"from jupyter_disttrain.client.cells import cell_run, executor\nlimits = {names}\n{names} = 0, 60"
    ).check()
    yield
    notebook.run(f"{names} = limits").check()


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """The file for which rank 1 waits; it exists after the test, so that a test that fails leaves no cell running."""
    path = tmp_path / "let-go"
    yield path
    path.touch()


def leave_running(notebook: Notebook, path: Path) -> Outcome:
    """Run a cell on rank 1 that no interrupt ends before ``path`` exists, and interrupt it three times."""
    return notebook.run(
        f"%%rank 1\n{IGNORE_INTERRUPTS}kept = rank * 11\nheard = stay({str(path)!r})",
        on_message=notebook.interrupt_at("heard 0", "heard 1", "heard 2"),
    )


def test_running_ranks_of_a_returned_cell_are_awaited_and_interrupted(notebook: Notebook, path: Path) -> None:
    given_up = leave_running(notebook, path)
    assert given_up.error.startswith("GivenUpError: interrupted three times; rank 1 has not ended the cell: ")
    assert "%dist_interrupt interrupts again" in given_up.error
    where = notebook.run("%dist_where").check().text
    assert re.search(r"rank 1: in Python code at line \d", where), where
    # An interrupt reaches the ranks that a cell waits for, and their output is shown there.
    waits = notebook.client.execute("%dist_wait", allow_stdin=False)
    interrupt_once = notebook.interrupt_at("rank 1 running")

    def interrupt_and_finish(message: dict[str, Any], outcome: Outcome) -> None:
        interrupt_once(message, outcome)
        if "heard 4" in outcome.text:
            path.touch()

    assert "heard 4" in notebook.outcome(waits, on_message=interrupt_and_finish).check().text
    assert notebook.run("%%rank 1\nprint(kept, heard)").check().text == "11 4"
    assert notebook.run("%dist_wait").error.startswith("UsageError: no cell runs in the background")


@pytest.mark.usefixtures("short_timeouts")
def test_each_interrupt_reaches_ranks_during_dist_wait_and_dist_interrupt(notebook: Notebook, path: Path) -> None:
    leave_running(notebook, path)
    again = notebook.run("%dist_wait", on_message=notebook.interrupt_at("rank 1 running", "heard 4", "heard 5"))
    assert again.error.startswith("GivenUpError: interrupted three times; rank 1 has not ended the cell: ")
    log = Path(notebook.run("print(cluster.log_folder)").check().text) / "rank1.log"

    def interrupt_arrived(count: int) -> bool:
        return f"heard {count}\n" in log.read_text(errors="replace").rpartition("heard 0\n")[2]

    assert wait_until(lambda: interrupt_arrived(6))
    requests = notebook.client.execute("%dist_interrupt", allow_stdin=False)
    assert wait_until(lambda: interrupt_arrived(7))  # its own interrupt
    notebook.interrupt()
    assert wait_until(lambda: interrupt_arrived(8))
    notebook.interrupt()
    assert wait_until(lambda: interrupt_arrived(9))
    path.touch()
    assert re.match(r"rank 1 has ended cell \d+$", notebook.outcome(requests).check().lines[0])
    assert notebook.run("%%rank 1\nprint(kept, heard)").check().text == "11 9"


@pytest.mark.usefixtures("short_timeouts")
def test_dist_status_reports_once_that_ranks_are_back(notebook: Notebook, path: Path) -> None:
    leave_running(notebook, path)
    status = notebook.run("%dist_status --text").check().text
    assert re.search(r"^ *1 +running ", status, re.MULTILINE), status
    assert "has ended cell" not in status
    refused = notebook.run("%%rank 1\npass").error
    assert re.match(r"UsageError: rank 1 still runs cell \d+; .*%dist_wait.*%dist_interrupt", refused), refused
    path.touch()
    messages: list[str] = []

    def status_shows_return() -> bool:
        messages.extend(notebook.run("%dist_status --text").check().lines)
        return any(re.fullmatch(r"rank 1 has ended cell \d+ and kept its variables", line) for line in messages)

    assert wait_until(status_shows_return)
    assert re.search(r"^ *1 +idle ", "\n".join(messages), re.MULTILINE)
    assert "has ended cell" not in notebook.run("%dist_status --text").check().text
    assert notebook.run("%%rank 1\nprint(kept)").check().text == "11"
