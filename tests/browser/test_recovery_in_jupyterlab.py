"""JupyterLab when ranks hang, and when the kernel is restarted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ..support.browser import output, run_cell, take_picture, wait_for_end

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Page

HANGS = """%%distributed
import time
kept = rank * 11
x = torch.ones(1000)
if rank == 0:
    dist.all_reduce(x)
else:
    time.sleep(1000)"""
FIRST, HANG, NEXT, ATTACH, AGAIN = range(5)


@pytest.mark.browser
def test_hang_is_explained_and_interrupted_and_ranks_survive_a_restart(open_notebook: Callable[..., Page]) -> None:
    page = open_notebook(
        "%load_ext jupyter_disttrain\n%dist_init -n 2 --hang-after 1 --keep --idle-timeout 600",
        HANGS,
        "%%distributed\ndist.all_reduce(x); kept",
        "%load_ext jupyter_disttrain\n%dist_attach",
        "%%distributed\nkept",
    )
    run_cell(page, FIRST)
    output(page, FIRST, "ranks 0-1 ready")
    run_cell(page, HANG)
    text = output(page, HANG, "ranks are waiting")
    assert "rank 0: waits in all_reduce number" in text
    assert "at line 6: dist.all_reduce(x)" in text
    assert "rank 1: in Python code at line 8: time.sleep(1000)" in text
    take_picture(page, "hang")

    page.locator('[data-command="notebook:interrupt-kernel"], [title^="Interrupt the kernel"]').first.click()
    output(page, HANG, "KeyboardInterrupt")
    wait_for_end(page, HANG)
    take_picture(page, "stopped")
    run_cell(page, NEXT)
    assert "11" in output(page, NEXT, "rank 1")

    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    run_cell(page, ATTACH)
    output(page, ATTACH, "ranks 0-1 attached, with their variables")
    run_cell(page, AGAIN)
    assert "11" in output(page, AGAIN, "rank 1")
    take_picture(page, "attached")
    page.evaluate(
        """() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel
             .requestExecute({code: '%dist_shutdown'}).done"""
    )
