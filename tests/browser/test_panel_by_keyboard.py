"""The side panel by keyboard and screen reader: keys, roles, announcements."""

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
ANNOUNCEMENT = f"{PANEL} .jdt-said"


def active_row(page: Page) -> str:
    """Return the text of the active row of a screen reader."""
    return str(
        page.evaluate(
            """table => document.getElementById(
                 document.querySelector(table).getAttribute('aria-activedescendant')).innerText""",
            TABLE,
        )
    )


@pytest.mark.browser
def test_rows_are_navigated_opened_and_selected_with_keys(open_notebook: Callable[..., Page]) -> None:
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
    assert "2 ranks" in active_row(page)
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
    assert "2 ranks" in active_row(page)
    snapshot = page.locator(PANEL).aria_snapshot()
    for role in ('toolbar "cluster"', 'button "Interrupt"', 'treegrid "nodes and ranks"', 'columnheader "state"'):
        assert f"- {role}" in snapshot, snapshot


@pytest.mark.browser
def test_announcement_changes_with_the_state(open_notebook: Callable[..., Page], tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    wait = f"%%distributed\nimport os, time\nwhile not os.path.exists({str(stop)!r}): time.sleep(0.01)"
    page = open_notebook("%load_ext jupyter_disttrain\n%dist_init -n 2 --launcher local", wait)
    show_panel(page)
    start_ranks(page)
    page.locator(ANNOUNCEMENT, has_text="no cell runs").wait_for(state="attached")
    page.evaluate(
        """said => {
             window.saidAloud = [];
             new MutationObserver(() => window.saidAloud.push(document.querySelector(said).textContent))
               .observe(document.querySelector(said), { childList: true, characterData: true, subtree: true });
           }""",
        ANNOUNCEMENT,
    )
    run_cell(page, 1)
    page.locator(ANNOUNCEMENT, has_text="the ranks run a cell").wait_for(state="attached")
    stop.touch()
    wait_for_end(page, 1)
    page.locator(ANNOUNCEMENT, has_text="no cell runs").wait_for(state="attached")
    # Twice, although the view has changed many times meanwhile.
    assert page.evaluate("() => window.saidAloud") == ["the ranks run a cell", "no cell runs"]


@pytest.mark.browser
def test_last_announcement_is_made_although_nothing_is_drawn_after_it(open_notebook: Callable[..., Page]) -> None:
    page = open_notebook(
        "%load_ext jupyter_disttrain\n%dist_init -n 2 --launcher local", "%dist_status", "%dist_shutdown"
    )
    start_ranks(page)
    run_cell(page, 1)
    announcement = page.locator(".jp-Notebook .jdt-said")
    announcement.filter(has_text="no cell runs").wait_for(state="attached")
    run_cell(page, 2)
    announcement.filter(has_text="has ended; this is how it was last").wait_for(state="attached")
