"""The panel in narrow space, in the main area, and with many ranks: nothing is cut off, and everything is reachable."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from benchmarks.overhead.page.widget import served

from ..support.browser import run_cell, start_ranks, take_picture, wait_for_end
from .test_panel import PANEL, TRAIN, show_panel

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Locator, Page

MAIN = "#jupyter-disttrain-main"
WRITE = r"""%%distributed
import sys
for at in range(5):
    print(f'\rbar {at} of 4', end='', file=sys.stderr, flush=True)
print('\na line on stdout', rank)"""
# Elements that extend beyond the right edge of the panel or of the table's box.
OVERFLOWING = """panel => {
  const node = document.querySelector(panel);
  const end = node.getBoundingClientRect().left + node.clientWidth;
  const scroller = node.querySelector('.jdt-table-scroller');
  const cut = [...node.querySelectorAll('.jdt-view *')].filter(each =>
    !each.closest('.jdt-live-region, .jdt-table-scroller, svg') && each.getBoundingClientRect().right > end + 0.5);
  return {
    width: node.clientWidth, cut: cut.map(each => each.outerHTML.slice(0, 80)),
    table: scroller.scrollWidth - scroller.clientWidth,
    titles: [...scroller.querySelectorAll('th')].map(each => each.innerText)
  };
}"""
# Selects that are narrower than their widest option.
TOO_NARROW = """panel => [...document.querySelectorAll(`${panel} select`)].filter(each => {
  const copy = each.cloneNode(true);
  Object.assign(copy.style, { flex: 'none', maxWidth: 'none', width: 'max-content' });
  each.after(copy);
  const width = copy.getBoundingClientRect().width;
  copy.remove();
  return width > each.getBoundingClientRect().width + 0.5;
}).map(each => each.outerHTML.slice(0, 80))"""


def texts(found: Locator) -> list[str]:
    return [text.strip() for text in found.all_inner_texts()]


@pytest.mark.browser
def test_narrow_panel_logs_and_main_area(open_notebook: Callable[..., Page]) -> None:
    page = open_notebook(
        "%load_ext jupyter_disttrain\n%dist_init -n 2 --launcher local",
        WRITE,
        TRAIN.format(options="", steps=100_000).replace("time.sleep(0.02)", "log_metrics(step, common=step)"),
    )
    show_panel(page)
    start_ranks(page)
    run_cell(page, 1)
    wait_for_end(page, 1)
    read_logs(page)
    run_cell(page, 2)
    check_narrow_panel(page)
    use_the_keyboard(page)


def read_logs(page: Page) -> None:
    # A log as a terminal shows it: overwritten bars, marked stderr, search, all ranks.
    page.locator(f"{PANEL} .jdt-rank").nth(1).click()
    log = page.locator(f"{PANEL} .jdt-log")
    log.locator(".jdt-stderr", has_text="bar 4 of 4").wait_for()
    assert texts(log.locator("pre > span")) == ["bar 4 of 4", "", "a line on stdout 1"]
    log.get_by_role("button", name="All ranks").click()
    page.get_by_role("region", name="logs of all ranks").locator("pre", has_text="0 │ a line on stdout 0").wait_for()
    log.get_by_role("searchbox").fill("STDOUT")
    assert texts(log.locator("pre > span")) == ["0 │ a line on stdout 0", "1 │ a line on stdout 1"]
    assert texts(log.locator("mark")) == ["stdout", "stdout"]
    page.locator(f"{PANEL} .jdt-rank").first.click()
    log.get_by_role("searchbox").fill("")
    with page.expect_download() as saved:
        log.get_by_role("link", name="Download").click()
    assert saved.value.path().read_text().endswith("a line on stdout 0\n")
    log.locator("header button").click()
    assert not log.is_visible()


def check_narrow_panel(page: Page) -> None:
    # At the default width of a JupyterLab panel, the most important columns are fully visible.
    loss = page.locator(f"{PANEL} .jdt-plot[aria-label^='loss']")
    loss.wait_for(timeout=60_000)
    page.locator(f"{PANEL} th", has_text="steps/s").wait_for(timeout=60_000)
    # A wider text gets its room from the columns that follow.
    page.wait_for_function(f"panel => ({OVERFLOWING})(panel).table === 0", arg=PANEL)
    found = page.evaluate(OVERFLOWING, PANEL)
    assert found["width"] < 300, found
    assert found["cut"] == []
    assert found["table"] == 0, found
    assert found["titles"][:4] == ["rank", "state", "line", "steps/s"], found
    node = page.locator(f"{PANEL} .jdt-node").inner_text()
    assert re.search(r" · load \d+\.\d · \d+\.\d/\d+\.\d GiB", node), node
    assert "2 ranks" not in node, "the header shows it"
    smoothing = page.locator(f"{PANEL} .jdt-metrics select")
    smoothing.select_option("0.97")
    assert page.evaluate(TOO_NARROW, PANEL) == []
    smoothing.scroll_into_view_if_needed()
    take_picture(page, "panel_narrow")
    smoothing.select_option("0")
    # The legend has the last values as text; values that all ranks share are one line.
    assert [text.split()[:2] for text in texts(loss.locator(".jdt-legend-entry"))] == [["rank", "0:"], ["rank", "1:"]]
    assert all(float(text.split()[2]) > 0 for text in texts(loss.locator(".jdt-legend-entry")))
    common = page.locator(f"{PANEL} .jdt-plot[aria-label^='common']").locator(".jdt-legend-entry")
    common.filter(has_text="all ranks").wait_for()
    loss.locator(".jdt-legend-entry", has_text="rank 1").click()
    page.locator(f"{PANEL} .jdt-legend-entry[aria-pressed=false]", has_text="rank 1").first.wait_for()
    loss.locator(".jdt-legend-entry", has_text="rank 1").click()


def use_the_keyboard(page: Page) -> None:
    # Along a plot, and enlarged.
    loss = page.locator(f"{PANEL} .jdt-plot[aria-label^='loss']")
    loss.focus()
    page.keyboard.press("ArrowLeft")
    loss.locator(".jdt-position", has_text="step").wait_for()
    page.keyboard.press("Enter")
    page.wait_for_function(
        "panel => document.querySelector(`${panel} .jdt-large canvas`).clientHeight > 300", arg=PANEL
    )
    page.keyboard.press("Enter")
    # The same in the main area, with all columns and everything that was logged before it was opened.
    page.locator(f"{PANEL} .jdt-buttons").get_by_role("button", name="Interrupt").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    page.locator(f"{MAIN} .jdt-plot[aria-label^='loss'] canvas").wait_for()
    page.locator(f"{MAIN} th", has_text="pid").wait_for()
    assert page.evaluate(OVERFLOWING, MAIN)["cut"] == []
    assert page.evaluate(TOP, f"{MAIN} .jdt-main") == page.evaluate(TOP, MAIN), "there is no strip above it"
    page.locator(f"{MAIN} .jdt-plot[aria-label^='memory (MiB)']").wait_for()
    take_picture(page, "main_area")
    page.keyboard.press("Alt+Shift+I")
    page.locator(f"{MAIN} .jdt-state", has_text="2 ranks idle").wait_for()


# As the widget of a notebook is fed, with more ranks than this machine has cores.
FEED = """() => {
  const shown = window.shown = window.show(64);
  const { ranks } = shown.state.state;
  ranks.forEach(each => { each.steps_per_s = 10 - each.rank / 10; each.memory_bytes = (1 + each.rank % 7) * 2 ** 30; });
  ranks[9].state = ranks[9].text = 'dead';
  Object.assign(ranks[40], { state: 'not responding', text: 'no report for 9 s' });
  shown.emit('change:state');
  for (let at = 0; at < 60; at++) {
    const points = ranks.map(each => [String(each.rank), [[1e9 + at, 50, 2 ** 30, 50, 2 ** 34, 9]]]);
    shown.emit('msg:custom', { devices: Object.fromEntries(points) }, []);
  }
}"""
# Inputs whose placeholder is wider than their content box.
CUT_PLACEHOLDERS = """() => {
  const context = document.createElement('canvas').getContext('2d');
  return [...document.querySelectorAll('.jdt-view input[placeholder]')].filter(each => {
    const { font, paddingLeft, paddingRight } = getComputedStyle(each);
    context.font = font;
    const room = each.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight);
    return each.clientWidth > 0 && context.measureText(each.placeholder).width > room;
  }).map(each => each.placeholder);
}"""
TOP = "node => document.querySelector(node).getBoundingClientRect().top"


def without_a_server(page: Page) -> None:
    """As in VS Code: requests go to the kernel, once the view has asked the user."""
    last = "() => shown.sent.at(-1)"
    assert page.get_by_role("button", name="Variables").count() == 0
    page.get_by_role("button", name="Stop", exact=True).click()
    question = page.get_by_role("alertdialog", name="Shut down the ranks?")
    question.get_by_role("button", name="Cancel").click()
    assert page.evaluate(last)["ask"] != "stop"
    page.get_by_role("button", name="Stop", exact=True).click()
    question.get_by_role("button", name="Shut down").click()
    assert page.evaluate(last)["ask"] == "stop"
    page.evaluate("() => shown.emit('msg:custom', {reply: shown.sent.at(-1).token, message: 'it is not yours'}, [])")
    page.get_by_role("alert").filter(has_text="it is not yours").wait_for()
    page.locator(".jdt-rank").first.click()
    request = page.evaluate(last)
    assert request["ask"] == "log"
    parts = [{"stream": "stderr", "text": "by the kernel\n"}]
    reply = {"reply": request["token"], "logs": [{"rank": request["rank"], "parts": parts, "is_cut": False}]}
    page.evaluate("reply => shown.emit('msg:custom', reply, [])", reply)
    page.locator(".jdt-log .jdt-stderr", has_text="by the kernel").wait_for()
    with page.expect_download() as saved:
        page.locator(".jdt-log").get_by_role("button", name="Download").click()
    assert saved.value.path().read_text() == "by the kernel\n"


def first_ranks(page: Page, count: int) -> list[str]:
    return [text.split("\t")[0] for text in page.locator(".jdt-rank").all_inner_texts()[:count]]


@pytest.mark.browser
def test_many_ranks_are_summarized_filtered_and_sorted(page: Page) -> None:
    page.set_viewport_size({"width": 250, "height": 900})
    with served() as address:
        page.goto(address)
        page.wait_for_function("() => window.ready")
        page.evaluate(FEED)
        page.locator(".jdt-rank").first.wait_for()
        assert page.evaluate(CUT_PLACEHOLDERS) == []
        assert "0-7,12" in (page.locator(".jdt-filter input").get_attribute("title") or "")
        page.set_viewport_size({"width": 300, "height": 900})
        assert texts(page.locator(".jdt-chip")) == ["62 running", "1 not responding", "1 dead"]
        page.locator(".jdt-plot canvas").first.wait_for()
        assert page.evaluate(TOP, ".jdt-plot") < 620
        page.locator(".jdt-chip", has_text="1 dead").click()
        page.wait_for_function("() => document.querySelectorAll('.jdt-rank').length === 1")
        assert first_ranks(page, 1) == ["9"]
        page.locator(".jdt-chip", has_text="1 dead").click()
        page.get_by_label("order").select_option("slowest")
        page.wait_for_function("() => !document.querySelector('.jdt-node')")
        assert first_ranks(page, 3) == ["63", "62", "61"]
        page.get_by_label("order").select_option("memory")
        page.locator(".jdt-filter input").fill("6-20,33 node0")
        page.wait_for_function("() => document.querySelectorAll('.jdt-rank').length === 2")
        assert first_ranks(page, 2) == ["6", "7"]
        # The plots follow the filter, and few ranks are separate lines.
        page.locator(".jdt-mean").uncheck()
        page.locator(".jdt-plot[aria-label^='CPU'] .jdt-legend-entry", has_text="rank 7").wait_for()
        assert page.locator(".jdt-plot[aria-label^='CPU'] .jdt-legend-entry").count() == 2
        page.locator(".jdt-filter input").fill("")
        without_a_server(page)
        # Ended ranks cannot be controlled, and their logs cannot be read.
        page.evaluate("() => { shown.state.ended = 'has ended'; shown.emit('change:ended'); }")
        page.locator(".jdt-ended .jdt-state", has_text="has ended").wait_for()
        assert not page.locator(".jdt-buttons").first.is_visible()
        assert not page.locator(".jdt-filter").is_visible()
        page.locator(".jdt-rank").first.click()
        assert not page.locator(".jdt-log").is_visible()
        page.evaluate("() => shown.end()")
