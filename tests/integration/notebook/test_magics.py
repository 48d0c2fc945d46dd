"""The magics as a user types them."""

from __future__ import annotations

import queue
import re
import threading
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from ...support.process_tools import wait_until
from ...support.recovery_tools import HOST

if TYPE_CHECKING:
    from pathlib import Path

    from ...support.notebook_driver import Notebook


def request(notebook: Notebook, request: str, *args: Any) -> dict[str, Any]:
    """Send a request on the shell channel and return its reply."""
    msg_id = getattr(notebook.client, request)(*args)
    while True:
        message = notebook.client.get_shell_msg(timeout=60)
        if message["parent_header"].get("msg_id") == msg_id:
            return dict(message["content"])


def complete(notebook: Notebook, text: str) -> list[str]:
    return list(request(notebook, "complete", text)["matches"])


def test_question_mark_shows_the_same(notebook: Notebook) -> None:
    notebook.client.execute("%dist_init?", allow_stdin=False)
    payload = notebook.client.get_shell_msg(timeout=60)["content"]["payload"]
    assert "--share-gpus" in payload[0]["data"]["text/plain"]
    try:
        while True:
            notebook.client.get_iopub_msg(timeout=0.2)
    except queue.Empty:
        pass


def test_options_and_their_choices_are_completed(notebook: Notebook) -> None:
    assert complete(notebook, "%dist_init --la") == ["--launcher"]
    assert complete(notebook, "%dist_init --launcher ")[-4:] == ["mpi", "local", "ssh", "slurm"]  # after Jedi
    assert complete(notebook, "%dist_init --backend n")[-2:] == ["nccl", "none"]
    assert complete(notebook, "%%distributed --no") == ["--noblock"]
    assert "%dist_init" in complete(notebook, "%dist_in")


def test_status_shows_each_rank(notebook: Notebook) -> None:
    notebook.run("%%distributed -o pids\nimport os; os.getpid()").check()
    pids = notebook.run("print(*pids.values())").text.split()
    assert wait_until(lambda: "MiB" in notebook.run("%dist_status --text").text)
    title, head, *rows = notebook.run("%dist_status --text").check().text.splitlines()
    assert title == "default: ranks 0-1 · mpi · gloo"
    assert head.split() == ["rank", "state", "cell", "host", "local", "device", "pid", "CPU", "memory"]
    for rank, row in enumerate(rows[:2]):
        assert re.fullmatch(rf"  {rank} +idle +\d+ +{HOST} +{rank} +cpu +{pids[rank]} +\d+ % +\d+ MiB", row), row
    assert re.fullmatch(rf"  {HOST}: \d+ cores \d+ % busy, load [\d.]+ · memory .* GiB · disk .* free · .*", rows[2])


def test_view_outlives_a_reset(bare_notebook: Notebook) -> None:
    bare_notebook.run("%dist_init -n 2 --launcher local --backend none").check()
    shown = bare_notebook.run("%dist_status").check()
    assert "<Cluster 'default': ranks 0-1 on " in shown.text
    assert "rank  state" in shown.text
    bare_notebook.run("%dist_reset").check()
    threads = bare_notebook.run("import threading; [t.name for t in threading.enumerate()]").text
    assert "disttrain widget" in threads
    assert "callback" not in bare_notebook.run("%%distributed\nprint('on')").check().text
    bare_notebook.run("%dist_shutdown").check()
    output = "threading.enumerate()"
    assert wait_until(lambda: "disttrain widget" not in bare_notebook.run(f"[t.name for t in {output}]").text)


def test_every_cell_runs_on_the_ranks_until_switched_off(notebook: Notebook) -> None:
    assert notebook.run("%dist_mode").check().text == "cells run in the notebook"
    try:
        output = notebook.run("%dist_mode -e").check().text
        assert (
            output
            == "every cell now runs on ranks 0-1, except those that begin with %%local; %dist_mode -d turns this off"
        )
        assert notebook.run("%%local\nprint('rank' in globals())").check().text == "False"
        assert notebook.run("here = rank\nprint(world_size)").check().lines == ["ranks 0-1 │ 2"]
        assert notebook.run("%%rank 1\nprint(here)").check().text == "1"
        assert notebook.run("%sync").check().text.startswith("ranks 0-1 reached the barrier after ")
        failing = notebook.run("x = 1\n1 / 0")
        assert failing.error == f"RankFailure: ranks 0-1 ({HOST}), line 2: ZeroDivisionError: division by zero"
    finally:
        assert notebook.run("%dist_mode -d").check().text == "cells run in the notebook again"
    assert notebook.run("'here' in globals()").text == "False"


def test_rank_specifications_in_a_cell(notebook: Notebook) -> None:
    for first in ("%%rank[1]", "%%rank 1", "%%rank [1]", "%%rank(1)", "%%rank1", "%%distributed -r 1"):
        assert notebook.run(f"{first}\nprint('rank', rank)").check().text == "rank 1", first
    for first in ("%%rank[0,1]", "%%rank [0-1]", "%%rank [0, 1]", "%%rank 0 1", "%%rank 0-1", "%%distributed"):
        assert notebook.run(f"{first}\nprint('here')").check().lines == ["ranks 0-1 │ here"], first


def test_braces_and_dollars_are_passed_as_user_code(notebook: Notebook) -> None:
    notebook.run("HOME = 'expanded'").check()
    code = "%%distributed\nHOME = 3\nprint(f'{HOME}', '$HOME', {HOME: 1})"
    assert notebook.run(code).check().lines == ["ranks 0-1 │ 3 $HOME {3: 1}"]


def test_cell_without_waiting_returns_its_outcome_later(notebook: Notebook) -> None:
    output = notebook.run("%%distributed --noblock -o squares\nprint('behind', rank)\nrank ** 2").check().text
    assert output == "running on ranks 0-1; %dist_status shows the progress, %dist_wait shows the result"
    outcome = notebook.run("%dist_wait").check()
    assert sorted(outcome.lines) == ["rank 0 │ 0", "rank 0 │ behind 0", "rank 1 │ 1", "rank 1 │ behind 1"]
    assert notebook.run("squares").check().text == "{0: 0, 1: 1}"
    assert notebook.run("%dist_wait").error == (
        "UsageError: no cell runs in the background; start one with %%distributed --noblock"
    )


def test_cell_that_fails_without_waiting_fails_when_waited_for(notebook: Notebook) -> None:
    notebook.run("%%rank 1 --noblock\nx = 1\n1 / 0").check()
    error = notebook.run("%dist_wait").error
    assert error == f"RankFailure: rank 1 ({HOST}), line 3: ZeroDivisionError: division by zero"


@pytest.mark.parametrize("kind", ["cell", "script"])
def test_timeout_of_a_cell_without_waiting_interrupts_it(notebook: Notebook, kind: str, tmp_path: Path) -> None:
    code = "import time\nwhile True: time.sleep(0.01)\n"
    script = tmp_path / "endless.py"
    script.write_text(code)
    options = "--noblock --timeout 0.5"
    notebook.run(f"%%distributed {options}\n{code}" if kind == "cell" else f"%dist_run {options} {script}").check()
    status = "{entry.state for entry in cluster.table} == {'idle'}"
    assert wait_until(lambda: notebook.run(status).check().text == "True"), "no thread waits for it"
    ended = notebook.run("%dist_wait").error
    assert ended == "CellTimeoutError: the cell ran longer than 0.5 s and was interrupted"


def test_ranks_that_run_behind_refuse_another_cell(notebook: Notebook) -> None:
    notebook.run("%%rank 1 --noblock\nimport time, os\nwhile not os.path.exists(f'/proc/self/fd/0x'): time.sleep(0.01)")
    busy = notebook.run("%%distributed\npass").error
    assert re.fullmatch(
        r"UsageError: rank 1 still runs cell \d+; wait with %dist_wait, interrupt with %dist_interrupt, "
        r"use other ranks with -r, or %dist_reset",
        busy,
    ), busy
    assert notebook.run("%%rank 0\nprint('free')").check().text == "free"
    assert notebook.run("%dist_interrupt -r 0").check().text == "rank 0 runs no cell"
    assert wait_until(lambda: "line 3" in notebook.run("%dist_where").check().text)
    assert re.fullmatch(
        r"rank 1 has ended cell \d+\n%dist_wait shows the result", notebook.run("%dist_interrupt").check().text
    )
    assert notebook.run("%dist_wait").error == f"RankFailure: rank 1 ({HOST}), line 3: KeyboardInterrupt"


def test_defaults_are_traitlets(bare_notebook: Notebook) -> None:
    bare_notebook.run("%config DistributedMagics.num_ranks = 3").check()
    bare_notebook.run("%config DistributedMagics.backend = 'none'").check()
    bare_notebook.run("%config DistributedMagics.launcher = 'local'").check()
    started = bare_notebook.run("%dist_init").check().text
    assert re.fullmatch(rf"ranks 0-2 ready in \d+\.\d s · {HOST} · cpu · none\n?", started)
    outcome = bare_notebook.run("%config DistributedMagics.hang_after = 0.5").check()
    assert outcome.text == ""  # applies to a running cluster from now on
    held = bare_notebook.run(
        "(cluster.config.hang_after_s, cluster._session.supervisor._state.config.hang_after_s)"
    ).check()
    assert held.text == "(0.5, 0.5)"
    outcome = bare_notebook.run("%config DistributedMagics.sample = 5.0").check()
    assert (
        outcome.text == "sample can't change while ranks run: 'default' keeps its value, the next %dist_init uses this"
    )
    assert "grace" in bare_notebook.run("%config DistributedMagics.grace = -1").text  # IPython prints the refusal
    shown = bare_notebook.run("%config DistributedMagics").check().text
    assert "DistributedMagics.num_ranks=<Int>" in shown
    assert bare_notebook.run("%sync").error == (
        "UsageError: these ranks have no process group; start them without --backend none"
    )
    assert bare_notebook.run("%dist_shutdown --all").check().text == "ranks 0-2 ended"


@pytest.mark.parametrize("launcher", ["mpi", "local"])
def test_interrupted_start_leaves_nothing(bare_notebook: Notebook, launcher: str) -> None:
    folders = (
        "import os; from jupyter_core.paths import jupyter_runtime_dir as d; sorted(os.listdir(d() + '/disttrain'))"
    )
    before = bare_notebook.run(f"os = __import__('os'); {folders}").text
    watcher = threading.Thread(target=_interrupt_when_a_rank_starts, args=[bare_notebook])
    watcher.start()
    outcome = bare_notebook.run(f"%dist_init -n 3 --launcher {launcher}")
    watcher.join()
    assert (
        outcome.text == "StartInterruptedError: the start was interrupted; all processes that it had started have ended"
    )
    assert bare_notebook.run("%dist_status").error.startswith("UsageError: no cluster is running")
    assert bare_notebook.run(folders).check().text == before or "FileNotFoundError" in before


def test_interrupted_reset_states_that_the_cluster_has_ended(bare_notebook: Notebook) -> None:
    bare_notebook.run("%config DistributedMagics.warm = False").check()  # so that a start takes longer
    bare_notebook.run("%dist_init -n 2 --launcher local").check()
    watcher = threading.Thread(target=_interrupt_when_a_rank_starts, args=[bare_notebook])
    watcher.start()
    outcome = bare_notebook.run("%dist_reset")
    watcher.join()
    assert outcome.error == (
        "StartInterruptedError: the reset was interrupted, and the cluster has ended; start another with %dist_init"
    )
    assert bare_notebook.run("%dist_status").error.startswith("UsageError: no cluster is running")


def _interrupt_when_a_rank_starts(notebook: Notebook) -> None:
    kernel = psutil.Process(notebook.pid)
    before = kernel.children(recursive=True)
    while not any(_is_rank(child) for child in kernel.children(recursive=True) if child not in before):
        pass  # it takes a second longer until it is up
    notebook.interrupt()


def _is_rank(process: psutil.Process) -> bool:
    try:
        return "jupyter_disttrain.rank" in process.cmdline()
    except psutil.Error:
        return False  # it ended at this moment
