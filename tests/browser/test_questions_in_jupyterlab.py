"""Questions of ranks and debuggers in JupyterLab's input line, and JupyterLab's debugger over the ranks.

Does not cover: what each command does (``tests/integration/user_input``, ``tests/integration/features/debugger``).
"""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING

import pytest

from ..support.browser import output, run_cell, take_picture, wait_for_end

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Page

START = "%load_ext jupyter_disttrain\n%dist_init -n 3 --launcher local --backend none"
ASK = "%%distributed\nprint('before')\nrate = float(input('rate? '))\nprint('rate', rate)"
STOP = "%%distributed\ntotal = rank * 10\nbreakpoint()\ntotal += 1\nprint('total', total)"
DIE = "%%distributed\nimport os\nprint('pid', os.getpid())\nif rank == 1: input('still there? ')"

STEPS = """%%distributed
def double(value):
    result = value * 2
    return result

print('double', double(rank + 1))"""

OPEN_LINE = ".jp-Stdin:visible"  # JupyterLab hides it once it was answered


def reply(page: Page, prompt: str, text: str) -> None:
    """Type an answer once the prompt is shown."""
    line = page.locator(OPEN_LINE, has_text=prompt)
    line.wait_for(timeout=60_000)
    line.locator("input").fill(text)
    line.locator("input").press("Enter")


@pytest.mark.browser
def test_ranks_ask_in_the_input_line(open_notebook: Callable[..., Page]) -> None:
    page = open_notebook(START, ASK, STOP, DIE)
    run_cell(page, 0)
    output(page, 0, "ranks 0-2 ready")

    run_cell(page, 1)
    for rank, rate in enumerate(("0.1", "0.2", "0.1")):
        reply(page, f"rank {rank}: rate? ", rate)
    shown = output(page, 1, "rate 0.2")
    asked = [shown.index(f"rank {rank}: rate?  0.") for rank in range(3)]
    assert shown.index("before") < asked[0] < asked[1] < asked[2]
    assert asked[1] < shown.index("│ rate 0.2")  # perhaps before rank 2 asks
    take_picture(page, "questions")

    run_cell(page, 2)
    reply(page, "rank 0 ipdb>", "cast n")
    reply(page, "rank 0 ipdb>", "cast p total")
    reply(page, "rank 0 ipdb>", "rank 2")
    page.locator(OPEN_LINE, has_text="rank 2 ipdb>").wait_for()
    take_picture(page, "debugger_prompt")
    reply(page, "rank 2 ipdb>", "cast c")
    shown = output(page, 2, "total 21")
    assert "ranks 1-2 also wait in a debugger" in shown
    assert shown.count("breakpoint()") == 2  # once for all ranks, at each stop

    run_cell(page, 3)
    page.locator(OPEN_LINE, has_text="rank 1: still there? ").wait_for()
    pid = int(output(page, 3, "pid").split("rank 1")[1].split("pid")[1].split()[0])
    os.kill(pid, signal.SIGKILL)
    wait_for_end(page, 3)
    page.locator(OPEN_LINE).wait_for(state="detached")
    output(page, 3, "was killed by SIGKILL")
    take_picture(page, "withdrawn_question")


@pytest.mark.browser
def test_debugger_panel_shows_the_frames_of_all_ranks(open_notebook: Callable[..., Page]) -> None:
    page = open_notebook(START.replace("-n 3", "-n 2"), STEPS)
    run_cell(page, 0)
    output(page, 0, "ranks 0-1 ready")
    page.locator(".jp-DebuggerBugButton").first.click()
    page.locator(".jp-DebuggerVariables", has_text="cluster").wait_for(timeout=60_000)  # the notebook's own
    cell = page.locator(".jp-Notebook-cell").nth(1)
    cell.locator(".cm-line").nth(2).click()
    cell.locator(".cm-breakpoint-gutter .cm-gutterElement").nth(3).click()
    page.locator(".jp-DebuggerBreakpoints", has_text="3").wait_for()
    run_cell(page, 1)
    frames = page.locator(".jp-DebuggerCallstack li")
    frames.nth(3).wait_for(timeout=60_000)  # of both ranks
    cell.locator(".jp-DebuggerEditor-highlight", has_text="result = value * 2").wait_for()
    variables = page.locator(".jp-DebuggerVariables")
    for rank in (0, 1):
        frames.filter(has_text=f"rank {rank} · double").click()
        variables.filter(has_text=re.compile(rf"value:?\s*{rank + 1}")).wait_for()
    take_picture(page, "debugger_panel")
    page.evaluate("() => void window.jupyterapp.commands.execute('debugger:next')")
    variables.filter(has_text=re.compile(r"result:?\s*4")).wait_for()
    assert "Cell [*]:3" in frames.filter(has_text="rank 0 · double").inner_text()  # waits meanwhile
    take_picture(page, "debugger_step")
    page.evaluate("() => void window.jupyterapp.commands.execute('debugger:continue')")
    assert "double 2" in output(page, 1, "double 4")
