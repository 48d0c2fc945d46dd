"""Measure how soon the side panel shows a cluster, and how soon its Interrupt works.

Covers: JupyterLab with the built extension, a cluster that runs a cell, Chromium.
Does not cover: the cost of the page (widget), its content (tests/browser/test_panel.py).
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import RankFailure

from .widget import chromium

if TYPE_CHECKING:
    from collections.abc import Iterator

EXTENSION = Path(__file__).parents[3] / "jupyter_disttrain" / "labextension"
PANEL = "#jupyter-disttrain-panel"
LOOP = "import time\nwhile True: time.sleep(0.001)"
# Seconds since the page began to load until JupyterLab is ready, and until the panel shows a running rank. With
# `opens`, the panel is opened when JupyterLab is ready.
LIVE = """async opens => {
  while (!window.jupyterapp) {
    await new Promise(requestAnimationFrame);
  }
  const app = window.jupyterapp;
  await app.restored;
  const ready = performance.now();
  if (opens) {
    await app.commands.execute('jupyter-disttrain:show-panel');
  }
  while (!document.querySelector('#jupyter-disttrain-panel .jdt-rank[data-state=running]')?.offsetParent) {
    await new Promise(requestAnimationFrame);
  }
  return [ready / 1000, performance.now() / 1000];
}"""
# Waits until JupyterLab has saved that the panel is open.
SAVED = """async name => {
  const { workspaces } = window.jupyterapp.serviceManager;
  const isOpen = ({ data }) => data['layout-restorer:data']?.right.current === 'jupyter-disttrain-panel';
  while (!isOpen(await workspaces.fetch(name))) {
    await new Promise(resolve => setTimeout(resolve, 100));
  }
}"""
IDLE = "panel => document.querySelectorAll(`${panel} .jdt-rank[data-state=idle]`).length === 2"


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelTimes:
    """Median times."""

    opened_s: float  # from opening the panel until it is live
    reloaded_s: float  # from reloading the page until the panel is live
    interrupted_s: float  # from the click until the cell has ended on all ranks
    shown_s: float  # from the click until the panel shows that the ranks are idle


@contextmanager
def _lab(home: Path) -> Iterator[str]:
    """Run JupyterLab with the built extension; yields the URL of a workspace, with the token."""
    extensions = home / "share" / "labextensions"
    extensions.mkdir(parents=True)
    (extensions / "jupyter-disttrain").symlink_to(EXTENSION)
    paths = {
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_PATH": str(home / "share"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
    }
    os.environ.update(paths)  # so that the server finds the cluster's files
    token = secrets.token_hex(16)
    log = home / "server.log"
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1"),
            *("--ServerApp.port=0", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={home}"),
            "--LabApp.expose_app_in_browser=True",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=log.open("w"),
    )
    try:
        yield f"{_url(server, log)}/lab/workspaces/{{}}?token={token}"
    finally:
        server.terminate()
        server.wait()


def _url(server: subprocess.Popen[Any], log: Path) -> str:
    while server.poll() is None:
        found = re.search(r"(http://127\.0\.0\.1:\d+)/lab", log.read_text())
        if found:
            return found[1]
        time.sleep(0.05)
    raise RuntimeError(f"JupyterLab did not start: {log.read_text()}")


def measure(repeats: int) -> PanelTimes:
    """Open the panel, reload the page and interrupt the cell, ``repeats`` times.

    Raises
    ------
    RuntimeError
        If JupyterLab or Chromium does not start.
    """
    home = Path(tempfile.mkdtemp())
    before = dict(os.environ)
    try:
        with _lab(home) as url, chromium() as browser, Cluster(n=2, launcher="local", name="panel") as cluster:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            times = [_once(page, url, cluster) for _ in range(repeats)]
    finally:
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(home)
    opened, reloaded, interrupted, shown = (median(each) for each in zip(*times, strict=True))
    return PanelTimes(opened_s=opened, reloaded_s=reloaded, interrupted_s=interrupted, shown_s=shown)


def _once(page: Any, url: str, cluster: Cluster) -> tuple[float, ...]:
    run = cluster.run(LOOP, block=False)
    workspace = secrets.token_hex(4)  # a new workspace, in which no panel is open
    page.goto(url.format(workspace))
    ready, live = page.evaluate(LIVE, True)
    opened = live - ready
    page.evaluate(SAVED, workspace)
    page.reload()
    _, reloaded = page.evaluate(LIVE, False)
    begun = time.perf_counter()
    page.locator(f"{PANEL} .jdt-buttons button", has_text="Interrupt").click()
    with suppress(RankFailure):  # the interrupted cell fails
        run.wait()
    interrupted = time.perf_counter() - begun
    page.wait_for_function(IDLE, arg=PANEL)
    return opened, reloaded, interrupted, time.perf_counter() - begun
