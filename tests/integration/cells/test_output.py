"""Output of ranks as a user sees it: live, labelled, complete."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from nbconvert import HTMLExporter

from ...support.notebook_driver import Outcome, execute_notebook, plain

if TYPE_CHECKING:
    from ...support.notebook_driver import Notebook

IMPORTS = "import ctypes, logging, os, subprocess, sys, threading, time, warnings\nfrom pathlib import Path"


def run(notebook: Notebook, *lines: str, **options: Any) -> Outcome:
    return notebook.run("\n".join(["%%distributed", IMPORTS, *lines]), **options)


def test_every_way_of_writing_keeps_the_order(notebook: Notebook) -> None:
    outcome = run(
        notebook,
        "libc = ctypes.CDLL(None)",
        "print('python')",
        "os.system('echo shell');",
        "_ = subprocess.run(['echo', 'child'])",
        "_ = libc.printf(b'C, flushed\\n'), libc.fflush(None)",
        "_ = os.write(1, b'descriptor\\n')",
        "sys.stdout.buffer.write(b'buffer\\n')",
        "logging.getLogger('train').warning('logged')",
        "print('between')",
        "warnings.warn_explicit('careful', UserWarning, 'cell', 7)",
        "print('between'); _ = libc.printf(b'C, not flushed\\n')",
        "display('a display')",
        "print('last'); _ = libc.printf(b'C, no end of line')",
    )
    assert [line.removeprefix("ranks 0-1 ") for line in outcome.check().lines] == [
        "│ python",
        "│ shell",
        "│ child",
        "│ C, flushed",
        "│ descriptor",
        "│ buffer",
        "┃ logged",
        "│ between",
        "┃ cell:7: UserWarning: careful",
        "│ between",
        "│ C, not flushed",
        "│ 'a display'",
        "│ last",
        "│ C, no end of line",
    ]


def test_faulthandler_writes_to_the_cell(notebook: Notebook) -> None:
    outcome = run(notebook, "import faulthandler", "print('before')", "faulthandler.dump_traceback(all_threads=False)")
    assert outcome.check().lines[0] == "ranks 0-1 │ before"
    for rank in (0, 1):
        assert any(re.match(rf"ranks? (0-1|{rank}) ┃ (Stack|Current thread|Thread)", line) for line in outcome.lines)


def test_text_is_shown_as_written(notebook: Notebook) -> None:
    texts = ["    indented", "\ttab", "", "trailing   ", "🙂 e\u0301 ﷽", "zero\x00byte", "<b>&amp;</b>", "│ ┃ $x$ `y`"]
    outcome = run(notebook, *(f"print({text!r})" for text in texts)).check()
    assert outcome.text.split("\n") == [f"ranks 0-1 │ {text}" for text in texts]


def test_undecodable_bytes_are_shown_escaped(notebook: Notebook) -> None:
    outcome = run(
        notebook, "print('\\udcff surrogate')", "os.write(1, b'\\xff\\xfe bytes\\n');", "os.write(1, b'\\xe2\\x82');"
    )
    assert outcome.check().lines == ["ranks 0-1 │ \\udcff surrogate", "ranks 0-1 │ �� bytes", "ranks 0-1 │ �"]
    assert run(notebook, "print('ok')").check().lines == ["ranks 0-1 │ ok"]


def test_carriage_returns_and_backspaces(notebook: Notebook) -> None:
    outcome = run(notebook, "print('12345\\rab'); print('10%\\r20%\\r100%'); print('cat\\b\\bow'); print('dos\\r')")
    assert outcome.check().lines == [f"ranks 0-1 │ {text}" for text in ("ab345", "100%", "cow", "dos")]


def test_colour_ends_with_its_line_and_continues_on_the_next(notebook: Notebook) -> None:
    outcome = run(notebook, "print('\\x1b[32mgreen'); print('still\\x1b[0m plain')").check()
    green, still = outcome.coloured.split("\n")
    assert green.endswith("\x1b[32mgreen\x1b[0m")
    assert still.endswith("\x1b[32mstill\x1b[0m plain\x1b[0m")
    assert outcome.lines == ["ranks 0-1 │ green", "ranks 0-1 │ still plain"]


def test_unfinished_line_is_shown_while_the_cell_runs(notebook: Notebook, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    wait = f"while not Path({str(seen)!r}).exists(): time.sleep(0.01)"

    def on_message(_message: dict[str, Any], outcome: Outcome) -> None:
        if "..." in outcome.text:
            seen.touch()

    outcome = run(
        notebook,
        "for _ in range(3): print('.', end='')",
        wait,
        "print('done', end='')",
        on_message=on_message,
        timeout=30,
    )
    assert outcome.check().lines == ["ranks 0-1 │ ...done"]


def test_line_of_two_megabytes(notebook: Notebook) -> None:
    outcome = run(notebook, "print('x' * 2_000_000); print('after')").check()
    assert outcome.lines == ["ranks 0-1 │ " + "x" * 2_000_000, "ranks 0-1 │ after"]


def test_lines_of_threads_are_not_split(notebook: Notebook) -> None:
    outcome = run(
        notebook,
        "sys.setswitchinterval(1e-6)",
        "def speak(who):",
        "    for i in range(100): print('thread', who, 'of rank', rank, 'says', i)",
        "threads = [threading.Thread(target=speak, args=(who,)) for who in range(6)]",
        "for thread in threads: thread.start()",
        "for thread in threads: thread.join()",
        "sys.setswitchinterval(0.005)",
    )
    shown = [line.split(" │ ")[1] for line in outcome.check().lines]
    expected = [f"thread {who} of rank {rank} says {i}" for who in range(6) for rank in (0, 1) for i in range(100)]
    assert list((Counter(shown) - Counter(expected)).elements())[:5] == []
    assert list((Counter(expected) - Counter(shown)).elements())[:5] == []
    first = [line for line in shown if line.startswith("thread 0 of rank 0")]
    assert first == [f"thread 0 of rank 0 says {i}" for i in range(100)]


def test_rank_keeps_no_copy_of_its_output(notebook: Notebook) -> None:
    outcome = run(
        notebook,
        "import weakref",
        "class Text(str): pass",
        "text = Text('a word\\n'); kept = weakref.ref(text)",
        "sys.stdout.write(text); sys.stderr.write(text)",
        "del text; until = time.monotonic() + 10",
        "while kept() and time.monotonic() < until: time.sleep(0.01)  # the sampler may be looking at the frame",
        "print(kept())",
    ).check()
    assert outcome.lines == ["ranks 0-1 │ a word", "ranks 0-1 ┃ a word", "ranks 0-1 │ None"]


def test_listener_for_unfinished_lines_keeps_no_variables(notebook: Notebook) -> None:
    outcome = run(
        notebook,
        "import gc, weakref",
        "class Big: pass",
        "def speak():",
        "    big = Big()",
        "    print('unfinished', end='')",
        "    while sys.stdout._waker.is_set(): time.sleep(0.01)",
        "    return weakref.ref(big)",
        "gc.disable()",
        "gone = speak(); until = time.monotonic() + 10",
        "while gone() and time.monotonic() < until: time.sleep(0.01)  # the sampler may be looking at the frame",
        "print('', gone())",
        "gc.enable()",
    ).check()
    assert outcome.lines == ["ranks 0-1 │ unfinished None"]


def test_long_print_is_not_split_by_another_thread(notebook: Notebook) -> None:
    outcome = run(
        notebook,
        "begun, go_on = threading.Event(), threading.Event()",
        "class Slow:",
        "    def __str__(self): begun.set(); go_on.wait(); return 'its end'",
        "slow = threading.Thread(target=lambda: print('begin', Slow()))",
        "slow.start(); begun.wait()",
        "time.sleep(0.3)  # several times as long as an unfinished line is kept back",
        "print('another'); go_on.set(); slow.join()",
    ).check()
    assert outcome.lines == ["ranks 0-1 │ another", "ranks 0-1 │ begin its end"]


def test_output_of_c_code_without_the_gil_arrives(notebook: Notebook) -> None:
    outcome = run(
        notebook,
        "import _thread, itertools",
        "done = _thread.allocate_lock(); _ = done.acquire()",
        "texts = itertools.chain(['no end of line'], iter(done.release, None))",  # after the text it releases the lock
        "_ = _thread.start_new_thread(list, (map(sys.stdout.write, texts),))",
        "_ = done.acquire()",
    )
    assert outcome.check().lines == ["ranks 0-1 │ no end of line"]


class LateOutputs:
    """Collect output that arrives in the outputs of finished cells."""

    def __init__(self, notebook: Notebook) -> None:
        self._client = notebook.client
        self._texts: dict[str, dict[str, str]] = {}  # by request and display

    def run(self, source: str, **metadata: Any) -> str:
        """Run a cell as JupyterLab sends it; return the request's id when it has ended."""
        content = {
            "code": f"%%distributed\n{IMPORTS}\n{source}",
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": True,
        }
        message = self._client.session.msg("execute_request", content, metadata=metadata)
        self._client.shell_channel.send(message)
        request = str(message["header"]["msg_id"])
        while self._client.get_shell_msg(timeout=60)["parent_header"].get("msg_id") != request:
            pass
        return request

    def wait(self, request: str, *lines: str) -> None:
        """Wait until exactly these lines are in the output of a cell, in any order."""
        while sorted(self.lines(request)) != sorted(lines):
            self.take()

    def take(self) -> None:
        """Handle the next message."""
        message = self._client.get_iopub_msg(timeout=60)
        if message["msg_type"] in ("display_data", "update_display_data"):
            content = message["content"]
            texts = self._texts.setdefault(message["parent_header"]["msg_id"], {})
            texts[content["transient"]["display_id"]] = content["data"].get("text/plain", "")

    def lines(self, request: str) -> list[str]:
        text = "\n".join(filter(None, self._texts.get(request, {}).values()))
        return Outcome([{"type": "display_data", "data": {"text/plain": text}}]).lines


def test_late_output_goes_to_the_cell_that_started_it(notebook: Notebook) -> None:
    late = LateOutputs(notebook)
    first = late.run(
        "import asyncio, concurrent.futures\n"
        "go, again, pool = threading.Event(), threading.Event(), concurrent.futures.ThreadPoolExecutor(1)\n"
        "def talk():\n"
        "    go.wait(60); sys.stderr.write(f'late {rank}'); again.wait(60); print('later')\n"
        "threading.Thread(target=talk).start()\n"
        "_ = pool.submit(print, 'pooled').result()\n"
        "async def tick():\n"
        "    while not go.is_set(): await asyncio.sleep(0.01)\n"
        "    print('task')\n"
        "kept = asyncio.get_event_loop().create_task(tick())\n"
        "_ = threading.Timer(0.2, print, ['between cells']).start()",
        cellId="a",
    )
    late.wait(first, "ranks 0-1 │ pooled", "ranks 0-1 │ between cells")
    second = late.run("go.set(); _ = pool.submit(print, 'of the second').result(); await kept", cellId="b")
    late.wait(second, "ranks 0-1 │ of the second")
    shown = [
        "ranks 0-1 │ pooled",
        "ranks 0-1 │ between cells",
        "rank 0 ┃ late 0",
        "rank 1 ┃ late 1",
        "ranks 0-1 │ task",
    ]
    late.wait(first, *shown)
    once_more = late.run("again.set(); time.sleep(0)", cellId="a")
    last = late.run("pass", cellId="c")
    labelled: list[str] = []
    while not labelled:
        late.take()
        labelled = [re.split(" [│┃] ", line)[1] for each in (once_more, last) for line in late.lines(each)]
    assert all(re.fullmatch(r"cell \d+, run again since: later", line) for line in labelled)
    assert sorted(late.lines(first)) == sorted(shown)


def test_task_of_an_earlier_cell_does_not_capture_output_of_a_later_one(notebook: Notebook) -> None:
    late = LateOutputs(notebook)
    talk = "import asyncio\ngate = asyncio.Event()\nasync def talk():\n    await gate.wait(); print('of the first')\n"
    first = late.run(f"{talk}kept = asyncio.get_event_loop().create_task(talk())")
    second = late.run("sys.stdout.write('of the '); gate.set(); await kept; print('second')")
    late.wait(first, "ranks 0-1 │ of the first")
    late.wait(second, "ranks 0-1 │ of the second")


def test_thread_that_prints_over_many_cells_loses_no_line(notebook: Notebook) -> None:
    late = LateOutputs(notebook)
    talk = "talker = threading.Thread(target=lambda: [print('word', i) or time.sleep(0.0005) for i in range(1500)])"
    talker = late.run(f"{talk}\ntalker.start()")
    cells = [late.run("print('cell')") for _ in range(20)]
    shown = [f"word {i}" for i in range(1500)]
    for rank in (0, 1):
        while texts_of(late.lines(talker), rank) != shown:
            late.take()
    for cell in cells:
        late.wait(cell, "ranks 0-1 │ cell")


def texts_of(lines: list[str], rank: int) -> list[str]:
    return [line.split(" │ ")[1] for line in lines if line.startswith(("ranks 0-1", f"rank {rank}"))]


def test_progress_line_is_removed(notebook: Notebook) -> None:
    drawn: list[str] = []
    places: set[str] = set()

    def on_message(message: dict[str, Any], outcome: Outcome) -> None:
        if message["msg_type"] not in ("display_data", "update_display_data"):
            return
        place = message["content"]["transient"]["display_id"]
        if message["msg_type"] == "display_data":
            places.add(place)
        if place in places:  # and not a picture of the cluster below an earlier cell
            drawn.append(outcome.text)

    outcome = run(notebook, "time.sleep(2.6)", on_message=on_message).check()
    assert outcome.outputs == []
    assert "2 s · ranks 0-1 running" in drawn
    assert len(drawn) <= 2
    drawn.clear()
    outcome = run(notebook, "print('first')", "time.sleep(2.6 * rank)", "print('last')", on_message=on_message).check()
    assert "ranks 0-1 │ first\nrank 0    │ last\n2 s · rank 1 running · rank 0 done" in drawn
    assert [output["data"] for output in outcome.outputs if "running" in str(output)] == []
    assert outcome.lines == ["ranks 0-1 │ first", "ranks 0-1 │ last"]


@pytest.mark.parametrize("kind", ["tqdm", "tqdm.notebook"])
def test_loop_progress_is_shown_in_its_bar_or_the_note_but_not_both(
    notebook: Notebook, tmp_path: Path, kind: str
) -> None:
    bar_seen, loader_seen = tmp_path / "bar", tmp_path / "loader"
    with_bar: list[tuple[str, str]] = []

    def on_message(_message: dict[str, Any], outcome: Outcome) -> None:
        last = outcome.lines[-1] if outcome.lines else ""
        if " running" in last and not bar_seen.exists():
            with_bar.append((last, outcome.text))
            bar_seen.touch()
        elif " of 50,000" in last:
            loader_seen.touch()

    outcome = run(
        notebook,
        f"from torch.utils.data import DataLoader; from {kind} import tqdm",
        "bar = iter(tqdm(range(100_000), mininterval=0))",
        f"while not Path({str(bar_seen)!r}).exists(): next(bar); time.sleep(0.01)",
        "bar.close()",
        "for batch in DataLoader(range(50_000)):",
        f"    if Path({str(loader_seen)!r}).exists(): break",
        "    time.sleep(0.01)",
        on_message=on_message,
    ).check()
    note, text = with_bar[0]
    assert re.fullmatch(r"\d+ s · ranks 0-1 running", note)
    labels = [line.split(" ")[:2] for line in text.splitlines() if line.startswith("rank ")]
    assert labels == [["rank", "0"], ["rank", "1"]]
    assert "running" not in outcome.text


NOTEBOOK = [
    "%load_ext jupyter_disttrain",
    "%dist_init -n 2 --launcher local --backend none",
    "%%distributed\nprint('alike')\nprint('rank', rank, '<&>')\nimport sys; print('trouble', file=sys.stderr)",
    "%%distributed\nimport matplotlib.pyplot as plt\nplt.plot([rank, 1]); plt.show()\nprint('below')",
    "%%distributed\nfrom IPython.display import clear_output\nprint('gone'); clear_output(); print('there')",
    "%%distributed\nimport time; time.sleep(2.2)",
]


def test_nbclient_and_nbconvert_show_the_same_output(notebook: Notebook) -> None:
    executed = execute_notebook(NOTEBOOK)
    for source, cell in list(zip(NOTEBOOK, executed.cells, strict=True))[2:]:
        driven = notebook.run(source).check()
        assert [plain(output["data"].get("text/plain", "")) for output in cell.outputs] == [
            plain(output["data"].get("text/plain", "")) for output in driven.outputs
        ]
        assert [sorted(output["data"]) for output in cell.outputs] == [
            sorted(output["data"]) for output in driven.outputs
        ]
    page, _ = HTMLExporter().from_notebook_node(executed)
    shown = re.sub(r"<[^>]+>", "", page)
    assert "ranks 0-1 │ alike" in shown
    assert "rank 1    │ rank 1 &lt;&amp;&gt;" in shown
    assert "ranks 0-1 ┃ trouble" in shown
    assert page.count('src="data:image/png;base64,') == 2
    assert "ranks 0-1 running" not in shown


def test_bar_updated_by_tqdm_s_thread_stays_in_its_cell(notebook: Notebook) -> None:
    begin = "import time\nfrom tqdm import tqdm\ntqdm.monitor_interval = 0.05\nlist(tqdm([1]))"
    notebook.run(f"%%distributed\n{begin}").check()
    bar = "bar = tqdm(total=10, miniters=5, maxinterval=0.05)\nbar.n = 7\nwhile bar.miniters > 1: time.sleep(0.01)\n"
    outcome = notebook.run(f"%%distributed\n{bar}with bar.get_lock(): bar.disable = True")
    end = "tqdm.monitor.exit(); tqdm.monitor = None; tqdm.monitor_interval = 10"
    notebook.run(f"%%distributed\n{end}\ndel bar  # while it exists, later bars are a line further down").check()
    assert "7/10" in outcome.text
