"""How soon the side panel shows a cluster, and how soon its Interrupt works.

Covers: a real JupyterLab with the built extension, a real cluster that runs a cell, Chromium.
Does not cover: what the page costs (``benchmarks.page``), what is seen (tests/test_panel.py).
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import RankFailure

from .widget import chromium

if TYPE_CHECKING:
    from collections.abc import Iterator

EXTENSION = Path(__file__).parents[3] / "jupyter_disttrain" / "labextension"
PANEL = "#jupyter-disttrain-panel"
LOOP = "import time\nwhile True: time.sleep(0.001)"
# In seconds since the page began to load: when JupyterLab is there, when the panel was asked for if it was, and when a
# rank is seen to run in it.
LIVE = """async opens => {
  while (!window.jupyterapp) {
    await new Promise(requestAnimationFrame);
  }
  const app = window.jupyterapp;
  await app.restored;
  const there = performance.now();
  if (opens) {
    await app.commands.execute('jupyter-disttrain:show-panel');
  }
  while (!document.querySelector('#jupyter-disttrain-panel .jdt-rank[data-state=running]')?.offsetParent) {
    await new Promise(requestAnimationFrame);
  }
  return [there / 1000, performance.now() / 1000];
}"""
# Returns when JupyterLab has saved that the panel is open.
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
    """Medians, in seconds."""

    opened: float  # from opening the panel until it is live
    loaded: float  # from loading the page anew until JupyterLab is there
    reloaded: float  # and until the panel, which was open, is live
    interrupted: float  # from the click until the cell has ended on all ranks
    seen: float  # and until the panel says so


@contextmanager
def _lab(home: Path) -> Iterator[str]:
    """Run JupyterLab with the extension as it was last built; yields the address of a workspace, with the token."""
    extensions = home / "share" / "labextensions"
    extensions.mkdir(parents=True)
    (extensions / "jupyter-disttrain").symlink_to(EXTENSION)
    own = {
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_PATH": str(home / "share"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
    }
    os.environ.update(own)  # the cluster's files are where the server looks for them
    token = secrets.token_hex(16)
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1"),
            *("--ServerApp.port=0", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={home}"),
            "--LabApp.expose_app_in_browser=True",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(home / "said").open("w"),
    )
    try:
        yield f"{_address(server, home / 'said')}/lab/workspaces/{{}}?token={token}"
    finally:
        server.terminate()
        server.wait()


def _address(server: subprocess.Popen[Any], said: Path) -> str:
    while server.poll() is None:
        found = re.search(r"(http://127\.0\.0\.1:\d+)/lab", said.read_text())
        if found:
            return found[1]
        time.sleep(0.05)
    raise RuntimeError(f"JupyterLab did not start: {said.read_text()}")


def measure(repeats: int) -> PanelTimes:
    """Open, reload and interrupt, several times.

    Raises
    ------
    RuntimeError
        If JupyterLab or Chromium does not start.
    """
    home = Path(tempfile.mkdtemp())
    before = dict(os.environ)
    try:
        with _lab(home) as address, chromium() as browser, Cluster(n=2, launcher="local", name="panel") as cluster:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            times = [_once(page, address, cluster) for _ in range(repeats)]
    finally:
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(home)
    opened, loaded, reloaded, interrupted, seen = (statistics.median(each) for each in zip(*times, strict=True))
    return PanelTimes(opened=opened, loaded=loaded, reloaded=reloaded, interrupted=interrupted, seen=seen)


def _once(page: Any, address: str, cluster: Cluster) -> tuple[float, ...]:
    run = cluster.run(LOOP, block=False)
    workspace = secrets.token_hex(4)  # a new one, in which no panel is open yet
    page.goto(address.format(workspace))
    there, live = page.evaluate(LIVE, True)
    opened = live - there
    page.evaluate(SAVED, workspace)
    page.reload()
    loaded, reloaded = page.evaluate(LIVE, False)
    begun = time.perf_counter()
    page.locator(f"{PANEL} .jdt-buttons button", has_text="Interrupt").click()
    with suppress(RankFailure):  # the interrupted cell ends in error
        run.wait()
    interrupted = time.perf_counter() - begun
    page.wait_for_function(IDLE, arg=PANEL)
    return opened, loaded, reloaded, interrupted, time.perf_counter() - begun
