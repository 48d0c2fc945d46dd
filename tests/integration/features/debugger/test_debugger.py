"""The debugger of front ends over the ranks, by a client at a real kernel's control channel.

Covers: breakpoints in cells and files, steps, variables, expressions, attaching to ranks that run or wait, quitting.
Does not cover: JupyterLab (``tests/browser``), debuggers at the input line (``tests/integration/user_input``).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import ANY

import pytest

from ....support.dap_client import DapClient
from ....support.notebook_driver import Notebook
from ....support.process_tools import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ....support.notebook_driver import Outcome

SUM = "%%distributed\nx = torch.ones(2); dist.all_reduce(x); x.tolist()"
SUMMED = ["ranks 0-1 │ [2.0, 2.0]"]
# Whether the timeouts of collectives are suspended.
HELD = "%%rank 0\nprint(dist.group.WORLD._get_backend(torch.device('cpu')).options._timeout.days > 1)"
FUNCTION = """%%distributed
def step(value):
    half = value / 2
    return half + 1

total = rank
for i in range(3):
    total += step(i)
print('total', total)"""


class Running:
    """A cell that runs."""

    def __init__(self, notebook: Notebook, cell: str) -> None:
        self._notebook, self._request = notebook, notebook.client.execute(cell, allow_stdin=False)

    def result(self) -> Outcome:
        """Wait until the cell ends."""
        return self._notebook.outcome(self._request)


class Debugged:
    """A notebook with two ranks, whose cells run while the test goes on."""

    def __init__(self, notebook: Notebook) -> None:
        self.notebook = notebook

    def start(self, cell: str) -> Running:
        return Running(self.notebook, cell)

    def check_sum(self) -> None:
        assert self.notebook.run(SUM).check().lines == SUMMED


@pytest.fixture(scope="module")
def debugged() -> Iterator[Debugged]:
    with Notebook() as notebook:
        notebook.run("%dist_init -n 2 --launcher local").check()
        yield Debugged(notebook)
        notebook.run("%dist_shutdown").check()


@pytest.fixture
def client(debugged: Debugged) -> Iterator[DapClient]:
    with DapClient(debugged.notebook.connect()) as client:
        client.attach()
        yield client
        client.ask("disconnect")
    debugged.check_sum()


def test_ranks_are_threads(client: DapClient) -> None:
    names = [each["name"] for each in client.ask("threads")["threads"]]
    assert [name.split(" ")[:2] for name in names if name.startswith("rank")] == [["rank", "0"], ["rank", "1"]]


def test_breakpoint_in_a_cell_stops_every_rank_and_steps_act_on_one(debugged: Debugged, client: DapClient) -> None:
    (found,) = client.set_breakpoints(FUNCTION, 3)
    assert (found["verified"], found["line"]) == (True, 3)
    cell = debugged.start(FUNCTION)
    client.stopped(0, 1, reason="breakpoint")
    frames = client.frames(1)
    assert client.ask("stackTrace", threadId=1_000_001)["totalFrames"] == 2
    assert client.ask("stackTrace", threadId=1_000_001, levels=1) == {"stackFrames": ANY, "totalFrames": 2}
    assert [(frame["name"], frame["line"]) for frame in frames] == [("step", 3), ("<module>", 8)]
    assert frames[0]["source"] == client.frames(0)[0]["source"]
    assert client.ask("dumpCell", code=FUNCTION)["sourcePath"] == frames[0]["source"]["path"]
    assert client.variables(0) == client.variables(0) | {}
    assert {name: each["value"] for name, each in client.variables(1).items()} == {"value": "0"}
    client.go(1, "next")
    client.stopped(1, reason="step")
    assert (client.line(0), client.line(1)) == (3, 4)
    assert client.variables(1)["half"]["value"] == "0.0"
    client.go(1, "stepOut")
    client.stopped(1)
    assert client.line(1) == 7
    client.set_breakpoints(FUNCTION)
    client.ask("continue", threadId=1_000_000)
    assert cell.result().check().lines == ["rank 0 │ total 4.5", "rank 1 │ total 5.5"]


def test_step_in_and_over_go_from_statement_to_statement(debugged: Debugged, client: DapClient) -> None:
    cell = "%%rank 0\ndef f():\n    return 5\na = f()\nb = a + f()\nprint(a, b)"
    client.set_breakpoints(cell, 4)
    running = debugged.start(cell)
    client.stopped(0)
    lines = []
    for command in ("stepIn", "next", "stepIn", "next"):
        lines.append(client.line(0))
        client.go(0, command)
        client.stopped(0, reason="step")
    assert [*lines, client.line(0)] == [4, 3, 5, 3, 6]
    client.go(0, "next")
    client.event("continued")  # the cell has ended
    assert running.result().check().lines == ["5 10"]


def test_conditions_hits_and_messages(debugged: Debugged, client: DapClient) -> None:
    cell = "%%distributed\nfor i in range(6):\n    x = i * 2\nprint('end')"
    client.set_breakpoints(cell, 3, condition="rank == 1", hitCondition="% 3")
    running = debugged.start(cell)
    client.stopped(1)
    assert client.evaluate(1, "i") == "2"
    client.go(1)
    client.stopped(1)
    assert client.evaluate(1, "i") == "5"
    client.go(1)
    assert running.result().check().lines == ["ranks 0-1 │ end"]
    client.set_breakpoints(cell, 3, logMessage="at {i}, {nothing}")
    outcome = debugged.start(cell).result().check()
    assert "ranks 0-1 │ at 5, <NameError: name 'nothing' is not defined>" in outcome.lines
    refused = client.set_breakpoints(cell, 3, condition="rank =")[0]
    assert not refused["verified"]
    assert "invalid syntax" in refused["message"]
    path = client.ask("dumpCell", code=cell)["sourcePath"]
    both = [{"line": 4}, {"line": 4, "condition": "False"}]  # the first one stops, whatever the condition of the other
    client.ask("setBreakpoints", source={"path": path}, breakpoints=both)
    running = debugged.start(cell)
    client.stopped(0, 1)
    client.ask("continue", threadId=1_000_000)
    running.result().check()
    refused = client.set_breakpoints(cell, 3, hitCondition="often")[0]
    assert "is no hit count" in refused["message"]
    client.set_breakpoints(cell, 3, condition="missing")
    running = debugged.start(cell)
    text = client.event("stopped")["text"]
    assert text == "the breakpoint's condition failed: NameError: name 'missing' is not defined"
    client.set_breakpoints(cell)
    client.ask("continue", threadId=1_000_000)
    running.result().check()


def test_breakpoints_of_a_rank_s_cell_are_set_on_that_rank(debugged: Debugged, client: DapClient) -> None:
    cell = "%%rank 1\nx = 1\nprint('x', x)"
    client.set_breakpoints(cell, 3)
    running = debugged.start(cell)
    client.stopped(1)
    client.go(1)
    assert running.result().check().lines == ["x 1"]


def test_breakpoint_on_an_empty_line_moves_to_the_next_statement(debugged: Debugged, client: DapClient) -> None:
    cell = "%%rank 0\n\n# a comment\n%time y = 2\nz = [\n  1,\n]\nprint('z')"
    assert [each["line"] for each in client.set_breakpoints(cell, 2, 6)] == [4, 5]
    running = debugged.start(cell)
    client.stopped(0)
    client.set_breakpoints(cell)
    client.go(0)
    assert "z" in running.result().check().lines


def test_breakpoint_in_a_file(debugged: Debugged, client: DapClient, tmp_path: Path) -> None:
    path = tmp_path / "own_model.py"
    path.write_text("def forward(x):\n    y = x + 1\n    return y\n")
    client.ask("setBreakpoints", source={"path": str(path)}, breakpoints=[{"line": 3}])
    imports = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport own_model; del sys.path[0]"
    running = debugged.start(f"%%distributed\n{imports}\nprint(own_model.forward(rank))")
    client.stopped(0, 1)
    assert client.frames(0)[0]["source"]["path"] == str(path)
    assert client.variables(1)["y"]["value"] == "2"
    client.ask("setBreakpoints", source={"path": str(path)}, breakpoints=[])
    client.ask("continue", threadId=1_000_000)
    assert running.result().check().lines == ["rank 0 │ 1", "rank 1 │ 2"]


def test_variables_are_shown_without_running_their_code(debugged: Debugged, client: DapClient) -> None:
    cell = """%%distributed
class Odd:
    def __init__(self): self.inner = {'a': [1, 2]}
    def __repr__(self): raise RuntimeError('called')
    @property
    def loss(self): dist.barrier()
odd = Odd(); t = torch.arange(3.); big = torch.zeros(100, 100); model = torch.nn.Linear(2, 3)
print('here')"""
    client.set_breakpoints(cell, 8)
    running = debugged.start(cell)
    client.stopped(0, 1)
    found = client.variables(0)
    assert found["t"]["value"] == "tensor([0., 1., 2.])"
    assert found["big"]["value"] == "Tensor (100, 100) float32 cpu"
    assert found["odd"]["value"] == "Odd"
    assert "torch" not in found
    assert "In" not in found
    parts = client.ask("variables", variablesReference=found["odd"]["variablesReference"])["variables"]
    assert [(part["name"], part["value"]) for part in parts] == [("inner", "dict length 1")]
    parts = client.ask("variables", variablesReference=parts[0]["variablesReference"])["variables"]
    assert [(part["name"], part["value"]) for part in parts] == [("a", "list length 2")]
    parts = client.ask("variables", variablesReference=found["model"]["variablesReference"])["variables"]
    assert {"weight", "bias", "in_features"} <= {part["name"] for part in parts}
    client.ask("continue", threadId=1_000_000)
    assert running.result().check().lines == ["ranks 0-1 │ here"]


def test_expressions_and_setting_variables(debugged: Debugged, client: DapClient) -> None:
    cell = "%%rank 0\ndef f(a):\n    b = a + 1\n    return a + b\nprint(f(1))"
    client.set_breakpoints(cell, 4)
    running = debugged.start(cell)
    client.stopped(0)
    assert client.evaluate(0, "a + b") == "3"
    assert client.evaluate(0, "b = 40") == ""
    failed = client.request("evaluate", expression="1 / 0", frameId=client.frames(0)[0]["id"], context="repl")
    assert failed["message"] == "ZeroDivisionError: division by zero"
    scope = client.ask("scopes", frameId=client.frames(0)[0]["id"])["scopes"][0]
    client.ask("setVariable", variablesReference=scope["variablesReference"], name="a", value="2")
    client.go(0)
    assert running.result().check().lines == ["42"]
    late = client.request("stackTrace", threadId=1_000_000)
    assert late["message"] == "the rank is not stopped"


def test_expressions_can_call_collectives_on_all_ranks(debugged: Debugged, client: DapClient) -> None:
    cell = "%%distributed\nx = torch.ones(1)\nprint(x.item())"
    client.set_breakpoints(cell, 3)
    running = debugged.start(cell)
    client.stopped(0, 1)
    first = client.request("evaluate", expression="dist.all_reduce(x)", frameId=client.frames(0)[0]["id"])
    assert first["message"] == "the rank has not replied within 5 s; it may wait for other ranks"
    client.evaluate(1, "dist.all_reduce(x)")
    client.ask("continue", threadId=1_000_000)
    assert running.result().check().lines == ["ranks 0-1 │ 2.0"]


def test_expression_that_reaches_a_breakpoint_does_not_stop_again(debugged: Debugged, client: DapClient) -> None:
    cell = "%%rank 0\ndef f():\n    return 5\nx = 1\nprint('x', x)"
    client.set_breakpoints(cell, 3, 5)
    running = debugged.start(cell)
    client.stopped(0)
    assert client.evaluate(0, "f()") == "5"
    assert client.evaluate(0, "breakpoint()") == ""
    assert client.evaluate(0, "[x + each for each in (1, 2)]") == "[2, 3]"
    left = client.request("evaluate", expression="exit()", frameId=client.frames(0)[0]["id"], context="repl")
    assert left["message"].startswith("SystemExit")
    client.go(0)
    assert running.result().check().lines == ["x 1"]


def test_errors_that_end_a_cell_or_are_raised(debugged: Debugged, client: DapClient) -> None:
    code = "def f():\n    try: {}['a']\n    except KeyError: pass\n    return 1 / (1 - rank)\nf()\ndist.barrier()"
    cell = f"%%distributed\n{code}"
    client.ask("setExceptionBreakpoints", filters=["uncaught"])
    running = debugged.start(cell)
    client.stopped(1, reason="exception")
    assert client.line(1) == 5
    assert client.ask("exceptionInfo", threadId=1_000_001)["exceptionId"] == "ZeroDivisionError"
    client.go(1)
    assert "ZeroDivisionError" in running.result().error
    client.ask("setExceptionBreakpoints", filters=["raised"])
    running = debugged.start(cell)
    client.stopped(0, 1, reason="exception")
    assert client.line(0) == 3
    client.ask("setExceptionBreakpoints", filters=[])
    client.ask("continue", threadId=1_000_000)
    assert "ZeroDivisionError" in running.result().error


def test_breakpoint_call_stops_in_the_debugger(debugged: Debugged, client: DapClient) -> None:
    running = debugged.start("%%rank 1\nx = 7\nbreakpoint()\nprint(x)")
    client.stopped(1, reason="breakpoint")
    assert client.evaluate(1, "x") == "7"
    client.go(1, "next")
    client.stopped(1)
    assert client.line(1) == 4
    client.go(1)
    assert running.result().check().prompts == []


def test_running_rank_can_be_attached_to_and_paused(debugged: Debugged) -> None:
    running = debugged.start(
        "%%distributed\nprint('begun')\nstop = False\nn = 0\nwhile not stop:\n    n += 1\nprint('ended')"
    )
    with DapClient(debugged.notebook.connect()) as client:
        client.attach()
        # debugpy can't start meanwhile.
        assert "only the ranks are debugged" in client.set_breakpoints("own = 1", 1)[0]["message"]
        assert "only the ranks are debugged" in client.request("evaluate", expression="1")["message"]
        client.ask("pause", threadId=1_000_001)
        client.stopped(1, reason="pause")
        assert client.line(1) in (5, 6)
        assert int(client.evaluate(1, "n")) > 0
        client.evaluate(1, "stop = True")
        client.go(1)
        client.ask("pause", threadId=1_000_000)
        client.stopped(0)
        client.evaluate(0, "stop = True")
        client.ask("disconnect")
    assert running.result().check().lines[-1] == "ranks 0-1 │ ended"
    debugged.check_sum()


def test_rank_that_waits_in_a_collective_shows_its_frames(debugged: Debugged) -> None:
    begin = "import time\ngo = False\nx = torch.ones(1)\nif rank == 0: dist.all_reduce(x)\n"
    other = "else:\n    while not go: time.sleep(0.05)\n    dist.all_reduce(x)\nprint(x.item())"
    cell = f"%%distributed\n{begin}{other}"
    running = debugged.start(cell)
    with DapClient(debugged.notebook.connect()) as client:
        client.attach()
        client.ask("pause", threadId=1_000_000)
        body = client.event("stopped")
        assert body["text"] == "in a call that has not returned; the rank stops when it does"
        frames = client.frames(0)
        assert frames[0]["name"] == "all_reduce"
        assert frames[-1]["line"] == 5
        cell_frame = frames[-1]["id"]
        assert client.ask("evaluate", expression="x", frameId=cell_frame, context="repl")["result"] == "tensor([1.])"
        refused = client.request("evaluate", expression="f()", frameId=cell_frame, context="repl")
        assert refused["message"].startswith("the rank is in a call and not stopped yet")
        client.ask("pause", threadId=1_000_001)
        client.stopped(1)
        client.evaluate(1, "go = True")
        client.go(1)
        client.stopped(0, reason="pause")  # the call has returned
        client.ask("disconnect")
    assert running.result().check().lines == ["ranks 0-1 │ 2.0"]
    debugged.check_sum()


def test_rank_that_was_paused_is_traced_no_longer_when_it_goes_on(debugged: Debugged, client: DapClient) -> None:
    code = "def loop():\n    while not go: pass\n    return sys.gettrace(), sys._getframe().f_trace"
    running = debugged.start(f"%%rank 0\nimport sys\ngo = False\n{code}\nprint(loop())")
    assert wait_until(lambda: client.request("pause", threadId=1_000_000)["success"])  # once the rank has begun
    client.stopped(0)
    cell = client.frames(0)[-1]["id"]
    client.ask("evaluate", expression="go = True", frameId=cell, context="repl")
    client.go(0)
    assert running.result().check().lines == ["(None, None)"]


def test_interrupt_ends_a_stop_and_the_cell(debugged: Debugged, client: DapClient) -> None:
    cell = "%%distributed\nx = 1\nx = 2\nprint('went on')"
    client.set_breakpoints(cell, 3)
    running = debugged.start(cell)
    client.stopped(0, 1)
    debugged.notebook.interrupt()
    outcome = running.result()
    assert outcome.error.endswith("KeyboardInterrupt")
    assert "went on" not in outcome.text.replace("print('went on')", "")
    client.event("continued")
    client.set_breakpoints(cell)


@pytest.mark.parametrize("ends", ["disconnect", "killed"])
def test_client_that_goes_leaves_the_session_whole(debugged: Debugged, ends: str) -> None:
    client = DapClient(debugged.notebook.connect()).attach()
    client.set_breakpoints(FUNCTION, 4)
    running = debugged.start(FUNCTION)
    client.stopped(0, 1)
    if ends == "disconnect":
        client.ask("disconnect")
    client.close()
    if ends == "killed":
        with DapClient(debugged.notebook.connect()) as second:
            info = second.ask("debugInfo")
            assert info["isStarted"]
            assert info["stoppedThreads"][:2] == [1_000_000, 1_000_001]
            second.ask("disconnect")
    assert running.result().check().lines == ["rank 0 │ total 4.5", "rank 1 │ total 5.5"]
    assert debugged.notebook.run("%%distributed\nimport sys; sys.gettrace()").check().lines == []
    debugged.check_sum()


def test_timeouts_of_collectives_are_held_while_attached(debugged: Debugged) -> None:
    with DapClient(debugged.notebook.connect()) as client:
        client.attach()
        assert debugged.notebook.run(HELD).check().lines == ["True"]
        client.ask("disconnect")
    assert debugged.notebook.run(HELD).check().lines == ["False"]


def test_killed_rank_is_replaced_and_debugged_again(debugged: Debugged, client: DapClient) -> None:
    cell = "%%distributed\nimport os\npid = os.getpid()\nprint('on')"
    client.set_breakpoints(cell, 4)
    running = debugged.start(cell)
    client.stopped(0, 1)
    client.request("evaluate", expression="os.kill(pid, 9)", frameId=client.frames(1)[0]["id"])
    client.event("continued", lambda body: body["threadId"] == 1_000_001)
    client.go(0)
    assert "SIGKILL" in running.result().text
    running = debugged.start(cell)
    client.stopped(0, 1)
    client.ask("continue", threadId=1_000_000)
    assert running.result().check().lines == ["ranks 0-1 │ on"]


def test_jupyterlab_sees_one_stopped_rank_and_the_frames_of_all(debugged: Debugged) -> None:
    cell = "%%distributed\ndef f(x):\n    y = x\n    return y\nprint(f(rank))"
    with DapClient(debugged.notebook.connect(), "jupyterlab") as client:
        client.attach()
        client.set_breakpoints(cell, 3)
        running = debugged.start(cell)
        thread = client.event("stopped")["threadId"]
        first = thread - 1_000_000
        assert client.event("stopped")["threadId"] == thread  # again, as the other rank has stopped, too
        frames = client.ask("stackTrace", threadId=thread)["stackFrames"]
        other = 1 - first
        names = [frame["name"] for frame in frames]
        assert names == [f"rank {rank} · {name}" for rank in (first, other) for name in ("f", "<module>")]
        client.ask("scopes", frameId=frames[2]["id"])
        client.ask("next", threadId=thread)
        assert client.event("stopped")["threadId"] == 1_000_000 + other
        frames = client.ask("stackTrace", threadId=1_000_000 + other)["stackFrames"]
        assert [(frame["name"], frame["line"]) for frame in frames[::2]] == [
            (f"rank {other} · f", 4),
            (f"rank {first} · f", 3),
        ]
        rich = client.ask("richInspectVariables", variableName="y", frameId=frames[0]["id"])
        assert rich["data"] == {"text/plain": str(other)}
        client.ask("continue", threadId=1)  # as JupyterLab does
        assert client.event("continued")["threadId"] == 1_000_000 + other
        assert running.result().check().lines == ["rank 0 │ 0", "rank 1 │ 1"]
        client.ask("disconnect")
    debugged.check_sum()


def test_interrupt_reaches_the_ranks_where_raised_exceptions_stop(debugged: Debugged, client: DapClient) -> None:
    """debugpy does not stop the notebook's own process at the interrupt, nor at the ranks' error."""
    client.ask("setExceptionBreakpoints", filters=["raised"])
    outcome = debugged.notebook.run(
        "%%distributed\nprint('begun')\nwhile True: pass", on_message=debugged.notebook.interrupt_at("begun")
    )
    assert "KeyboardInterrupt" in outcome.error
    running = debugged.start("own = 1\ntry: 1 / 0\nexcept ZeroDivisionError: own = 2")
    thread = client.event("stopped")["threadId"]
    assert thread < 1_000_000
    client.ask("setExceptionBreakpoints", filters=[])
    client.ask("continue", threadId=thread)
    running.result().check()


def test_rank_whose_stop_was_noticed_too_late_is_debugged_again(debugged: Debugged, client: DapClient) -> None:
    late = """%%rank 0
import queue
class Late(queue.SimpleQueue):
    def get(self, timeout=None):
        if timeout is not None: raise queue.Empty  # whatever the client has sent by then
        return super().get()
debugger = get_ipython().rank_debugger
answers, debugger._answers = debugger._answers, Late()"""
    debugged.notebook.run(late).check()
    cell = "%%rank 0\nx = 1\nprint('x', x)"
    client.set_breakpoints(cell, 3)
    running = debugged.start(cell)
    client.stopped(0)
    client.event("continued")
    assert "this rank goes on and stops no more" in running.result().check().text
    debugged.notebook.run("%%rank 0\ndebugger._answers = answers").check()
    running = debugged.start(cell)
    client.stopped(0)
    client.go(0)
    assert running.result().check().lines == ["x 1"]


def test_request_that_can_not_be_served_gets_a_reply(client: DapClient) -> None:
    assert not client.request("stackTrace", threadId=1_000_009)["success"]
    assert not client.request("setBreakpoints", source={})["success"]


def test_variables_of_the_notebook_are_expanded_beside_ranks(debugged: Debugged, client: DapClient) -> None:
    debugged.notebook.run("own = {'a': [1, 2]}").check()
    found = {each["name"]: each for each in client.ask("inspectVariables")["variables"]}
    parts = client.ask("variables", variablesReference=found["own"]["variablesReference"])["variables"]
    assert "'a'" in {each["name"] for each in parts}


def test_cells_of_the_notebook_are_debugged_as_before(debugged: Debugged, client: DapClient) -> None:
    cell = "first = 1\nsecond = 2"
    client.set_breakpoints(cell, 2)
    running = debugged.start(cell)
    thread = client.event("stopped")["threadId"]
    assert thread < 1_000_000
    frames = client.ask("stackTrace", threadId=thread)["stackFrames"]
    assert frames[0]["line"] == 2
    client.set_breakpoints(cell)
    client.ask("continue", threadId=thread)
    running.result().check()


def test_ranks_start_while_the_notebook_is_debugged() -> None:
    """debugpy starts Python processes of the notebook under a debugger of their own, unless it is kept from that."""
    with Notebook() as notebook:
        with DapClient(notebook.connect()) as client:
            client.attach()
            cell = "%%distributed\nx = rank\nprint('x', x)"
            client.set_breakpoints(cell, 3)  # before there are ranks
            notebook.run("%dist_init -n 2 --launcher local --backend none").check()
            running = Running(notebook, cell)
            client.stopped(0, 1)
            client.ask("disconnect")
            assert running.result().check().lines == ["rank 0 │ x 0", "rank 1 │ x 1"]
        notebook.run("%dist_shutdown").check()


def test_ranks_that_were_stopped_when_their_notebook_died_go_on_in_the_next() -> None:
    with Notebook() as notebook:
        notebook.run("%dist_init -n 2 --launcher local --keep --name held").check()
        with DapClient(notebook.connect()) as client:
            client.attach()
            client.set_breakpoints(FUNCTION, 4)
            Running(notebook, FUNCTION)
            client.stopped(0, 1)
            os.kill(notebook.pid, signal.SIGKILL)
    with Notebook() as notebook:
        shown = notebook.run("%dist_attach held").check().text + notebook.run("%dist_wait").text
        assert "total 5.5" in shown, shown
        assert notebook.run(SUM).check().lines == SUMMED
        notebook.run("%dist_shutdown").check()


def test_the_cluster_that_is_current_at_the_start_is_debugged() -> None:
    start = "%dist_init -n 1 --launcher local --backend none --name"
    with Notebook() as notebook:
        notebook.run(f"{start} one").check()
        with DapClient(notebook.connect()) as client:
            client.ask("debugInfo")  # as JupyterLab asks when a notebook is opened
            notebook.run(f"{start} two").check()
            client.attach()
            for name in ("two", "three"):
                cell = f"%%distributed --name {name}\nx = rank\nprint('x', x)"
                if name == "three":
                    notebook.run(f"%dist_shutdown --name two\n{start} three").check()
                client.set_breakpoints(cell, 3)
                running = Running(notebook, cell)
                client.stopped(0)
                client.go(0)
                assert running.result().check().lines == ["x 0"]
            client.ask("disconnect")
        notebook.run("%dist_shutdown --name one\n%dist_shutdown --name three").check()


def test_ranks_that_outlive_their_notebook_do_not_stop(tmp_path: Path) -> None:
    goes, ends = tmp_path / "goes", tmp_path / "ends"
    wait = f"while not os.path.exists({str(goes)!r}): time.sleep(0.01)"
    cell = f"%%distributed --noblock\nimport os, time\n{wait}\nx = 1\nopen(f'{ends}{{rank}}', 'w').close()"
    with Notebook() as notebook:
        notebook.run("%dist_init -n 2 --launcher local --keep --name left").check()
        with DapClient(notebook.connect()) as client:
            client.attach()
            client.set_breakpoints(cell, 4)
            notebook.run(cell).check()
    goes.touch()
    assert wait_until(lambda: all(Path(f"{ends}{rank}").exists() for rank in range(2)))
    with Notebook() as notebook:
        notebook.run("%dist_attach left").check()
        with DapClient(notebook.connect()) as client:
            client.attach()
            notebook.run("%%distributed\npass").check()
            os.kill(notebook.pid, signal.SIGKILL)  # the ranks are idle
    with Notebook() as notebook:
        notebook.run("%dist_attach left").check()
        assert notebook.run(HELD).check().lines == ["False"]
        notebook.run("%dist_shutdown").check()


def test_extension_that_is_loaded_while_the_notebook_is_debugged() -> None:
    cell = "%%distributed\nx = rank\nprint('x', x)"
    with Notebook() as notebook:
        notebook.run("%unload_ext jupyter_disttrain").check()
        with DapClient(notebook.connect()) as client:
            client.attach()
            client.set_breakpoints(cell, 3)
            notebook.run("%load_ext jupyter_disttrain\n%dist_init -n 2 --launcher local --backend none").check()
            running = Running(notebook, cell)
            thread = client.event("stopped")["threadId"]
            names = [frame["name"] for frame in client.ask("stackTrace", threadId=thread)["stackFrames"]]
            assert names[0].startswith("rank")
            client.ask("disconnect")
            assert running.result().check().lines == ["rank 0 │ x 0", "rank 1 │ x 1"]
        notebook.run("%dist_shutdown").check()
