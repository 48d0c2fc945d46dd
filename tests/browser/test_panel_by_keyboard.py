"""The side panel by keyboard and screen reader: keys, roles, and announcements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ..support.browser import run_cell, start_ranks, wait_for_end
from .test_panel import PANEL, show_panel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from playwright.sync_api import Page

TABLE = f"{PANEL} [role=treegrid]"
LIVE_REGION = f"{PANEL} .jdt-live-region"


def active_row(page: Page) -> str:
    """Return the text of the row that has the keyboard focus."""
    return str(
        page.evaluate(
            """table => document.getElementById(
                 document.querySelector(table).getAttribute('aria-activedescendant')).innerText""",
            TABLE,
        )
    )


@pytest.mark.browser
def test_rows_are_selected_expanded_and_activated_with_keys(open_notebook: Callable[..., Page]) -> None:
    page = open_notebook("%load_ext jupyter_disttrain\n%dist_init -n 2 --launcher local")
    show_panel(page)
    start_ranks(page)
    rows = page.locator(f"{PANEL} .jdt-rank")
    rows.nth(1).wait_for()
    # From the button before it, the Tab key leads to the table.
    page.get_by_role("button", name="Stop", exact=True).focus()
    page.keyboard.press("Tab")
    assert page.evaluate("table => document.activeElement === document.querySelector(table)", TABLE)
    page.keyboard.press("ArrowDown")
    assert active_row(page).startswith("▾")  # the node; its figures come later, in place of the number of ranks
    page.keyboard.press("ArrowLeft")
    page.locator(f"{PANEL} .jdt-node[aria-expanded=false]").wait_for()
    assert rows.count() == 0
    page.keyboard.press("ArrowRight")
    page.locator(f"{PANEL} .jdt-node[aria-expanded=true]").wait_for()
    page.keyboard.press("ArrowRight")
    assert active_row(page).startswith("0\t")
    page.keyboard.press("End")
    assert active_row(page).startswith("1\t")
    page.keyboard.press("Enter")
    page.get_by_role("region", name="log of rank 1").wait_for()
    page.keyboard.press("ArrowLeft")
    assert active_row(page).startswith("▾")
    snapshot = page.locator(PANEL).aria_snapshot()
    for role in ('toolbar "cluster"', 'button "Interrupt"', 'treegrid "nodes and ranks"', 'columnheader "state"'):
        assert f"- {role}" in snapshot, snapshot


@pytest.mark.browser
def test_the_live_region_changes_with_the_state(open_notebook: Callable[..., Page], tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    wait = f"%%distributed\nimport os, time\nwhile not os.path.exists({str(stop)!r}): time.sleep(0.01)"
    page = open_notebook("%load_ext jupyter_disttrain\n%dist_init -n 2 --launcher local", wait)
    show_panel(page)
    start_ranks(page)
    page.locator(LIVE_REGION, has_text="no cell runs").wait_for(state="attached")
    page.evaluate(
        """selector => {
             const region = document.querySelector(selector);
             window.announced = [];
             new MutationObserver(() => window.announced.push(region.textContent))
               .observe(region, { childList: true, characterData: true, subtree: true });
           }""",
        LIVE_REGION,
    )
    run_cell(page, 1)
    page.locator(LIVE_REGION, has_text="the ranks run a cell").wait_for(state="attached")
    stop.touch()
    wait_for_end(page, 1)
    page.locator(LIVE_REGION, has_text="no cell runs").wait_for(state="attached")
    # Twice, although the view has changed many times meanwhile.
    assert page.evaluate("() => window.announced") == ["the ranks run a cell", "no cell runs"]


@pytest.mark.browser
def test_the_end_is_announced_though_nothing_is_drawn_after_it(open_notebook: Callable[..., Page]) -> None:
    page = open_notebook(
        "%load_ext jupyter_disttrain\n%dist_init -n 2 --launcher local", "%dist_status", "%dist_shutdown"
    )
    start_ranks(page)
    run_cell(page, 1)
    live_region = page.locator(".jp-Notebook .jdt-live-region")
    live_region.filter(has_text="no cell runs").wait_for(state="attached")
    run_cell(page, 2)
    live_region.filter(has_text="has ended; this is its last state").wait_for(state="attached")
