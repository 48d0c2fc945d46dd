"""Tab and Shift-Tab in JupyterLab, in cells for ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ..support.browser import run_cell, start_ranks, take_picture, wait_for_end

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Page

START = "%load_ext jupyter_disttrain\n%dist_init -n 2 --launcher local"
DEFINE = """%%distributed
weights = torch.ones(2, 3)
if rank == 1: weights_of_one = 1
def train(epochs, lr=0.1):
    "Train for some epochs."
"""


@pytest.mark.browser
def test_tab_and_shift_tab_know_the_variables_of_ranks(open_notebook: Callable[..., Page]) -> None:
    page = open_notebook(START, DEFINE, "%%distributed\nwei", "%%distributed\ntrain(")
    start_ranks(page, 2)
    run_cell(page, 1)
    wait_for_end(page, 1)
    _edit(page, 2)
    page.keyboard.press("Tab")
    menu = page.locator(".jp-Completer:visible")
    menu.wait_for()
    assert menu.locator(".jp-Completer-match").all_inner_texts() == ["weights", "weights_of_one"]
    assert menu.locator(".jp-Completer-typeExtended").all_inner_texts() == [
        "instance",
        "instance,\xa0only\xa0rank\xa01",
    ]
    take_picture(page, "completion")
    page.keyboard.press("Escape")
    _edit(page, 3)
    page.keyboard.press("Shift+Tab")
    tooltip = page.locator(".jp-Tooltip:visible")
    tooltip.wait_for()
    assert "train(epochs, lr=0.1)" in tooltip.inner_text()
    assert "Train for some epochs." in tooltip.inner_text()
    take_picture(page, "inspection")


def _edit(page: Page, index: int) -> None:
    """Set the cursor at the end of a cell."""
    page.locator(".jp-Notebook-cell").nth(index).locator(".cm-content").click()
    page.keyboard.press("Control+End")
