"""Measure the widget in Chromium.

Covers: frames per second and processor time while the widget shows many ranks, with metrics ten times a second.
Does not cover: the kernel (overhead.telemetry), correctness of the page (tests/browser/test_panel.py).

A script, widget_feed.js, sends the data through the interface that anywidget gives the widget, because 64 ranks on two
cores would leave no processor time for the browser. Without a GPU Chromium draws in software.
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

from jupyter_disttrain.notebook.views.views import STATIC

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from playwright.sync_api import Browser

FOLDER = Path(__file__).parent
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")
PAGE = """<!doctype html><link rel="stylesheet" href="/widget.css"><body></body>
<script type="module" src="/widget_feed.js"></script>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WidgetCost:
    """The results for one number of ranks."""

    ranks: int
    scrolls: bool
    fps: float
    gap95_ms: float  # between two frames
    core: float  # processor time of the page's main thread, as a fraction of one core
    rows: int  # of the table that are in the document


class _Files(SimpleHTTPRequestHandler):
    def translate_path(self, path: str) -> str:
        name = path.lstrip("/")
        return str((STATIC if name.startswith("widget.") else FOLDER) / name)

    def do_GET(self) -> None:
        if self.path != "/":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE.encode())

    def log_message(self, *_args: Any) -> None:
        """Log no request."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run the system's Chromium.

    Raises
    ------
    RuntimeError
        If Chromium is not installed.
    """
    from playwright.sync_api import sync_playwright  # noqa: PLC0415

    executable = shutil.which("chromium") or shutil.which("google-chrome")
    if executable is None:
        raise RuntimeError("Chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        yield browser
        browser.close()


def measure(kinds: Sequence[tuple[int, bool]], seconds: float) -> Iterator[WidgetCost]:
    """Measure the page for each number of ranks, with or without continuous scrolling of its table.

    Raises
    ------
    RuntimeError
        If Chromium is not installed.
    """
    with served() as address, chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(address)
        page.wait_for_function("() => window.ready")
        tracing = page.context.new_cdp_session(page)
        tracing.send("Performance.enable")
        for ranks, scrolls in kinds:
            begun = _task_seconds(tracing)
            found = page.evaluate("(arguments) => window.measure(...arguments)", [ranks, seconds, scrolls])
            used, elapsed = (b - a for a, b in zip(begun, _task_seconds(tracing), strict=True))
            yield WidgetCost(
                ranks=ranks,
                scrolls=scrolls,
                fps=found["fps"],
                gap95_ms=found["gap95"],
                core=used / elapsed,
                rows=found["rows"],
            )


@contextmanager
def served() -> Iterator[str]:
    """Serve the page with the widget; yields its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files))
    threading.Thread(target=server.serve_forever, name="page server", daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()


def _task_seconds(tracing: Any) -> tuple[float, float]:
    """Return the processor time of the main thread and the time of the measurement, in seconds."""
    metrics = {each["name"]: each["value"] for each in tracing.send("Performance.getMetrics")["metrics"]}
    return metrics["TaskDuration"], metrics["Timestamp"]
