"""JupyterLab when ranks hang, the kernel is restarted, or the side panel's connection is cut, shared or lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import pytest

from ..support.browser import output, run_cell, start_ranks, take_picture, wait_for_end
from ..support.join_tools import Job, start_process
from .test_panel import PANEL, TRAIN, show_panel, shut_down

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page, WebSocketRoute

    from ..support.browser import LabServer

pytestmark = pytest.mark.browser

RESET = f"{PANEL} .jdt-buttons button:text-is('Reset')"
START = "%load_ext jupyter_disttrain\n%dist_init -n 2 --launcher local"
LOSS = f"{PANEL} .jdt-plot[aria-label^='loss']"
RUNNING = f"{PANEL} .jdt-rank[data-state=running]"
MOVES = "([plot, seen]) => document.querySelector(plot).ariaLabel !== seen"


def wait_until_loss_moves(page: Page) -> None:
    page.locator(LOSS).wait_for()
    page.wait_for_function(MOVES, arg=[LOSS, page.locator(LOSS).get_attribute("aria-label")])


@pytest.fixture
def other(browser: Browser) -> Iterator[Page]:
    """A second browser with its own login."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    yield context.new_page()
    context.close()


def test_reconnected_websocket_and_a_second_browser_show_all_logged_values(
    page: Page, other: Page, open_notebook: Callable[..., Page], lab_server: LabServer
) -> None:
    sockets: list[WebSocketRoute] = []

    def pass_on(socket: WebSocketRoute) -> None:
        sockets.append(socket)
        if len(sockets) == 2:
            socket.close(code=1011)  # the first attempt to reconnect fails
        else:
            socket.connect_to_server()

    page.route_web_socket("**/disttrain/api/live*", pass_on)
    open_notebook(START, TRAIN.format(options="", steps=100_000), "%%distributed\nprint('whole')")
    show_panel(page)
    start_ranks(page)
    run_cell(page, 1)
    wait_until_loss_moves(page)
    stop = page.locator(f"{PANEL} .jdt-buttons")
    assert stop.is_visible()
    sockets[0].close(code=1011)
    page.locator(f"{PANEL} .jdt-state", has_text="the server is not reached").wait_for()
    assert not stop.is_visible()
    stop.wait_for(state="visible")
    assert len(sockets) == 3
    wait_until_loss_moves(page)
    page.locator(f"{PANEL} .jdt-buttons button", has_text="Interrupt").click()
    wait_for_end(page, 1)
    # A second browser controls the same cluster.
    run_cell(page, 1)
    other.goto(lab_server.link())
    other.wait_for_function("() => window.jupyterapp?.restored")
    show_panel(other)
    other.locator(RUNNING).first.wait_for()
    wait_until_loss_moves(other)
    other.locator(f"{PANEL} .jdt-buttons button", has_text="Interrupt").click()
    wait_for_end(page, 1)
    run_cell(page, 2)
    output(page, 2, "whole")
    other.locator(f"{PANEL} .jdt-buttons button", has_text="Stop").click()
    other.get_by_role("alertdialog").get_by_role("button", name="Shut down").click()
    for each in (page, other):
        each.locator(f"{PANEL} .jdt-empty").wait_for(state="visible")


def test_cluster_whose_controller_vanishes_is_removed_from_the_panel(
    open_notebook: Callable[..., Page], lab_server: LabServer
) -> None:
    page = open_notebook(f"{START} --backend none", "%%distributed\nimport time\nwhile True: time.sleep(0.01)")
    show_panel(page)
    start_ranks(page)
    run_cell(page, 1)
    page.locator(RUNNING).first.wait_for()
    for process in psutil.process_iter(["cmdline"]):
        command_line = " ".join(process.info["cmdline"] or [])
        if "transport.controller" in command_line and str(lab_server.root.parent) in command_line:
            process.kill()
    page.locator(f"{PANEL} .jdt-empty").wait_for(state="visible")
    text = output(page, 1, "controller")
    assert "ClusterClosedError: the controller of cluster 'default' on " in text
    assert text.endswith("so all ranks end; %dist_reset starts them again")


def test_ranks_of_a_job_cannot_be_reset_from_the_panel(
    open_notebook: Callable[..., Page], file: Path, jobs: list[Job]
) -> None:
    job = start_process(jobs, file, 0, 1)
    job.wait_for_file(file)
    page = open_notebook(f"%load_ext jupyter_disttrain\n%dist_attach {file}", f"{START.splitlines()[1]} --backend none")
    show_panel(page)
    run_cell(page, 0)
    page.locator(f"{PANEL} .jdt-rank").wait_for()
    page.wait_for_selector(f"{RESET}:disabled")
    page.locator(f"{PANEL} .jdt-state", has_text="1 rank idle").wait_for()
    assert str(file) in (page.locator(RESET).get_attribute("title") or "")
    command = "() => window.jupyterapp.commands.isEnabled('jupyter-disttrain:reset')"
    assert not page.evaluate(command)
    take_picture(page, "panel_job")
    page.locator(f"{PANEL} .jdt-buttons button:text-is('Stop')").click()
    page.get_by_role("alertdialog").get_by_role("button", name="Shut down").click()
    assert job.end() == 0
    run_cell(page, 1)
    page.locator(f"{PANEL} .jdt-rank").nth(1).wait_for()
    page.wait_for_selector(f"{RESET}:enabled")
    assert page.evaluate(command)


HANGS = """%%distributed
import time
kept = rank * 11
x = torch.ones(1000)
if rank == 0:
    dist.all_reduce(x)
else:
    time.sleep(1000)"""


def test_hang_is_explained_and_interrupted_and_ranks_survive_a_restart(open_notebook: Callable[..., Page]) -> None:
    page = open_notebook(
        "%load_ext jupyter_disttrain\n%dist_init -n 2 --launcher local --hang-after 1 --keep --idle-timeout 600",
        HANGS,
        "%%distributed\ndist.all_reduce(x); kept",
        "%load_ext jupyter_disttrain\n%dist_attach",
        "%%distributed\nkept",
    )
    start_ranks(page)
    run_cell(page, 1)
    text = output(page, 1, "waiting for missing ranks")
    assert "rank 0: waits in all_reduce number" in text
    assert "at line 6: dist.all_reduce(x)" in text
    assert "rank 1: in Python code at line 8: time.sleep(1000)" in text
    take_picture(page, "hang")

    page.locator('[data-command="notebook:interrupt-kernel"], [title^="Interrupt the kernel"]').first.click()
    output(page, 1, "KeyboardInterrupt")
    wait_for_end(page, 1)
    take_picture(page, "stopped")
    run_cell(page, 2)
    assert "11" in output(page, 2, "rank 1")

    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    run_cell(page, 3)
    output(page, 3, "ranks 0-1 attached, with their variables")
    run_cell(page, 4)
    assert "11" in output(page, 4, "rank 1")
    take_picture(page, "attached")
    shut_down(page)
