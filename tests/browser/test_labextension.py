"""The commands of the JupyterLab extension, driven as a user would."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Page

    from ..support.browser import LabServer

START = "Start ranks for this notebook"
RUN = "Run this cell on all ranks"

CELLS = "[...window.jupyterapp.shell.currentWidget.model.cells]"
ENABLED = """() => window.jupyterapp.commands.listCommands()
  .filter(id => id.startsWith('jupyter-disttrain:'))
  .filter(id => window.jupyterapp.commands.isEnabled(id))"""
OTHERS = {
    "Distributed notebook",
    "Attach to ranks of an earlier kernel",
    "Show ranks in the side panel",
    "Show ranks in the main area",
    "Interrupt the ranks",
    "Restart the ranks",
    "Shut down the ranks",
}


@pytest.mark.browser
def test_palette_lists_the_commands(open_notebook: Callable[..., Page]) -> None:
    page = open_notebook("x = 1")
    search_palette(page, "distributed training")
    assert set(page.locator(".lm-CommandPalette-itemLabel").all_inner_texts()) == {START, RUN, *OTHERS}


@pytest.mark.browser
def test_cell_run_on_all_ranks_begins_with_the_magic(open_notebook: Callable[..., Page]) -> None:
    page = open_notebook("x = 1", "y = 2")
    button = page.get_by_role("button", name=f"{RUN}, with %%distributed as its first line")

    button.click()
    wait_for_run(page, index=0, count=1)
    assert sources(page) == ["%%distributed\nx = 1", "y = 2"]

    button.click()
    wait_for_run(page, index=0, count=2)
    assert sources(page) == ["%%distributed\nx = 1", "y = 2"]


@pytest.mark.browser
@pytest.mark.parametrize("magic", ["%%distributed -r 0", "%%rank [0]"])
def test_cell_that_names_its_ranks_keeps_them(open_notebook: Callable[..., Page], magic: str) -> None:
    page = open_notebook(f"{magic}\nx = 1")
    choose_in_palette(page, RUN)
    wait_for_run(page, index=0, count=1)
    assert sources(page) == [f"{magic}\nx = 1"]


@pytest.mark.browser
def test_launcher_menu_and_keyboard_start_ranks(lab_server: LabServer, page: Page) -> None:
    page.goto(lab_server.link())
    page.locator(".jp-LauncherCard[title^='A new notebook whose first cell starts ranks']").click()
    page.locator(".jp-NotebookPanel .cm-content").first.wait_for()
    page.wait_for_function(f"() => {CELLS}[0]?.sharedModel.getSource().includes('dist_init')")
    assert sources(page) == ["%load_ext jupyter_disttrain\n%dist_init"]
    page.locator(".lm-MenuBar-itemLabel", has_text="Kernel").click()
    page.locator(".lm-Menu-itemLabel", has_text="Distributed Training").click()
    menu = page.locator(".lm-Menu").filter(has=page.locator("[data-command='jupyter-disttrain:stop']")).last
    menu.wait_for()
    assert OTHERS - {"Distributed notebook"} <= set(menu.locator(".lm-Menu-itemLabel").all_inner_texts())
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+Shift+R")
    page.locator("#jupyter-disttrain-panel").wait_for(state="visible")


@pytest.mark.browser
def test_commands_are_disabled_without_a_notebook(lab_server: LabServer, page: Page) -> None:
    page.goto(lab_server.link())
    page.wait_for_function("() => window.jupyterapp?.restored")
    page.evaluate("() => window.jupyterapp.restored")
    own = {f"jupyter-disttrain:{name}" for name in ("new-notebook", "show-panel", "open-main")}
    assert set(page.evaluate(ENABLED)) == own


def search_palette(page: Page, text: str) -> None:
    page.keyboard.press("Control+Shift+C")
    page.locator(".lm-CommandPalette-input").fill(text)
    page.locator(".lm-CommandPalette-item").first.wait_for()


def choose_in_palette(page: Page, label: str) -> None:
    search_palette(page, label)
    page.locator(".lm-CommandPalette-item", has_text=label).click()


def sources(page: Page) -> list[str]:
    return page.evaluate(f"() => {CELLS}.map(cell => cell.sharedModel.getSource())")


def wait_for_run(page: Page, *, index: int, count: int) -> None:
    page.wait_for_function(f"([index, count]) => {CELLS}[index]?.executionCount === count", arg=[index, count])
