"""The ranks in JupyterLab and Notebook: the side panel and the widget, live."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import nbformat
import pytest

from ..support.browser import END_KERNELS, await_function, output, run_cell, start_ranks, take_picture, wait_for_end

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Locator, Page

    from ..support.browser import LabServer

TRAIN = """%%distributed {options}
import math, time
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range({steps}):
    loss = model(torch.randn(16, 8)).pow(2).mean()
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss)
    log_metrics(step, loss=math.exp(-step / 50) + rank / 20, accuracy=1 - math.exp(-step / 30))
    time.sleep(0.02)"""
PANEL = "#jupyter-disttrain-panel"
START = "%load_ext jupyter_disttrain\n%dist_init -n 2 --launcher local --backend none"
# Rank 1 ends once a file is there; it ignores the alarm that would end it earlier than its nanny does.
END_LATER = """%%distributed -r 1
import atexit, os, signal, time
def end_later():
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    while not os.path.exists('end'): time.sleep(0.01)
_ = atexit.register(end_later)"""
# All that the status bar, the panel and the widget ever show.
RECORD = """() => {
  window.shown = new Set();
  new MutationObserver(() => {
    document.querySelectorAll('.jdt-status, .jdt-view').forEach(each => window.shown.add(each.textContent));
  }).observe(document.body, { subtree: true, childList: true, characterData: true });
}"""
SHOWN = "text => [...window.shown].some(each => each.includes(text))"
ENDED_OR_STARTING = "() => [...window.shown].some(each => /1 ended|starting/.test(each))"
BAR = """%%distributed
import os, time
from tqdm import tqdm
for step in tqdm(range(60), mininterval=0):
    while step > 2 and not os.path.exists(f'step{step}'): time.sleep(0.01)"""
SHORT_LOOPS = """%%distributed
for epoch in range(8):
    for step in tqdm(range(57), mininterval=0): time.sleep(0.01)"""
RESTART = "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"
LOOP = "%%distributed\nimport time\nprint('it runs', flush=True)\nwhile True: time.sleep(0.01)"
REFUSAL = {"message": "no rank replies"}
VARIABLES = """%%distributed
images, weights, scale = torch.zeros(64, 28, 28), torch.ones(10), 0.5
epoch = rank
def train(): pass"""
NO_REPLY = {"variables": [], "ranks": "0", "silent": "1", "least_tensor_bytes": 0, "most_tensor_bytes": 0}
# The sign before the ranks of a variable that differs between them.
SIGN = "cell => getComputedStyle(cell, '::before').content"
OPEN = """async path => {
  const panel = await window.jupyterapp.commands.execute('docmanager:open', {path});
  await panel.context.ready;
  await panel.sessionContext.ready;
  await panel.sessionContext.session.kernel.info;
  window.jupyterapp.shell.activateById(panel.id);
}"""
EXECUTE = "code => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.requestExecute({code}).done"
BEGIN = """code => {
  window.reply = null;
  window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.requestExecute({code}).done
    .then(reply => { window.reply = reply; });
}"""


def show_panel(page: Page) -> None:
    page.evaluate("() => window.jupyterapp.commands.execute('jupyter-disttrain:show-panel')")
    page.locator(PANEL).wait_for(state="visible")


def shut_down(page: Page) -> None:
    page.evaluate(
        """() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel
             .requestExecute({code: '%dist_shutdown --all'}).done"""
    )


def set_theme(page: Page, name: str) -> None:
    page.evaluate("name => window.jupyterapp.commands.execute('apputils:change-theme', {theme: name})", name)
    page.wait_for_function("name => document.body.dataset.jpThemeName === name", arg=name)


@pytest.mark.browser
def test_empty_panel_shows_how_to_start(open_notebook: Callable[..., Page]) -> None:
    page = open_notebook("1")
    show_panel(page)
    empty = page.locator(f"{PANEL} .jdt-empty")
    empty.wait_for(state="visible")
    assert "%dist_init" in empty.inner_text()
    empty.get_by_label("number of ranks").fill("3")
    assert "%dist_init -n 3" in empty.inner_text()
    take_picture(page, "panel_empty")
    empty.get_by_role("button", name="Start ranks for this notebook").click()
    starting = f"{PANEL} .jdt-starting"
    page.wait_for_function(
        """panel => [panel, '.jdt-status'].every(where => {
            const shown = document.querySelector(where);
            return shown?.checkVisibility() && shown.textContent.includes('starting: 0 of 3 ranks, importing torch');
        })""",
        arg=starting,
    )
    assert not empty.is_visible()
    take_picture(page, "panel_starting")
    page.locator(f"{PANEL} .jdt-rank").nth(2).wait_for(timeout=60_000)
    assert not empty.is_visible()
    shut_down(page)
    empty.wait_for(state="visible")


@pytest.mark.browser
def test_ranks_and_metrics_are_shown_in_panel_and_widget_while_a_cell_trains(
    open_notebook: Callable[..., Page],
) -> None:
    page = open_notebook(
        "%load_ext jupyter_disttrain\n%dist_init -n 2",
        TRAIN.format(options="--watch", steps=100_000),
        "%%distributed\nprint('whole', dist.get_world_size())",
    )
    show_panel(page)
    start_ranks(page)
    run_cell(page, 1)
    # In the panel: the ranks run, the plots of both metrics have both ranks and are updated.
    page.locator(f"{PANEL} .jdt-rank[data-state=running]").first.wait_for(timeout=60_000)
    loss = page.locator(f"{PANEL} .jdt-plot[aria-label^='loss']")
    loss.and_(page.locator("[aria-label*='rank 0: '][aria-label*='rank 1: ']")).wait_for(timeout=60_000)
    seen = loss.get_attribute("aria-label")
    page.wait_for_function(
        "([panel, seen]) => document.querySelector(`${panel} .jdt-plot[aria-label^=loss]`).ariaLabel !== seen",
        arg=[PANEL, seen],
    )
    # Updates come twice a second and create no new elements.
    page.evaluate("panel => document.querySelector(`${panel} canvas`).id = 'marked'", PANEL)
    line = page.locator(f"{PANEL} .jdt-rank").first.inner_text()
    page.wait_for_function(
        "([panel, line]) => document.querySelector(`${panel} .jdt-rank`).innerText !== line", arg=[PANEL, line]
    )
    assert page.locator(f"{PANEL} canvas#marked").count() == 1
    page.locator(f"{PANEL} .jdt-plot[aria-label^='steps/s']").wait_for(timeout=60_000)
    # In the widget, while the kernel is busy.
    widget = ".jp-Notebook .jdt-view"
    page.locator(f"{widget} .jdt-plot[aria-label^='accuracy']").wait_for(timeout=60_000)
    assert not page.locator(".jp-Notebook .jdt-static").first.is_visible()
    take_picture(page, "training_light")
    set_theme(page, "JupyterLab Dark")
    page.wait_for_function(
        """panel => /^rgba?\\(\\d{1,2}, \\d{1,2}, \\d{1,2}/.test(
             getComputedStyle(document.querySelector(`${panel} .jdt-view`)).backgroundColor)""",
        arg=PANEL,
    )
    take_picture(page, "training_dark")
    set_theme(page, "JupyterLab Light")
    # The log of a rank opens from its row.
    page.locator(f"{PANEL} .jdt-rank").nth(1).click()
    page.locator(f"{PANEL} .jdt-log").filter(has_text="no output yet").wait_for()
    # After a reload during the cell, panel and metrics are restored.
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    page.reload()
    page.wait_for_function("() => window.jupyterapp?.shell.currentWidget?.sessionContext")
    page.evaluate("() => window.jupyterapp.restored")
    show_panel(page)
    page.locator(f"{PANEL} .jdt-plot[aria-label^='loss']").wait_for(timeout=60_000)
    page.locator(f"{PANEL} .jdt-rank[data-state=running]").first.wait_for(timeout=60_000)
    # The interrupt of the panel ends the cell although the kernel is busy.
    page.locator(f"{PANEL} .jdt-buttons button", has_text="Interrupt").click()
    page.wait_for_function(
        "panel => document.querySelectorAll(`${panel} .jdt-rank[data-state=idle]`).length === 2", arg=PANEL
    )
    run_cell(page, 2)
    assert "whole 2" in output(page, 2, "whole")
    # Stop asks for confirmation.
    page.locator(f"{PANEL} .jdt-buttons button", has_text="Stop").click()
    page.get_by_role("alertdialog", name="Shut down the ranks?").get_by_role("button", name="Cancel").click()
    assert page.locator(f"{PANEL} .jdt-rank").count() == 2
    page.locator(f"{PANEL} .jdt-buttons button", has_text="Stop").click()
    page.get_by_role("alertdialog").get_by_role("button", name="Shut down").click()
    page.locator(f"{PANEL} .jdt-empty").wait_for(state="visible", timeout=60_000)


@pytest.mark.browser
def test_saved_notebook_shows_the_last_state(open_notebook: Callable[..., Page], lab_server: LabServer) -> None:
    from nbconvert import HTMLExporter  # noqa: PLC0415

    page = open_notebook(
        "%load_ext jupyter_disttrain\n%dist_init -n 2 --launcher local", TRAIN.format(options="--watch", steps=60)
    )
    start_ranks(page)
    run_cell(page, 1)
    wait_for_end(page, 1)
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    (name,) = (path.name for path in lab_server.root.glob("*last_state*.ipynb"))
    saved = nbformat.read(lab_server.root / name, as_version=4)
    kinds = [set(found.get("data", ())) for found in saved.cells[1].outputs]
    assert any("text/html" in kind for kind in kinds)
    shut_down(page)
    body, _ = HTMLExporter().from_notebook_node(saved)
    (lab_server.root / "saved.html").write_text(body)
    page.goto((lab_server.root / "saved.html").as_uri())
    still = page.locator(".jdt-static")
    assert still.is_visible()
    assert still.locator("svg").count() == 2
    assert still.locator("tbody tr").count() == 2
    take_picture(page, "nbconvert")


@pytest.mark.browser
def test_commands_apply_to_the_active_notebook(open_notebook: Callable[..., Page], lab_server: LabServer) -> None:
    page = open_notebook("%load_ext jupyter_disttrain\n%dist_init -n 1 --launcher local --backend none", LOOP)
    run_cell(page, 0)
    output(page, 0, "rank 0 ready")
    show_panel(page)
    own = page.evaluate("() => window.jupyterapp.shell.currentWidget.context.path")
    other = f"other_{own}"
    (lab_server.root / other).write_bytes((lab_server.root / own).read_bytes())
    await_function(page, OPEN, other)
    page.evaluate(EXECUTE, "%load_ext jupyter_disttrain\n%dist_init -n 1 --launcher local --backend none --name other")
    page.locator(f"{PANEL} [role=tab]", has_text="other").click()
    await_function(page, OPEN, own)
    page.evaluate("() => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = 1; }")
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-cell'); }")
    page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-OutputArea", has_text="it runs").first.wait_for()
    page.evaluate("() => { window.jupyterapp.commands.execute('jupyter-disttrain:stop'); }")
    dialog = page.locator(".jp-Dialog")
    dialog.filter(has_text=f"Shut down the ranks of default ({own})?").wait_for()
    dialog.get_by_role("button", name="Cancel").click()
    page.evaluate("() => window.jupyterapp.commands.execute('jupyter-disttrain:interrupt')")
    page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-OutputArea", has_text="KeyboardInterrupt").first.wait_for()
    # What is not possible is reported.
    page.route(
        re.compile(r"/disttrain/api/clusters/[^/]+/interrupt"), lambda route: route.fulfill(status=409, json=REFUSAL)
    )
    page.evaluate("() => { window.jupyterapp.commands.execute('jupyter-disttrain:interrupt'); }")
    dialog.filter(has_text="no rank replies").wait_for()
    dialog.get_by_role("button").last.click()
    shut_down(page)
    await_function(page, OPEN, other)
    shut_down(page)


@pytest.mark.browser
def test_ranks_that_were_shut_down_are_never_shown_as_dead(
    open_notebook: Callable[..., Page], lab_server: LabServer
) -> None:
    page = open_notebook("%dist_status")
    show_panel(page)
    empty = page.locator(f"{PANEL} .jdt-empty")
    idle = page.locator(f"{PANEL} .jdt-state", has_text="2 ranks idle")
    page.evaluate(EXECUTE, START)
    run_cell(page, 0)
    page.locator(".jp-Notebook .jdt-rank").nth(1).wait_for()
    page.evaluate(RECORD)
    may_end = lab_server.root / "end"
    for end in ("%dist_reset -r 1", "%dist_reset", "%dist_shutdown", RESTART, END_KERNELS):
        if end in (RESTART, END_KERNELS):
            page.evaluate(EXECUTE, START)
        idle.wait_for()
        page.evaluate(EXECUTE, END_LATER)
        page.evaluate("() => window.shown.clear()")
        is_magic = end.startswith("%")
        page.evaluate(*((BEGIN, end) if is_magic else (f"() => {{ ({end})(); }}",)))
        if end == "%dist_reset":  # it starts new ranks meanwhile, maybe before the panel is drawn with one of the old
            page.wait_for_function(ENDED_OR_STARTING)
        else:
            page.locator(f"{PANEL} .jdt-state", has_text="1 ended").wait_for()
        may_end.touch()
        (idle if "reset" in end else empty).wait_for()
        if is_magic:
            page.wait_for_function("() => window.reply")
        assert not page.evaluate(SHOWN, "dead"), end
        may_end.unlink()


@pytest.mark.browser
def test_progress_in_the_panel_is_that_of_the_bars(open_notebook: Callable[..., Page], lab_server: LabServer) -> None:
    page = open_notebook(BAR)
    show_panel(page)
    page.evaluate(EXECUTE, "%load_ext jupyter_disttrain\n%config DistributedMagics.sample = 8")
    page.evaluate(RECORD)
    page.evaluate(EXECUTE, START)
    page.locator(f"{PANEL} .jdt-plot[aria-label^='memory']").wait_for()  # the first figures have arrived
    assert page.evaluate(SHOWN, "2 ranks idle")
    assert not page.evaluate(SHOWN, "2 ranks starting"), "they are ready once they are shown"
    run_cell(page, 0)
    progress = page.locator(f"{PANEL} .jdt-progress")
    for step in range(3, 8):
        output(page, 0, f"| {step}/60")
        progress.filter(has_text=f"{step} of 60").wait_for(timeout=2_000)
        (lab_server.root / f"step{step}").touch()
    take_picture(page, "progress")
    page.locator(f"{PANEL} .jdt-buttons button", has_text="Interrupt").click()
    page.locator(f"{PANEL} .jdt-state", has_text="2 ranks idle").wait_for()
    assert not progress.is_visible()
    assert page.evaluate(SHOWN, "of 60")
    page.evaluate(EXECUTE, SHORT_LOOPS)
    assert not page.evaluate(SHOWN, "of 57"), "a loop that ends before it can be read"
    shut_down(page)


@pytest.mark.browser
def test_variables_of_the_ranks_are_searched_and_sorted(open_notebook: Callable[..., Page]) -> None:
    page = open_notebook(
        "%load_ext jupyter_disttrain\n%dist_init -n 2 --launcher local",
        VARIABLES,
        "%%distributed\nadded = 'by a short cell'",
        "%dist_status",
    )
    show_panel(page)
    start_ranks(page)
    run_cell(page, 1)
    wait_for_end(page, 1)
    panel = page.locator(PANEL)
    panel.get_by_role("button", name="Variables", exact=True).click()
    view = panel.get_by_role("region", name="variables")
    names = view.locator("tbody th")
    names.nth(4).wait_for()
    assert names.all_inner_texts() == ["epoch", "epoch", "images", "scale", "weights"]
    assert view.locator("footer").inner_text() == "4 variables · tensors: 200.7 kB per rank"
    sort_variables(view)
    # Where the ranks differ, a sign and the ranks.
    differing = view.locator("tr.jdt-differs")
    assert [text.split("\t") for text in differing.all_inner_texts()] == [
        ["epoch", "rank 0", "0", "", "int"],
        ["epoch", "rank 1", "1", "", "int"],
    ]
    assert differing.locator("td").first.evaluate(SIGN) == '"≠"'
    ranks = view.get_by_role("columnheader", name="Ranks")
    assert ranks.is_visible()
    search = view.get_by_role("searchbox")
    search.fill("EPO")
    assert names.all_inner_texts() == ["epoch", "epoch"]
    assert view.locator("footer").inner_text().startswith("1 of 4 variables")
    search.fill("images")
    assert not ranks.is_visible()  # a column without a text
    search.fill("absent")
    view.get_by_text("no variable has this text in its name").wait_for()
    search.fill("")
    take_picture(page, "variables")
    # A cell that has ended, also one that was never seen to run, changes the list.
    run_cell(page, 2)
    view.locator("tr", has_text="added").filter(has_text="'by a short cell'").wait_for()
    fail_to_read_variables(page)
    view.locator("header button").click()
    assert not view.is_visible()
    assert page.evaluate("() => document.activeElement.textContent") == "Variables"
    # The same in the notebook.
    run_cell(page, 3)
    widget = page.locator(".jp-Notebook .jdt-view")
    widget.get_by_role("button", name="Variables", exact=True).click()
    widget.locator(".jdt-variables tbody th", has_text="images").wait_for()


def sort_variables(view: Locator) -> None:
    """Sort by size, the largest and the smallest first, then by name, with mouse and keyboard."""
    names, size = view.locator("tbody th"), view.locator("thead th", has_text="Size")
    size.get_by_role("button").click()
    assert size.get_attribute("aria-sort") == "descending"
    assert names.all_inner_texts() == ["images", "weights", "epoch", "epoch", "scale"]
    view.page.keyboard.press("Enter")
    assert size.get_attribute("aria-sort") == "ascending"
    assert names.all_inner_texts() == ["weights", "images", "epoch", "epoch", "scale"]
    by_name = view.locator("thead th", has_text="Name")
    assert by_name.get_attribute("aria-sort") == "none"
    by_name.get_by_role("button").focus()
    view.page.keyboard.press("Enter")
    assert by_name.get_attribute("aria-sort") == "ascending"
    assert names.all_inner_texts() == ["epoch", "epoch", "images", "scale", "weights"]


def fail_to_read_variables(page: Page) -> None:
    """Ranks without a reply, an error of the server, and how the list returns."""
    view = page.locator(PANEL).get_by_role("region", name="variables")
    refresh = view.get_by_role("button", name="Refresh")
    path = re.compile(r"/disttrain/api/clusters/[^/]+/variables")
    page.route(path, lambda route: route.fulfill(json=NO_REPLY))
    refresh.click()
    view.get_by_text("rank 1 does not reply").wait_for()
    view.get_by_text("no variables on rank 0").wait_for()
    page.unroute(path)
    page.route(path, lambda route: route.fulfill(status=409, json=REFUSAL))
    refresh.click()
    view.get_by_role("alert").filter(has_text="no rank replies").wait_for()
    page.unroute(path)
    refresh.click()
    view.locator("tbody th", has_text="images").wait_for()
    assert view.get_by_role("alert").count() == 0
