"""Debuggers on ranks, at the prompt of a real kernel's front end.

Covers: breakpoint(), pdb, %debug, --pdb, %dist_debug, torch.distributed.breakpoint, on several ranks at once.
Does not cover: whose turn it is (``tests/unit/client/test_open_questions.py``), JupyterLab's debugger.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from ...support.notebook_driver import Notebook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ...support.notebook_driver import Outcome

SUM = "%%distributed\nx = torch.ones(2); dist.all_reduce(x); x.tolist()"
SUMMED = ["ranks 0-1 │ [2.0, 2.0]"]
FAILS = """def divide(value):
    half = value / 2
    return 1 / half
"""


@pytest.fixture(scope="module")
def debugged() -> Iterator[Notebook]:
    """A notebook with two ranks and a process group."""
    with Notebook() as notebook:
        notebook.run("%dist_init -n 2 --launcher local").check()
        yield notebook
        notebook.run("%dist_shutdown").check()


def typing(*commands: str) -> Callable[[str, Outcome], str]:
    left = iter(commands)
    return lambda _prompt, _outcome: next(left)


def prompts(*ranks: int) -> list[str]:
    return [f"rank {rank} ipdb> " for rank in ranks]


def test_commands_step_through_a_cell_on_one_rank_or_on_all(debugged: Notebook) -> None:
    code = "%%distributed\nx = rank * 10\nbreakpoint()\ny = x + 1\nprint('y', y)"
    outcome = debugged.run(code, answer=typing("p x", "cast p x + 100", "cast n", "n", "cast p x", "p y", "c", "c"))
    assert outcome.check().prompts == prompts(0, 0, 0, 0, 0, 0, 0, 1)
    lines = outcome.lines
    source = ["      1 #%%distributed", "      2 x = rank * 10", "----> 3 breakpoint()"]
    assert lines[1:4] == [f"ranks 0-1 │ {text}" for text in source]
    assert re.fullmatch(r"ranks 0-1 │ > Cell In\[\d+\]\(3\)<module>\(\)", lines[0])
    assert "rank 0 │ 0" in lines
    assert lines[lines.index("rank 0 │ 100") + 1] == "rank 1 │ 110"
    assert "ranks 0-1 │ ----> 4 y = x + 1" in lines
    assert lines[-2:] == ["rank 0 │ y 1", "rank 1 │ y 11"]


def test_rank_that_steps_into_a_collective_leaves_the_prompt_to_the_next(debugged: Notebook) -> None:
    code = "%%distributed\nx = torch.ones(1)\nbreakpoint()\ndist.all_reduce(x)\nprint(x)"
    outcome = debugged.run(code, answer=typing("n", "n", "n", "n", "cast c")).check()
    assert outcome.prompts == prompts(0, 0, 1, 1, 1)
    assert outcome.lines[-1] == "ranks 0-1 │ tensor([2.])"
    assert debugged.run(SUM).check().lines == SUMMED


@pytest.mark.parametrize(
    "stop", ["if rank: breakpoint()", "import pdb\nif rank: pdb.set_trace()", "dist.breakpoint(rank=1)"]
)
def test_quitting_on_one_rank_releases_the_others(debugged: Notebook, stop: str) -> None:
    """Of pytorch issue 154563: quitting ``torch.distributed.breakpoint`` left the other ranks waiting."""
    outcome = debugged.run(f"%%distributed\n{stop}\ndist.barrier()", answer=typing("q"))
    assert "BdbQuit: the debugger was quit, which ends the cell" in outcome.error
    assert outcome.text.count("BdbQuit:") == 1
    assert "rank 0 waited for rank 1" in outcome.text
    assert "bdb.py" not in outcome.text
    assert debugged.run(SUM).check().lines == SUMMED


def test_quitting_on_all_ranks_is_one_error(debugged: Notebook) -> None:
    outcome = debugged.run("%%distributed\nbreakpoint()", answer=typing("cast q"))
    assert outcome.error.startswith("RankFailure: ranks 0-1 (")
    assert debugged.run(SUM).check().lines == SUMMED


def test_interrupt_at_the_prompt_ends_the_cell(debugged: Notebook) -> None:
    def interrupt(_prompt: str, _outcome: Outcome) -> None:
        debugged.interrupt()

    for stop in ("breakpoint()", "__import__('pdb').Pdb().set_trace()", "dist.breakpoint(rank=0)"):
        outcome = debugged.run(f"%%distributed\n{stop}\nprint('went on')", answer=interrupt)
        assert outcome.error.endswith("KeyboardInterrupt"), stop
        assert len(outcome.prompts) == 1
        assert "went on" not in outcome.text.replace("print('went on')", "")
        assert debugged.run(SUM).check().lines == SUMMED


def test_breakpoints_stop_and_do_not_slow_down_later_cells(debugged: Notebook) -> None:
    code = "%%distributed\ndef f(n):\n    total = 0\n    for i in range(n): total += i\n    return total\n"
    outcome = debugged.run(
        f"{code}breakpoint()\nprint(f(4))", answer=typing("cast b 5", "cast c", "cast p total", "cast c")
    )
    assert "ranks 0-1 │ 6" in outcome.check().lines
    assert debugged.run("%%distributed\nimport sys; sys.gettrace()").check().lines == []


def test_error_stops_in_the_frame_of_the_user_while_the_others_wait(debugged: Notebook) -> None:
    code = f"%%distributed --pdb\n{FAILS}\nif rank == 1: divide(0)\ndist.barrier(); print('met')"
    outcome = debugged.run(code, answer=typing("locals", "up", "q"))
    assert outcome.prompts == prompts(1, 1, 1)
    assert "rank 1 │ half = 0.0" in outcome.lines
    assert "rank 1 │ ----> 6 if rank == 1: divide(0)" in outcome.lines
    assert outcome.error.startswith("RankFailure: rank 1 (")
    assert "rank 0 waited for rank 1" in outcome.text
    assert debugged.run(SUM).check().lines == SUMMED


def test_frames_of_the_last_error_are_kept_until_the_next_cell(debugged: Notebook) -> None:
    debugged.run(f"%%distributed\n{FAILS}\nimport gc, weakref\nclass Big: pass").check()
    failing = "def fail():\n    global seen\n    big = Big(); seen = weakref.ref(big)\n    divide(0)\nfail()"
    debugged.run(f"%%distributed\n{failing}")
    outcome = debugged.run(
        "%dist_debug -r 0-1", answer=typing("p half", "cast up", "cast p type(big).__name__", "q", "q")
    )
    assert outcome.check().prompts == prompts(0, 0, 0, 0, 1)
    assert {"rank 0 │ 0.0", "ranks 0-1 │ 'Big'"} <= set(outcome.lines)
    assert "0.0" in debugged.run("%%rank 1\n%debug", answer=typing("p half", "q")).check().lines
    assert debugged.run("%%distributed\nseen() is None").check().lines == ["ranks 0-1 │ True"]
    refused = debugged.run("%dist_debug", answer=typing())
    assert "there is no error to debug on this rank" in refused.error


def test_error_in_a_library_stops_in_the_code_of_the_user(debugged: Notebook) -> None:
    code = "%%rank 0 --pdb\ndef load(text):\n    import json\n    return json.loads(text)\nload('{')"
    outcome = debugged.run(code, answer=typing("p text", "q"))
    assert "'{'" in outcome.lines
    assert "JSONDecodeError" in outcome.error


def test_pdb_magic_turns_the_stop_on_and_off(debugged: Notebook) -> None:
    debugged.run("%%rank 0\n%pdb on").check()
    assert debugged.run("%%rank 0\n1 / 0", answer=typing("q")).prompts == prompts(0)
    debugged.run("%%rank 0\n%pdb off").check()
    assert debugged.run("%%rank 0\n1 / 0", answer=typing()).prompts == []


def test_post_mortem_in_an_except_clause(debugged: Notebook) -> None:
    code = "%%rank 1\nimport pdb\ntry: 1 / rank / 0\nexcept ZeroDivisionError: pdb.post_mortem()\nprint('on')"
    outcome = debugged.run(code, answer=typing("p rank", "q")).check()
    assert outcome.lines[-2:] == ["1", "on"]


def test_front_end_without_input_refuses_a_debugger(debugged: Notebook) -> None:
    outcome = debugged.run("%%distributed\nbreakpoint()\nprint('went on')")
    assert "a debugger can't stop here: this front end takes no input" in outcome.error
    assert "print what you need" in outcome.error
    assert "/pdb.py" not in outcome.text
    outcome = debugged.run("%%distributed --pdb\n1 / 0")
    assert outcome.error.endswith("ZeroDivisionError: division by zero")
    assert "a debugger can't stop here" in outcome.text


def test_creating_a_debugger_without_using_it_works(debugged: Notebook) -> None:
    code = '%%distributed\ndef one():\n    """\n    >>> one()\n    1\n    """\n    return 1\nimport doctest'
    assert debugged.run(f"{code}\ndoctest.run_docstring_examples(one, globals())").check().lines == []


def test_error_of_the_debug_magic_itself_is_not_debugged(debugged: Notebook) -> None:
    debugged.run("%%distributed\n1 + 1").check()
    for _ in range(2):
        assert "there is no error to debug on this rank" in debugged.run("%dist_debug", answer=typing()).error


def test_frames_outside_the_cell_are_not_shown(debugged: Notebook) -> None:
    code = f"%%rank 0\n{FAILS}\ndivide(0)"
    debugged.run(code)
    outcome = debugged.run("%dist_debug", answer=typing("w", "up", "up", "q")).check()
    assert outcome.text.count("> Cell In") == 3  # at the start, by where, by up
    assert "*** Oldest frame" in outcome.text
    assert "run_code" not in outcome.text
    stopped = debugged.run("%%rank 0\ndef f():\n    breakpoint()\nf()", answer=typing("w", "c")).check()
    assert "run_code" not in stopped.text
    assert "skipping" not in stopped.text


def test_stop_in_an_async_cell_can_be_interrupted(debugged: Notebook) -> None:
    def interrupt(_prompt: str, _outcome: Outcome) -> None:
        debugged.interrupt()

    waits = "import asyncio\nawait asyncio.sleep(0)\n"
    for code in (f"%%rank 0\n{waits}breakpoint()\nprint('x')", f"%%rank 0 --pdb\n{waits}1 / 0"):
        outcome = debugged.run(code, answer=interrupt)
        assert len(outcome.prompts) == 1
        assert outcome.status == "error"
    outcome = debugged.run(f"%%rank 0\n{waits}x = 1\nbreakpoint()\nx = 2\nprint(x)", answer=typing("n", "p x", "c"))
    assert "1" in outcome.check().lines


def test_task_and_thread_are_refused(debugged: Notebook) -> None:
    code = """%%rank 0
import asyncio, threading
async def ask(): breakpoint()
print((await asyncio.gather(asyncio.create_task(ask()), return_exceptions=True))[0])
"""
    assert "a debugger can't stop here: only code that the cell itself runs" in debugged.run(code, answer=typing()).text


def test_interrupted_command_ends_the_cell(debugged: Notebook) -> None:
    def wait(_prompt: str, _outcome: Outcome) -> str:
        return "!print('begun', flush=True); __import__('time').sleep(100)"

    outcome = debugged.run("%%rank 0\nbreakpoint()", answer=wait, on_message=debugged.interrupt_at("begun"))
    assert outcome.error.endswith("KeyboardInterrupt")
    assert len(outcome.prompts) == 1
    assert debugged.run(SUM).check().lines == SUMMED


def test_debugger_of_ipython_stops_at_once(debugged: Notebook) -> None:
    code = "%%rank 0\nfrom IPython.core.debugger import set_trace; set_trace(header='here')\nprint('on')"
    outcome = debugged.run(code, answer=typing("n", "c")).check()
    assert outcome.lines[0] == "here"
    assert outcome.lines[-1] == "on"


def test_running_out_of_memory_keeps_no_frames(debugged: Notebook) -> None:
    code = "%%distributed\ndef f():\n    big = torch.zeros(1); raise MemoryError\nf()"
    debugged.run(code)
    assert "there is no error to debug" in debugged.run("%dist_debug", answer=typing()).error


def test_stepping_to_the_end_of_a_cell_holds_nothing(debugged: Notebook) -> None:
    code = "class Big: pass\ndef f():\n    global seen\n    big = Big(); seen = weakref.ref(big)\nbreakpoint()\nf()"
    debugged.run(f"%%rank 0\nimport gc, weakref\n{code}", answer=typing("n", "s", "n", "n", "n", "n", "c")).check()
    assert debugged.run("%%rank 0\ngc.collect(); seen() is None").check().lines == ["True"]
