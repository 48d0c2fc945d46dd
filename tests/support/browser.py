"""JupyterLab and a browser, as fixtures.

Covers: a separate server with the built extension, Chromium, a page with an open notebook.
Does not cover: ranks; the notebook's kernel is a plain one until a test loads the extension in it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import quote

import nbformat
import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, Page

BUILT_EXTENSION = Path(__file__).parents[2] / "jupyter_disttrain" / "labextension"
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 30

# A notebook can be driven reliably only after its kernel has answered.
NOTEBOOK_READY = """async () => {
  await window.jupyterapp.restored;
  const panel = window.jupyterapp.shell.currentWidget;
  await panel.context.ready;
  await panel.sessionContext.ready;
  await panel.sessionContext.session.kernel.info;
}"""


END_KERNELS = "() => window.jupyterapp?.serviceManager.sessions.shutdownAll()"


@dataclass(frozen=True, slots=True, kw_only=True)
class LabServer:
    """A running JupyterLab."""

    url: str
    token: str
    root: Path  # the folder it shows

    def link(self, notebook: str = "") -> str:
        """Return the address that opens ``notebook`` alone, logged in."""
        # A separate workspace, otherwise JupyterLab restores what an earlier page had open.
        workspace = f"{self.url}/lab/workspaces/{secrets.token_hex(8)}"
        tree = f"/tree/{quote(notebook)}" if notebook else ""
        return f"{workspace}{tree}?token={self.token}"


@contextmanager
def running_lab(home: Path) -> Iterator[LabServer]:
    """Run JupyterLab with the extension as last built, and without this user's settings."""
    root = home / "notebooks"
    root.mkdir()
    token = secrets.token_hex(16)
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
            *("--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--IdentityProvider.token={token}"),
            *(f"--ServerApp.root_dir={root}", "--LabApp.expose_app_in_browser=True"),
            "--JupyterNotebookApp.expose_app_in_browser=True",
        ],
        cwd=root,
        env=fresh_jupyter(home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with server:
        try:
            yield LabServer(url=address_of(server), token=token, root=root)
        finally:
            stop(server)


@pytest.fixture(scope="module")
def lab_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabServer]:
    """Run JupyterLab for the tests of a module."""
    if not (BUILT_EXTENSION / "package.json").exists():
        unavailable("the JupyterLab extension is not built; run 'make labextension'")
    with running_lab(tmp_path_factory.mktemp("jupyterlab")) as server:
        yield server


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Run the system's Chromium; Playwright gives it a fresh profile.

    Its temporary files have a folder of their own: it may leave one when it ends.
    """
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        unavailable("Chromium is not installed")
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  (only where there is a browser to drive)

    with sync_playwright() as playwright:
        environment = {**os.environ, "TMPDIR": str(tmp_path_factory.mktemp("chromium"))}
        browser = playwright.chromium.launch(executable_path=executable, args=CHROMIUM_FLAGS, env=environment)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """Open an empty page in a separate context; an error that the extension did not catch fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(error.stack or error.message))
    yield page
    context.close()
    assert not [error for error in errors if "jupyter-disttrain" in error]


@pytest.fixture
def open_notebook(lab_server: LabServer, page: Page, request: pytest.FixtureRequest) -> Iterator[Callable[..., Page]]:
    """Return a function that opens a notebook with the given code cells and waits for its kernel.

    All kernels and their ranks end with the test, also where it failed: otherwise they would appear in the
    next test's panel.
    """

    def open_notebook(*sources: str) -> Page:
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(source) for source in sources],
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        )
        name = f"{request.node.name}.ipynb"
        nbformat.write(notebook, lab_server.root / name)
        page.goto(lab_server.link(name))
        wait_for_notebook(page)
        return page

    yield open_notebook
    page.evaluate(END_KERNELS)


def wait_for_notebook(page: Page) -> None:
    """Wait until the page has opened a notebook and its kernel replies."""
    page.wait_for_function("() => window.jupyterapp?.shell.currentWidget?.sessionContext")
    await_function(page, NOTEBOOK_READY)


def await_function(page: Page, function: str, argument: Any = None) -> None:
    """Call an async function in the page and wait for its end.

    The page keeps its promise: V8 may collect one that only Playwright waits for ("Resulting promise was garbage
    collected").
    """
    page.evaluate(f"argument => window.awaited = ({function})(argument)", argument)


def run_cell(page: Page, index: int) -> None:
    page.evaluate(
        """index => {
          const notebook = window.jupyterapp.shell.currentWidget.content;
          notebook.activeCellIndex = index;
          window.jupyterapp.commands.execute('notebook:run-cell');
        }""",
        index,
    )


def output(page: Page, index: int, text: str) -> str:
    """Wait until the cell's output contains a text, and return all of it."""
    area = page.locator(".jp-Notebook-cell").nth(index).locator(".jp-OutputArea")
    area.filter(has_text=text).first.wait_for(timeout=60_000)
    return area.first.inner_text()


def start_ranks(page: Page, count: int = 2) -> None:
    """Run the first cell, and wait until it has started ranks."""
    run_cell(page, 0)
    output(page, 0, f"ranks 0-{count - 1} ready")


def wait_for_end(page: Page, index: int) -> None:
    """Wait until a cell has ended: cells queued behind one that fails are not run."""
    page.wait_for_function(
        """index => {
          const prompt = document.querySelectorAll('.jp-Notebook-cell')[index].querySelector('.jp-InputPrompt');
          return /\\d/.test(prompt.textContent);
        }""",
        arg=index,
    )


def take_picture(page: Page, name: str) -> None:
    """Keep a screenshot for inspection: DISTTRAIN_PICTURES names the folder."""
    if "DISTTRAIN_PICTURES" in os.environ:
        page.screenshot(path=Path(os.environ["DISTTRAIN_PICTURES"]) / f"{name}.png")


def unavailable(reason: str) -> NoReturn:
    """Skip where a requirement is missing; fail as root, for whom ``make test`` installs it."""
    if os.geteuid() == 0:
        pytest.fail(reason)
    pytest.skip(reason)


def fresh_jupyter(home: Path) -> dict[str, str]:
    """Return an environment whose Jupyter reads and writes below ``home`` and serves the built extension."""
    extensions = home / "share" / "labextensions"
    extensions.mkdir(parents=True)
    (extensions / "jupyter-disttrain").symlink_to(BUILT_EXTENSION)
    settings = home / "settings"
    quiet = settings / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    quiet.parent.mkdir(parents=True)
    # The question whether to fetch news would cover the page.
    quiet.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "JPY"))},
        "HOME": str(home),
        "IPYTHONDIR": str(home / "ipython"),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_PATH": str(home / "share"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(settings),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
    }


def address_of(server: subprocess.Popen[str]) -> str:
    """Wait until the server reports its address; it chooses its port itself."""
    address: Future[str] = Future()
    lines: list[str] = []

    def read() -> None:
        assert server.stdout is not None
        for line in server.stdout:  # to its end, so that the server never blocks on a full pipe
            lines.append(line)
            found = re.search(r"(http://127\.0\.0\.1:\d+)/lab", line)
            if found and not address.done():
                address.set_result(found[1])
        if not address.done():
            address.set_exception(RuntimeError("JupyterLab did not start:\n" + "".join(lines)))

    Thread(target=read, name="jupyterlab output", daemon=True).start()
    return address.result(START_TIMEOUT_S)


def stop(server: subprocess.Popen[str]) -> None:
    """Terminate the server, and check that its kernels and all they started have ended too."""
    family: list[Any] = psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
        raise
    finally:
        _, left = psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)
        for process in left:
            process.kill()
    assert not left, f"left behind by JupyterLab: {left}"
