"""What the widget costs the page that shows it.

Covers: frames a second and processor time of Chromium while the widget shows many ranks, with metrics ten times a
second.
Does not cover: the kernel (``benchmarks.telemetry``), whether the page is right (tests/test_panel.py).

The page is fed by a script beside this file, through the interface that anywidget gives the widget: 64 real ranks on
two cores would leave nothing for the browser. Without a GPU Chromium draws in software.
"""

from __future__ import annotations

import shutil
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_disttrain.notebook.widget import STATIC

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from playwright.sync_api import Browser

HERE = Path(__file__).parent
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")
PAGE = """<!doctype html><link rel="stylesheet" href="/widget.css"><body></body>
<script type="module" src="/widget_feed.js"></script>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCost:
    """What was seen of one number of ranks."""

    ranks: int
    scrolls: bool
    fps: float
    gap95_ms: float  # between two frames
    core: float  # of the page's main thread, 0 to 1
    rows: int  # of the table, that are in the document
    plots: int


class _Files(SimpleHTTPRequestHandler):
    def translate_path(self, path: str) -> str:
        name = path.lstrip("/")
        return str((STATIC if name.startswith("widget.") else HERE) / name)

    def do_GET(self) -> None:
        if self.path != "/":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE.encode())

    def log_message(self, *_args: Any) -> None:
        """Say nothing."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run the system's Chromium.

    Raises
    ------
    RuntimeError
        If there is none.
    """
    from playwright.sync_api import sync_playwright  # noqa: PLC0415

    executable = shutil.which("chromium") or shutil.which("google-chrome")
    if executable is None:
        raise RuntimeError("Chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        yield browser
        browser.close()


def measure(kinds: Sequence[tuple[int, bool]], seconds: float) -> Iterator[PageCost]:
    """Yield what the page costs for each number of ranks, at rest or while its table is scrolled without a pause.

    Raises
    ------
    RuntimeError
        If there is no Chromium.
    """
    with served() as address, chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(address)
        page.wait_for_function("() => window.ready")
        tracing = page.context.new_cdp_session(page)
        tracing.send("Performance.enable")
        for ranks, scrolls in kinds:
            begun = _task_seconds(tracing)
            told = page.evaluate("(arguments) => window.measure(...arguments)", [ranks, seconds, scrolls])
            used, elapsed = (b - a for a, b in zip(begun, _task_seconds(tracing), strict=True))
            yield PageCost(
                ranks=ranks,
                scrolls=scrolls,
                fps=told["fps"],
                gap95_ms=told["gap95"],
                core=used / elapsed,
                rows=told["rows"],
                plots=told["plots"],
            )


@contextmanager
def served() -> Iterator[str]:
    """Serve the page with the widget; yields its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files))
    threading.Thread(target=server.serve_forever, name="page server", daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()


def _task_seconds(tracing: Any) -> tuple[float, float]:
    """Return the seconds that the main thread has worked, and those that have passed."""
    told = {each["name"]: each["value"] for each in tracing.send("Performance.getMetrics")["metrics"]}
    return told["TaskDuration"], told["Timestamp"]
