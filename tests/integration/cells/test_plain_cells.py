"""A cell on the ranks is parsed and ends as in a plain notebook."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain import CellRun
from jupyter_disttrain.client.cells.events import Printed
from jupyter_disttrain.errors import RankFailure

from ...support.notebook_driver import plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from jupyter_disttrain import Cluster
    from jupyter_disttrain.client.cells.events import Event

    from ...support.notebook_driver import Notebook


@pytest.fixture(params=["%%distributed", "%dist_mode -e"])
def magic(request: pytest.FixtureRequest, notebook: Notebook) -> Iterator[str]:
    """The magic that runs a cell on the ranks, with its newline; empty where every cell runs there."""
    if request.param != "%dist_mode -e":
        yield f"{request.param}\n"
        return
    notebook.run("%dist_mode -e").check()
    yield ""
    notebook.run("%dist_mode -d").check()


def test_first_line_is_parsed_as_in_a_plain_notebook(notebook: Notebook, magic: str, tmp_path: Path) -> None:
    (tmp_path / "seen.py").touch()
    shown = {
        f"ls {tmp_path}": "seen.py",
        f"cd {tmp_path}": str(tmp_path),
        "pwd": str(tmp_path),
        "pip --version": "pip ",
        "\npwd": str(tmp_path),
        "    x = 1\n    print(x)": "1",
        "    %env SEEN=set": "env: SEEN=set",
        "!echo by a shell": "by a shell",
        "len?": "Docstring:",
        "%%bash\necho by bash": "by bash",
        "\n%%bash\necho by bash": "by bash",
        ">>> 2 * 21": "42",
        "exit": "",
        "/len 'four'": "4",
    }
    for cell, expected in shown.items():
        outcome = notebook.run(magic + cell)
        assert outcome.status == "ok", (cell, outcome.text)
        assert expected in outcome.text, cell
        assert not expected or "ranks 0-1" in outcome.text, cell
    assert "x" in notebook.run(f"{magic}who").check().text


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ("1/0", 1),
        ("\n1/0", 2),
        ("\n    y = 1\n    1/0", 3),
        ("def f(:", 1),
        ("%%time\n1/0", 1),
        ("!true\n\n1/0", 3),
    ],
)
def test_error_has_the_line_of_the_notebook_cell(notebook: Notebook, magic: str, cell: str, line: int) -> None:
    outcome = notebook.run(magic + cell)
    empty = len(cell) - len(cell.lstrip("\n"))
    wanted = line + 1 if magic else line - empty  # which a plain notebook does not count either
    assert f"line {wanted}" in outcome.text, outcome.text
    assert cell.splitlines()[-1].strip() in outcome.text
    shown = {int(number) for number in re.findall(r"^(?:.*│ )?-+> (\d+) ", outcome.text, re.MULTILINE)}
    assert shown <= {wanted} or cell.startswith("%%"), outcome.text


def test_function_has_the_lines_of_the_cell_that_defined_it(notebook: Notebook) -> None:
    notebook.run("%%distributed\n\ndef fails():\n    1/0").check()
    text = notebook.run("%%distributed\nfails()").text
    assert re.search(r"-> 4     1/0", text), text
    assert "ranks 0-1 (" in text
    assert "), line 2" in text


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ("import sys; sys.exit(0)", ""),
        ("import sys; sys.exit(False)", ""),
        ("raise SystemExit", ""),
        ("exit()", ""),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import sys; sys.exit('no data')", "SystemExit: no data"),
    ],
)
def test_exit_fails_if_its_code_is_not_zero(notebook: Notebook, end: str, error: str) -> None:
    pids = notebook.run("%%distributed\nimport os; os.getpid()").check().lines
    outcome = notebook.run(f"%%distributed\nprint('before')\n{end}\nprint('never')")
    assert "never" not in outcome.text
    assert "To exit" not in outcome.text
    assert notebook.run("%%distributed\nos.getpid()").check().lines == pids
    assert outcome.lines[0] == "ranks 0-1 │ before"
    if error:
        assert error in outcome.text
        assert outcome.status == "error"
    else:
        assert outcome.check().lines == ["ranks 0-1 │ before"]


FORK = """
import os, sys
status = None
pid = os.fork()
if pid == 0:
    print("child of", rank)
    {end}
else:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
status
"""


def test_forked_child_ends_with_the_cell(cluster: Cluster) -> None:
    ends = {"pass": 0, "sys.exit(3)": 3, "sys.exit('no data')": 1, "1/0": 1, "await __import__('asyncio').sleep(0)": 0}
    for end, status in ends.items():
        run = cluster.run(FORK.format(end=end))
        assert run.results == {0: status, 1: status}, end
        assert {rank: run.stdout[rank].count(f"child of {rank}\n") for rank in (0, 1)} == {0: 1, 1: 1}
        message = {"1/0": "ZeroDivisionError: division by zero", "sys.exit('no data')": "no data"}.get(end, "")
        assert message in plain(run.stderr[0])
        assert bool(run.stderr[0]) == bool(message)
    assert cluster.run("x = torch.ones(1); dist.all_reduce(x); x.item()").results == {0: 2.0, 1: 2.0}


NAMES = "rank, world_size, local_rank, local_world_size, node_rank, gpu_id, torch, dist, device, comm, log_metrics, hvd"


def test_reset_keeps_the_predefined_names_of_a_rank(cluster: Cluster) -> None:
    same = f"[id(each) for each in ({NAMES})][6:]"
    before = cluster.run(same).results
    cluster.run("own, rank = 1, 'mine'\n%reset -f")
    assert cluster.run(same).results == before
    assert cluster.run("rank, 'own' in globals()").results == {0: (0, False), 1: (1, False)}
    assert cluster.run("x = torch.ones(1); dist.all_reduce(x); x.item()").results == {0: 2.0, 1: 2.0}
    cluster.run("own = 1; del rank")
    with pytest.raises(RankFailure, match=r"name 'rank' is not defined.*get_ipython\(\)\.give_names\(\)"):
        cluster.run("print(rank)")
    assert cluster.run("get_ipython().give_names()\nrank, own").results == {0: (0, 1), 1: (1, 1)}
    with pytest.raises(RankFailure) as failure:
        cluster.run("print(rnak)")
    assert "give_names" not in str(failure.value)


def test_child_processes_that_read_stdin_get_eof(cluster: Cluster) -> None:
    asks = [
        "!cat",
        "!read x; echo got $?",
        "!python3 -c 'import getpass; getpass.getpass()'",
        "!python3 -c 'input()'",
        "%system cat",
        "!!cat",
        "%sx cat",
        "got = !cat",
        "import os; os.system('cat')",
        "import subprocess; subprocess.run(['cat'])",
        "%alias asks cat\n%asks",
        "get_ipython().system('cat')",
    ]
    run = cluster.run("\n".join([*asks, "print('through')"]), timeout_s=60)
    assert "got 1" in run.stdout[0]
    assert run.stdout[0].count("\nEOFError") == 2
    assert run.stdout[0].endswith("through\n")
    assert cluster.run("%%script cat\nall that there is", timeout_s=60).stdout[0] == "all that there is\n"
    run = cluster.run("!printf 'a\\nb'; exit 3\n_exit_code, get_ipython().user_ns['_exit_code']")
    assert (run.stdout[0].splitlines()[:2], run.results[0]) == (["a", "b"], (3, 3))


def test_notebook_only_magic_is_refused_before_anything_runs(notebook: Notebook) -> None:
    for cell in ("print('x')\n%dist_status --text", "for i in range(2):\n    %sync", "x = 1\n\n  \n%dist_push x"):
        outcome = notebook.run(f"%%distributed\n{cell}")
        assert outcome.error.startswith("UsageError: %")
        assert outcome.error.endswith(" runs in the notebook, but this cell runs on the ranks; move it to its own cell")
        assert "x" not in outcome.lines[0]
    twice = notebook.run("%%distributed\n\n%%rank 0\n1")
    assert twice.error == "UsageError: two magics of this cell select where it runs; remove one"
    notebook.run("%%distributed\ntext = '''\n%dist_status\n'''").check()
    notebook.run("%dist_mode -e").check()
    outcome = notebook.run("print('x')\n%dist_status --text")
    assert "begin this one with %%local" in outcome.error
    assert outcome.text.count("%dist_status") == 1
    assert notebook.run("%%local\nprint('x')\n%dist_status --text").check().lines[0] == "x"
    notebook.run("%dist_mode -d").check()


class EndDuringOutput:
    """A listener that lets a cell end while text of it is being delivered."""

    def __init__(self) -> None:
        self.arrives = threading.Event()
        self.seen: list[str] = []

    def on_events(self, events: Sequence[Event], run: CellRun) -> None:
        self.seen += [event.text for event in events if isinstance(event, Printed)]
        if run.state.done:
            assert self.arrives.wait(30)

    def on_end(self, run: CellRun) -> None:
        assert run.ended_s

    def on_late(self, event: Event) -> None:
        self.seen += [event.text] if isinstance(event, Printed) else []


def test_text_delivered_while_the_cell_ends_is_shown(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, has_ended, note = EndDuringOutput(), threading.Event(), CellRun._note

    def note_slowly(run: CellRun, event: Event) -> None:
        if run.listener is ends and isinstance(event, Printed):
            ends.arrives.set()
            has_ended.wait(1)  # the end may also wait for this
        note(run, event)

    monkeypatch.setattr(CellRun, "_note", note_slowly)
    cluster.run("import threading; threading.Timer(0.3, print, ['late']).start()", 0, listener=ends)
    has_ended.set()
    assert ends.seen == ["late\n"]
