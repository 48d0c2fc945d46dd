"""The side panel when its connection is cut, shared or lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import pytest

from ..support.browser import output, run_cell, start_ranks, take_picture, wait_for_end
from ..support.join_tools import Job, start_process
from .test_panel import PANEL, TRAIN, show_panel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page, WebSocketRoute

    from ..support.browser import LabServer

RESET = f"{PANEL} .jdt-buttons button:text-is('Reset')"
START = "%load_ext jupyter_disttrain\n%dist_init -n 2 --launcher local"
LOSS = f"{PANEL} .jdt-plot[aria-label^='loss']"
RUNNING = f"{PANEL} .jdt-rank[data-state=running]"
MOVES = "([plot, seen]) => document.querySelector(plot).ariaLabel !== seen"


def wait_until_loss_moves(page: Page) -> None:
    page.locator(LOSS).wait_for()
    page.wait_for_function(MOVES, arg=[LOSS, page.locator(LOSS).get_attribute("aria-label")])


@pytest.mark.browser
def test_reconnected_websocket_restores_all_logged_values(page: Page, open_notebook: Callable[..., Page]) -> None:
    sockets: list[WebSocketRoute] = []

    def pass_on(socket: WebSocketRoute) -> None:
        sockets.append(socket)
        if len(sockets) == 2:
            socket.close(code=1011)  # the first attempt to reconnect fails
        else:
            socket.connect_to_server()

    page.route_web_socket("**/disttrain/api/live*", pass_on)
    open_notebook(START, TRAIN.format(options="", steps=100_000))
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


@pytest.fixture
def other(browser: Browser) -> Iterator[Page]:
    """A second browser with its own login."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    yield context.new_page()
    context.close()


@pytest.mark.browser
def test_two_browsers_show_and_control_one_cluster(
    open_notebook: Callable[..., Page], other: Page, lab_server: LabServer
) -> None:
    page = open_notebook(START, TRAIN.format(options="", steps=100_000), "%%distributed\nprint('whole')")
    start_ranks(page)
    run_cell(page, 1)
    other.goto(lab_server.link())
    other.wait_for_function("() => window.jupyterapp?.restored")
    for each in (page, other):
        show_panel(each)
        each.locator(RUNNING).first.wait_for()
        wait_until_loss_moves(each)
    other.locator(f"{PANEL} .jdt-buttons button", has_text="Interrupt").click()
    wait_for_end(page, 1)
    run_cell(page, 2)
    output(page, 2, "whole")
    other.locator(f"{PANEL} .jdt-buttons button", has_text="Stop").click()
    other.get_by_role("alertdialog").get_by_role("button", name="Shut down").click()
    for each in (page, other):
        each.locator(f"{PANEL} .jdt-empty").wait_for(state="visible")


@pytest.mark.browser
def test_cluster_whose_controller_vanishes_is_removed_from_the_panel(
    open_notebook: Callable[..., Page], lab_server: LabServer
) -> None:
    page = open_notebook(START, "%%distributed\nimport time\nwhile True: time.sleep(0.01)")
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


@pytest.mark.browser
def test_ranks_of_a_job_cannot_be_reset_from_the_panel(
    open_notebook: Callable[..., Page], file: Path, jobs: list[Job]
) -> None:
    job = start_process(jobs, file, 0, 1)
    job.wait_for_file(file)
    page = open_notebook(f"%load_ext jupyter_disttrain\n%dist_attach {file}", START.splitlines()[1])
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
