"""Take the pictures of README and docs/: JupyterLab with the extension as last built, in Chromium.

Covers: docs/images/first_steps.png and docs/images/training.png.
Does not cover: building (``make labextension``), whether the pictures are right: inspect them.

    python -m tests.browser.pictures
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
from playwright.sync_api import sync_playwright

from ..support.browser import (
    CHROMIUM_FLAGS,
    END_KERNELS,
    run_cell,
    running_lab,
    start_ranks,
    wait_for_end,
    wait_for_notebook,
)
from .test_panel import PANEL, show_panel

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Page

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
MIN_STEPS = 600  # steps of the training before its picture is taken
CELLS = (
    "%load_ext jupyter_disttrain\n%dist_init -n 2",
    """%%distributed
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

digits = load_digits()
train = TensorDataset(torch.tensor(digits.images).float().unsqueeze(1) / 16, torch.tensor(digits.target))
loader = DataLoader(train, batch_size=16, sampler=DistributedSampler(train))""",
    """%%distributed --watch
model = nn.parallel.DistributedDataParallel(nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10)))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
step = 0
for epoch in range(1000):
    for x, y in loader:
        guesses = model(x)
        loss = cross_entropy(guesses, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log_metrics(step, loss=loss, accuracy=(guesses.argmax(1) == y).float().mean())
        step += 1""",
)
CLOSE_LEFT = "() => window.jupyterapp.shell.collapseLeft()"


def take_first_steps(page: Page) -> None:
    """Show the first example, executed."""
    page.evaluate(CLOSE_LEFT)
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")
    last = page.evaluate("() => window.jupyterapp.shell.currentWidget.content.widgets.length") - 1
    page.wait_for_function(
        """last => window.jupyterapp.shell.currentWidget.content.widgets.slice(0, last + 1)
             .every(cell => cell.model.type !== 'code' || cell.model.executionCount !== null)""",
        arg=last,
        timeout=300_000,
    )
    page.evaluate(
        """() => {
          const notebook = window.jupyterapp.shell.currentWidget.content;
          notebook.activeCellIndex = 0;
          notebook.deselectAll();
          return notebook.scrollToItem(0);
        }"""
    )
    page.locator(".jdt-status").wait_for(state="hidden")  # its last cell has ended the ranks
    page.screenshot(path=IMAGES / "first_steps.png")


def take_training(page: Page) -> None:
    """Show a training cell while it runs, with its view and the panel."""
    page.evaluate(CLOSE_LEFT)
    show_panel(page)
    start_ranks(page)
    run_cell(page, 1)
    wait_for_end(page, 1)
    run_cell(page, 2)
    page.locator(f"{PANEL} .jdt-plot[aria-label^='steps/s']").wait_for(timeout=120_000)
    for where in (PANEL, ".jp-Notebook"):
        page.locator(f"{where} .jdt-metrics select").select_option("0.97")
    loss = page.locator(f"{PANEL} .jdt-plot[aria-label^='loss'] .u-over")
    place = page.locator(f"{PANEL} .jdt-plot[aria-label^='loss'] .jdt-position")
    while True:
        loss.hover(position={"x": (loss.bounding_box() or {"width": 2})["width"] - 1, "y": 40})
        seen = place.inner_text().removeprefix("step ").replace(",", "")
        if seen.isdigit() and int(seen) > MIN_STEPS:
            break
        page.wait_for_function("([node, seen]) => document.querySelector(node).ariaLabel !== seen", arg=_loss(page))
    page.mouse.move(0, 0)
    page.screenshot(path=IMAGES / "training.png")
    page.locator(f"{PANEL} .jdt-buttons button", has_text="Interrupt").click()
    wait_for_end(page, 2)


def _loss(page: Page) -> list[str | None]:
    plot = f"{PANEL} .jdt-plot[aria-label^='loss']"
    return [plot, page.locator(plot).get_attribute("aria-label")]


def main() -> None:
    """Take both pictures."""
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    home = Path(tempfile.mkdtemp())
    try:
        with running_lab(home) as server, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=executable, args=CHROMIUM_FLAGS)
            shutil.copy(ROOT / "examples" / "first_steps.ipynb", server.root)
            digits = nbformat.v4.new_notebook(
                cells=[nbformat.v4.new_code_cell(source) for source in CELLS],
                # Otherwise JupyterLab asks for a kernel, and the page never settles.
                metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
            )
            nbformat.write(digits, server.root / "digits.ipynb")

            def take(name: str, how: Callable[[Page], None], width: int, height: int, scale: float) -> None:
                page = browser.new_page(viewport={"width": width, "height": height}, device_scale_factor=scale)
                page.goto(server.link(name))
                wait_for_notebook(page)
                how(page)
                page.evaluate(END_KERNELS)

            take("first_steps.ipynb", take_first_steps, 960, 1088, 2)
            take("digits.ipynb", take_training, 1500, 980, 1)
            browser.close()
    finally:
        shutil.rmtree(home)


if __name__ == "__main__":
    main()
