"""How a failed cell is shown, and that the session recovers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from nbclient.exceptions import CellExecutionError

from jupyter_disttrain.errors import CellTimeoutError, RankFailure, UsageError

from ...support.notebook_driver import Notebook, Outcome, execute_notebook, plain
from ...support.process_tools import wait_until
from ...support.recovery_tools import HOST, failure_of

if TYPE_CHECKING:
    from pathlib import Path

    from jupyter_disttrain import Cluster


# Which failures, where


def test_equal_failures_share_one_traceback(notebook: Notebook) -> None:
    outcome = notebook.run("%%distributed\nx = 1\n1 / 0")
    assert outcome.error == f"RankFailure: ranks 0-1 ({HOST}), line 3: ZeroDivisionError: division by zero"
    assert outcome.text.count("ZeroDivisionError: division by zero") == 1
    assert outcome.text.splitlines()[0] == f"ranks 0-1 ({HOST}), line 3"
    assert "----> 3 1 / 0" in outcome.text
    assert "jupyter_disttrain" not in outcome.text


def test_equal_errors_at_different_lines_are_separate(cluster: Cluster) -> None:
    error = failure_of(cluster, "if rank == 0: raise ValueError('1')\nraise ValueError('1')")
    assert sorted(failure.ranks for failure in error.failures) == [(0,), (1,)]


def test_each_error_of_a_chain_has_the_line_that_raised_it(cluster: Cluster) -> None:
    code = "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    kept = error\n    raise ValueError('later')"
    (failure,) = failure_of(cluster, code).failures
    assert re.findall(r"--> (\d+)", plain("\n".join(failure.traceback))) == ["2", "5"]
    again = "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    kept = error\nraise kept"
    (failure,) = failure_of(cluster, again).failures
    assert re.findall(r"--> (\d+)", plain("\n".join(failure.traceback))) == ["5", "2"]


def test_code_within_a_line_is_shown_with_that_line(cluster: Cluster) -> None:
    for line in ("sum(1 / 0 for _ in [1])", "[1 / 0 for _ in [1]]", "class C: x = 1 / 0", "(lambda: 1 / 0)()"):
        (failure,) = failure_of(cluster, f"#%%distributed\n{line}").failures
        shown = re.findall(r"--> (.*)", plain("\n".join(failure.traceback)))
        assert set(shown) == {f"2 {line}"}
    (failure,) = failure_of(cluster, "max(1,\n  [1 / y for y in [0]])").failures
    assert re.findall(r"--> (.*)", plain("\n".join(failure.traceback)))[-1] == "2   [1 / y for y in [0]])"
    (failure,) = failure_of(cluster, "x = sum(\n    1 / y\n    for y in [0]\n)").failures
    assert re.findall(r"--> (.*)", plain("\n".join(failure.traceback))) == ["1 x = sum("]
    assert "line 2, in <genexpr>" in plain("\n".join(failure.traceback))


def test_code_and_timeout_of_a_cell_are_checked_before_it_runs(cluster: Cluster) -> None:
    for timeout_s in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match=f"a positive number of seconds, not {timeout_s:g}"):
            cluster.run("began = True", timeout_s=timeout_s)
    with pytest.raises(UsageError, match="the code of a cell is a string, not of type int"):
        cluster.run(5)  # type: ignore[arg-type]
    assert cluster.run("'began' in globals()").results == {0: False, 1: False}


def test_distinct_failures_are_shown_once_each_with_the_earliest_first(cluster: Cluster, tmp_path: Path) -> None:
    flag = tmp_path / "go"
    wait = f"import os, time\nwhile not os.path.exists({str(flag)!r}): time.sleep(0.01)"
    run = cluster.run(f"if rank == 1: raise ValueError('the cause')\n{wait}\nraise KeyError('later')", block=False)
    assert wait_until(lambda: bool(run.failures))
    flag.touch()
    with pytest.raises(RankFailure) as caught:
        run.wait()
    error = caught.value
    assert [failure.headline for failure in error.failures] == [
        f"rank 1 ({HOST}), line 1: ValueError: the cause",
        f"rank 0 ({HOST}), line 4: KeyError: 'later'",
    ]
    assert str(error) == "; ".join(failure.headline for failure in error.failures)
    assert {rank: failure.ename for rank, failure in error.by_rank.items()} == {0: "KeyError", 1: "ValueError"}


def test_failure_is_shown_while_others_still_run(notebook: Notebook, tmp_path: Path) -> None:
    flag = tmp_path / "go"
    notebook.run(f"flag = {str(flag)!r}\n%dist_push flag").check()
    seen: list[str] = []

    def on_message(_message: dict[str, Any], outcome: Outcome) -> None:
        if "ZeroDivisionError" in outcome.text and not seen:
            seen.append(outcome.text)
            flag.touch()

    code = "import os, time\nif rank == 1: 1 / 0\nwhile not os.path.exists(flag): time.sleep(0.01)\nprint('went on')"
    outcome = notebook.run(f"%%distributed\n{code}", on_message=on_message)
    assert seen == [f"rank 1 ({HOST}), line 3: ZeroDivisionError: division by zero · rank 0 still running"]
    assert outcome.lines[0] == "rank 0 │ went on"
    assert outcome.error == f"RankFailure: rank 1 ({HOST}), line 3: ZeroDivisionError: division by zero"


def test_death_is_shown_while_others_still_run_and_until_the_rank_is_replaced(
    bare_notebook: Notebook, tmp_path: Path
) -> None:
    bare_notebook.run("%dist_init -n 2 --launcher local").check()
    flag = tmp_path / "go"
    bare_notebook.run(f"flag = {str(flag)!r}\n%dist_push flag").check()
    seen: list[str] = []

    def on_message(_message: dict[str, Any], outcome: Outcome) -> None:
        seen.append(outcome.text)
        if "RankDied" in outcome.text:
            flag.touch()

    code = "import os, time\nif rank == 1: os._exit(3)\nwhile not os.path.exists(flag): time.sleep(0.01)"
    bare_notebook.run(f"%%distributed\n{code}", on_message=on_message)
    first, *_, last = [text for text in seen if "RankDied" in text and "Traceback" not in text]
    death = rf"rank 1 \({HOST}\): RankDied: process \d+ exited with code 3"
    assert re.fullmatch(rf"{death} · rank 0 still running", first), first
    while_coming_back = [text for text in seen if "starting a new process for rank 1 …" in text]
    assert re.match(death, while_coming_back[0])
    assert "rank 1 was replaced" in last


def test_run_all_stops_at_a_failed_cell() -> None:
    cells = [
        "%load_ext jupyter_disttrain\n%dist_init -n 2 --launcher local --backend none",
        "%%rank 1\n1 / 0",
        "print('not reached')",
    ]
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute_notebook(cells)


@pytest.mark.parametrize(
    ("code", "headline"),
    [
        ("x = 1\ny = )", "line 2: SyntaxError: unmatched ')' ({file}, line 2)"),
        ("raise KeyboardInterrupt", "line 1: KeyboardInterrupt"),
        ("assert rank > 5, 'small'", "line 1: AssertionError: small"),
    ],
)
def test_special_exceptions_end_the_cell_and_not_the_rank(cluster: Cluster, code: str, headline: str) -> None:
    before = [entry.info.pid for entry in cluster.table]
    cluster.run("kept = rank")
    error = failure_of(cluster, code)
    text = re.sub(r"\(\S*\.py, ", "({file}, ", str(error))
    assert text == f"ranks 0-1 ({HOST}), {headline}"
    assert cluster.run("__import__('os').getpid(), kept").results == dict(enumerate(zip(before, range(2), strict=True)))


def test_error_whose_str_fails_is_reported(cluster: Cluster) -> None:
    error = failure_of(cluster, "class Mute(Exception):\n    def __str__(self): raise RuntimeError('no')\nraise Mute()")
    assert error.failures[0].headline == f"ranks 0-1 ({HOST}), line 3: Mute: <its __str__ raised RuntimeError>"
    with pytest.raises(RankFailure, match="line 3: Mute: "):
        cluster.run("import asyncio\nawait asyncio.sleep(0)\nraise Mute()")
    assert cluster.run("rank").results == {0: 0, 1: 1}


def test_huge_error_text_is_shortened_in_the_middle(cluster: Cluster) -> None:
    (failure,) = failure_of(cluster, "raise ValueError('begin' + 'x' * 50_000_000 + 'end')").failures
    assert len(failure.evalue) < 21_000
    assert failure.evalue.startswith("beginxxx")
    assert failure.evalue.endswith("xxxend")
    assert " … 49,980,008 characters left out … " in failure.evalue
    assert sum(map(len, failure.traceback)) < 200_000


def test_exception_groups_and_causes_are_complete(cluster: Cluster) -> None:
    (failure,) = failure_of(cluster, "raise ExceptionGroup('two', [ValueError('a'), KeyError('b')])").failures
    assert failure.headline == f"ranks 0-1 ({HOST}), line 1: ExceptionGroup: two (2 sub-exceptions)"
    code = "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('outer') from error"
    (failure,) = failure_of(cluster, code).failures
    text = plain("\n".join(failure.traceback))
    assert text.index("ZeroDivisionError: division by zero") < text.index("ValueError: outer")
    assert failure.line == 4


# Interrupts and timeouts


def test_twenty_interrupts_keep_every_variable_and_cell(notebook: Notebook) -> None:
    notebook.run("%%distributed\ncount = 0").check()
    for turn in range(20):
        code = "%%distributed\ncount += 1\nfor _ in print('round', count) or iter(int, 1): pass"  # in print, too
        outcome = notebook.run(code, on_message=notebook.interrupt_at(f"ranks 0-1 │ round {turn + 1}"), timeout=60)
        assert outcome.error == f"RankFailure: ranks 0-1 ({HOST}), line 3: KeyboardInterrupt"
        after = notebook.run("%%distributed\nprint(count)").check()
        assert after.lines == [f"ranks 0-1 │ {turn + 1}"]


def test_interrupt_ends_a_sleep_and_a_child_process(notebook: Notebook) -> None:
    for code in (
        "__import__('time').sleep(1000)",
        "__import__('subprocess').run(['sleep', '1000'])",
        "__import__('os').system('sleep 1000'); __import__('time').sleep(1000)",
    ):
        source = f"%%distributed\nprint('go', flush=True); {code}"  # one line: it may also arrive during print
        outcome = notebook.run(source, on_message=notebook.interrupt_at("ranks 0-1 │ go"), timeout=60)
        assert outcome.error == f"RankFailure: ranks 0-1 ({HOST}), line 2: KeyboardInterrupt"
        assert "subprocess.py" not in outcome.text
    notebook.run("%sync").check()


def test_timeout_interrupts_the_ranks_and_reports_earlier_failures(cluster: Cluster) -> None:
    with pytest.raises(CellTimeoutError) as caught:
        cluster.run("while True: pass", timeout_s=0.5)
    assert str(caught.value) == "the cell ran longer than 0.5 s and was interrupted"
    with pytest.raises(CellTimeoutError) as caught:
        cluster.run("if rank == 0: 1 / 0\nwhile True: pass", timeout_s=0.5)
    assert str(caught.value) == (
        "the cell ran longer than 0.5 s and was interrupted; before that "
        f"rank 0 ({HOST}), line 1: ZeroDivisionError: division by zero"
    )
    assert cluster.run("rank").results == {0: 0, 1: 1}


# Deaths


DEATHS = [
    ("import os; os._exit(3)", "exited with code 3"),
    (
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "was killed by SIGKILL: kill -9, or the kernel's out-of-memory killer",
    ),
    ("import ctypes; ctypes.string_at(0)", "was killed by SIGSEGV: a segmentation fault"),
]


@pytest.mark.parametrize(("code", "how"), DEATHS)
def test_death_is_reported_and_the_other_rank_continues(torchless: Cluster, code: str, how: str) -> None:
    pid = torchless.table[1].info.pid
    error = failure_of(
        torchless, f"import sys\nkept = 1\nif rank == 1:\n    print('last words', file=sys.stderr)\n    {code}"
    )
    crashed = "SIGSEGV" in how
    where = ", line 5" if crashed else ""  # Python's crash report names it
    assert str(error) == f"rank 1 ({HOST}){where}: RankDied: process {pid} {how}"
    assert error.failures[0].traceback[:2] == ("Last lines on stderr:", "last words")
    assert ("Cell, line 5" in error.failures[0].traceback[-1]) == crashed
    assert torchless.run("globals().get('kept')").results == {0: 1, 1: None}


@pytest.mark.parametrize("base", ["Exception", "SystemExit"])
def test_fault_around_a_cell_is_reported_with_its_rank(torchless: Cluster, base: str) -> None:
    torchless.run(
        f"class Odd({base}):\n"
        "    def __str__(self): raise ValueError\n"
        "def fail(): raise Odd\n"
        "descriptors = get_ipython().kernel._descriptors"
    )
    with pytest.raises(RankFailure) as caught:
        torchless.run("descriptors.restore = fail", 1)
    (failure,) = caught.value.failures
    assert (failure.ename, failure.ranks, failure.hosts) == ("Odd", (1,), (HOST,))
    with pytest.raises(RankFailure, match=r"OSError: \\udfff"):
        torchless.run("def fail(): raise OSError('\\udfff')\ndescriptors.restore = fail", 1)
    assert torchless.run("del descriptors.restore\nrank", 1).results == {1: 1}
