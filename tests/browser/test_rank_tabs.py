"""Tabs over the ranks' output, in JupyterLab and in Notebook 7."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

import nbformat
import pytest

from jupyter_disttrain.notebook.output.renderer import RANKS_MIME

from ..support.browser import output, run_cell, start_ranks, take_picture, wait_for_end, wait_for_notebook
from .test_panel import TRAIN

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Locator, Page

    from ..support.browser import LabServer

START = "%load_ext jupyter_disttrain\n%dist_init -n 3 --launcher local"
PRINT = """%%distributed
import sys
from IPython.display import HTML
print("together")
print(f"own {rank}\\nof two lines")
print("aside", rank, file=sys.stderr)
if rank: display(HTML(f"<b>figure of {rank}</b>"))
print("last")"""


# Of each image: how far right of its label it begins, and how far below the label's centre its own is.
BESIDE = """area => [...area.querySelectorAll('b')].map(figure => {
  const range = document.createRange();
  range.selectNodeContents(figure.closest('.jp-OutputArea-child').previousElementSibling.querySelector('pre'));
  const label = [...range.getClientRects()].at(-1), place = figure.getBoundingClientRect();
  return [place.left - label.right, (place.top + place.bottom - label.top - label.bottom) / 2];
})"""


def area_of(page: Page, index: int) -> Locator:
    return page.locator(".jp-Notebook-cell").nth(index).locator(".jp-OutputArea").first


def visible_lines(area: Locator) -> list[str]:
    """Return the visible lines of text, without the bars before stderr."""
    texts = area.locator(".jdt-ranks-text").all_inner_texts()
    return [line.removeprefix("┃").strip() for text in texts for line in text.splitlines() if line.strip(" ┃")]


@pytest.mark.browser
def test_one_rank_is_shown_alone_and_all_again(open_notebook: Callable[..., Page]) -> None:
    page = open_notebook(START, PRINT)
    start_ranks(page, 3)
    run_cell(page, 1)
    wait_for_end(page, 1)
    area = area_of(page, 1)
    merged = area.inner_text()
    assert "ranks 0-2 │ together" in merged
    area.hover()
    tabs = area.get_by_role("tab")
    assert tabs.locator("visible=true").all_inner_texts() == ["all", "0", "1", "2"]
    take_picture(page, "rank_tabs")
    beside = area.evaluate(BESIDE)
    assert len(beside) == 2
    assert all(0 <= right < 20 and abs(below) < 6 for right, below in beside), beside
    left = area.evaluate("area => area.querySelector('b').getBoundingClientRect().left")
    tabs.locator("visible=true").nth(2).click()
    mine = ["together", "own 1", "of two lines", "aside 1", "last"]
    assert sorted(visible_lines(area)) == sorted(mine)
    figures = area.locator("b", has_text="figure of")
    assert [each.is_visible() for each in figures.all()] == [True, False]
    assert left - area.evaluate("area => area.querySelector('b').getBoundingClientRect().left") > 80, (
        "no room for a label"
    )
    take_picture(page, "rank_tabs_one")
    page.keyboard.press("ArrowLeft")
    assert sorted(visible_lines(area)) == sorted(["together", "own 0", "of two lines", "aside 0", "last"])
    assert not any(each.is_visible() for each in figures.all())
    page.keyboard.press("ArrowLeft")
    assert area.inner_text() == merged
    assert all(each.is_visible() for each in figures.all())


SCATTERED = """%%distributed
import sys
from IPython.display import HTML
print("even" if rank % 2 == 0 else "odd")
print("mine", rank)
print("three" if rank in (0, 1, 3) else "rest", file=sys.stderr)
display([rank, "x" * 60, "y" * 60])
display(HTML(f"<b>figure of {rank}</b>"))
if rank == 2: raise ValueError("fails")"""
# The contrast of the innermost element with a text against its background, as WCAG computes it.
CONTRAST = """(area, text) => {
  const found = [...area.querySelectorAll('pre *')].filter(each => each.textContent.includes(text)).pop();
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const behind = node => {
    if (node === null) return [255, 255, 255];
    const [red, green, blue, alpha = 1] = numbers(getComputedStyle(node).backgroundColor);
    const below = alpha < 1 ? behind(node.parentElement) : [0, 0, 0];
    return [red, green, blue].map((value, at) => alpha * value + (1 - alpha) * below[at]);
  };
  const light = colour => colour.slice(0, 3).map(value => value / 255)
    .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
    .reduce((sum, value, at) => sum + value * [0.2126, 0.7152, 0.0722][at], 0);
  const text_colour = numbers(getComputedStyle(found).color), ground = behind(found);
  const alpha = text_colour[3] ?? 1;
  const brighter = Number(getComputedStyle(found).filter.match(/^brightness\\((.+)\\)$/)?.[1] ?? 1);
  const seen = ground.map((value, at) => Math.min(255, brighter * text_colour[at]) * alpha + (1 - alpha) * value);
  const [dark, bright] = [light(seen), light(ground)].sort((one, other) => one - other);
  return (bright + 0.05) / (dark + 0.05);
}"""
LONG = "%%distributed\nfor line in range(700): print(rank, line)"
# Content of a notebook saved by version 0.1: labels of scattered ranks are wider than the column.
OLD = (
    "\x1b[34mranks 0,2,4 │\x1b[0m even\n"
    "\x1b[34mranks 1,3 │\x1b[0m odd\n"
    "\x1b[34mrank 1    │\x1b[0m own\n"
    "\x1b[34m          │\x1b[0m of two lines\n"
    "\x1b[34mrank 1    \x1b[0m\x1b[31m┃\x1b[0m aside\n"
    "\x1b[31ma note for all\x1b[0m"
)


@pytest.mark.browser
def test_tab_shows_exactly_the_output_of_its_rank(lab_server: LabServer, page: Page) -> None:
    name = "scattered.ipynb"
    sources = [START.replace("-n 3", "-n 5"), SCATTERED, LONG]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, lab_server.root / name)
    page.goto(lab_server.link(name))
    wait_for_notebook(page)
    for index in range(3):
        run_cell(page, index)
        wait_for_end(page, index)
    area = area_of(page, 1)
    figures = area.locator("b", has_text="figure of")
    take_picture(page, "scattered")
    for rank in range(5):
        area.get_by_role("tab", name=str(rank), exact=True).click()
        area.locator(".jdt-ranks-text", has_text=f"mine {rank}").wait_for()
        lines = ["even" if rank % 2 == 0 else "odd", f"mine {rank}", "three" if rank in (0, 1, 3) else "rest"]
        assert visible_lines(area) == [*lines, f"[{rank},", f"'{'x' * 60}',", f"'{'y' * 60}']"]
        assert [each.is_visible() for each in figures.all()] == [each == rank for each in range(5)]
        assert area.get_by_text("ValueError: fails").last.is_visible()
    assert area.evaluate("node => node.innerText.trim().endsWith('4')"), "tabs come after the text"

    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        page.evaluate("theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", theme)
        is_light = str(theme.endswith("Light")).lower()
        page.locator(f"body[data-jp-theme-light='{is_light}'][data-jp-theme-name='{theme}']").wait_for(state="attached")
        take_picture(page, f"scattered_{theme.split()[-1].lower()}")
        assert area.evaluate(CONTRAST, "rank 2 (") >= 4.5, theme
        assert area.evaluate(CONTRAST, "raise") >= (3 if theme.endswith("Light") else 4.5), theme

    area = area_of(page, 2)
    fold = area.locator(".jdt-fold:visible")
    assert fold.inner_text() == "… 3,100 more lines; show them"
    assert len(visible_lines(area)) == 400
    area.get_by_role("tab", name="3", exact=True).click()
    area.get_by_text("… 300 more lines").wait_for()
    assert (visible_lines(area)[0], len(visible_lines(area)), visible_lines(area)[-1]) == ("3 0", 400, "3 699")
    fold.click()
    fold.wait_for(state="detached")
    assert visible_lines(area) == [f"3 {line}" for line in range(700)]
    area.locator("pre").first.hover()
    page.mouse.wheel(0, 5000)  # of 12,000 pixels
    page.wait_for_function("() => document.querySelectorAll('.jdt-rank-area')[1].getBoundingClientRect().top < -1000")
    at = area.get_by_role("tab", name="all").bounding_box()
    assert at is not None
    assert 0 < at["y"] < 300, "the tabs stay in view"
    take_picture(page, "scattered_long")


@pytest.mark.browser
def test_notebook_of_an_earlier_version_has_tabs(lab_server: LabServer, page: Page) -> None:
    data = {"text/plain": OLD, RANKS_MIME: {"version": 1, "ranks": [0, 1, 2, 3, 4], "width": 9}}
    cell = nbformat.v4.new_code_cell("1", outputs=[nbformat.v4.new_output("display_data", data)])
    notebook = nbformat.v4.new_notebook(cells=[cell])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, lab_server.root / "old.ipynb")
    page.goto(lab_server.link("old.ipynb"))
    wait_for_notebook(page)
    area = area_of(page, 0)
    area.get_by_role("tab", name="1", exact=True).click()
    area.get_by_text("even").wait_for(state="detached")
    assert visible_lines(area) == ["odd", "own", "of two lines", "aside", "a note for all"]
    area.get_by_role("tab", name="0", exact=True).click()
    area.get_by_text("odd").wait_for(state="detached")
    assert visible_lines(area) == ["even", "a note for all"]


@pytest.mark.browser
def test_later_output_of_the_selected_rank_is_shown(open_notebook: Callable[..., Page]) -> None:
    page = open_notebook(
        START, "%%distributed\nimport time\nfor n in range(10**6): print(f'{rank}:{n}'); time.sleep(0.1)"
    )
    start_ranks(page, 3)
    run_cell(page, 1)
    output(page, 1, "1:2")
    area = area_of(page, 1)
    area.get_by_role("tab", name="1").first.click()
    area.locator(".jdt-ranks-text", has_text="1:12").first.wait_for(timeout=60_000)
    assert not [line for line in visible_lines(area) if line.startswith(("0:", "2:"))]
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:interrupt-kernel')")
    wait_for_end(page, 1)


@pytest.mark.browser
def test_notebook_7_shows_the_same(lab_server: LabServer, page: Page) -> None:
    cells = [START, PRINT, TRAIN.format(options="--watch", steps=50), "%dist_shutdown"]
    name = "in notebook 7.ipynb"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, lab_server.root / name)
    page.goto(f"{lab_server.url}/notebooks/{quote(name)}?token={lab_server.token}")
    wait_for_notebook(page)
    for index in range(3):
        run_cell(page, index)
        wait_for_end(page, index)
    area = area_of(page, 1)
    area.hover()
    area.get_by_role("tab", name="2").first.click()
    assert "own 2" in visible_lines(area)
    assert "own 0" not in visible_lines(area)
    widget = area_of(page, 2).locator(".jdt-view")
    widget.locator(".jdt-plot[aria-label^='loss']").wait_for(timeout=60_000)
    take_picture(page, "notebook7")
    run_cell(page, 3)
    wait_for_end(page, 3)


@pytest.mark.browser
def test_other_front_ends_show_plain_text(open_notebook: Callable[..., Page], lab_server: LabServer) -> None:
    page = open_notebook(START, PRINT)
    start_ranks(page, 3)
    run_cell(page, 1)
    wait_for_end(page, 1)
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    (path,) = lab_server.root.glob("*other_front_ends*.ipynb")
    found = nbformat.read(path, as_version=4).cells[1].outputs
    texts = [each.data for each in found if RANKS_MIME in each.data]
    assert texts
    assert all("text/plain" in each for each in texts)
    assert [each.metadata["disttrain"]["ranks"] for each in found if "text/html" in each.data] == [[1], [2]]
