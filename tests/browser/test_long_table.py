"""A table with more ranks than can be drawn: the keys reach all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.overhead.page.widget import served

if TYPE_CHECKING:
    from playwright.sync_api import Page

RANKS = 512
# The active row of a screen reader, and whether all of it is visible below the titles.
ACTIVE_ROW = """() => {
  const table = document.querySelector('.jdt-table');
  const row = document.getElementById(table.getAttribute('aria-activedescendant'));
  const seen = document.querySelector('.jdt-table-scroller').getBoundingClientRect();
  const titles = table.querySelector('thead').getBoundingClientRect();
  const place = row.getBoundingClientRect();
  return {
    text: row.innerText.split('\\t')[0], chosen: row.classList.contains('jdt-selected'),
    index: Number(row.getAttribute('aria-rowindex')),
    inSight: place.top >= titles.bottom - 1 && place.bottom <= seen.bottom + 1,
    drawn: table.querySelectorAll('tbody tr').length, rows: Number(table.getAttribute('aria-rowcount'))
  };
}"""


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 340])
def test_selected_row_is_scrolled_into_view(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    with served() as address:
        page.goto(address)
        page.wait_for_function("() => window.ready")
        page.evaluate("ranks => { window.shown = window.show(ranks); }", RANKS)
        page.locator(".jdt-rank").first.wait_for()
        page.locator(".jdt-table").focus()
        nodes = RANKS // 8
        for keys, text in (
            (["End"], str(RANKS - 1)),
            (["ArrowUp", "ArrowUp"], str(RANKS - 3)),
            (["Home", "ArrowDown"], "0"),
            (["ArrowDown"] * 100, "89"),
        ):
            for key in keys:
                page.keyboard.press(key)
            row = page.evaluate(ACTIVE_ROW)
            assert row["text"] == text
            assert row["chosen"], row
            assert row["inSight"], row
            assert row["drawn"] < 100
            assert row["rows"] == RANKS + nodes + 1
        # It stays selected while it is out of view, and the next key continues from there.
        page.evaluate("() => { document.querySelector('.jdt-table-scroller').scrollTop = 0; }")
        page.wait_for_function("() => !document.querySelector('.jdt-selected')")
        page.keyboard.press("ArrowDown")
        row = page.evaluate(ACTIVE_ROW)
        assert row["text"] == "90"
        assert row["inSight"], row
        page.evaluate("() => window.shown.end()")
