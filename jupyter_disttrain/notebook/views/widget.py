"""Show the live view of a cluster in a notebook's output.

Covers: sending new data to the page, also while the kernel is busy; requests of the page while it is not.
Does not cover: drawing (``labextension/src/view``), the still picture for a saved notebook (``static_html``).

Updates are sent by a thread of this module, because the kernel's main thread waits for the cell. Requests of the page
go to the server where there is one: a busy kernel does not receive the page's messages.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
from traitlets import Dict, Unicode

from ...client.registry.log_ends import log_ends, require_here
from ...errors import DisttrainError
from ...features.telemetry.snapshot import Feed, seconds_until_tick, snapshot
from ...protocol.time_limits import CHANGE_SECONDS, VIEW_STATE_SECONDS, WIDGET_METRIC_SECONDS
from .static_html import plots, render_static
from .status_text import status_text

if TYPE_CHECKING:
    from ...client import Cluster

log = logging.getLogger(__name__)

STATIC = Path(__file__).parents[1] / "static"
# Between two repeats of all data, as long as the page has not requested it: a busy kernel does not receive requests. A
# page that loads late gets it soon; one that is reloaded while the cell runs, after a while.
REPEAT_SECONDS, MOST_REPEAT_SECONDS = 5.0, 60.0
ACTIONS = {"interrupt": "interrupt", "reset": "reset", "stop": "shutdown"}  # methods of Cluster, by request


class ClusterWidget(anywidget.AnyWidget):
    """Show one cluster while it runs, and its last state once it has ended."""

    _esm = STATIC / "widget.js"
    _css = STATIC / "widget.css"

    state = Dict().tag(sync=True)
    ended = Unicode("").tag(sync=True)
    key = Unicode("").tag(sync=True)  # identifies one widget in all its views on the page, and its picture below it

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        super().__init__(state=state_of(cluster), key=uuid.uuid4().hex)
        self._plots: tuple[int, list[str]] = (0, [])  # number of values drawn, and the plots: drawing takes a while
        self._feed = Feed(cluster.telemetry)
        self._repeats_at: float | None = time.monotonic()  # the page may not be loaded; None: it has sent a request
        self._repeat_s = REPEAT_SECONDS
        self._sending = threading.Lock()
        self.on_msg(self._on_page)
        threading.Thread(target=_follow, args=(weakref.ref(self),), name="disttrain widget", daemon=True).start()

    def _on_page(self, _widget: Any, content: Any, _buffers: Any) -> None:
        if not isinstance(content, dict):
            return
        if content.get("ask") == "history":
            with self._sending:
                self._feed, self._repeats_at = Feed(self.cluster.telemetry), None
            self.send_new()
            return
        try:
            reply = self._answer(content)
        except DisttrainError as error:
            reply = {"message": str(error)}
        self.send({"reply": content.get("token")} | reply)

    def _answer(self, content: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request of a page without a server; returns the reply."""
        if content.get("ask") == "log":
            ranks = [rank for rank in range(self.cluster.world_size) if content.get("rank") in (rank, "all")]
            return {"logs": log_ends(self._log_path, ranks)}
        action = ACTIONS.get(str(content.get("ask")))
        if action is not None:  # else it is of a page of another version
            getattr(self.cluster, action)()
        return {}

    def _log_path(self, rank: int) -> Path:
        path = Path(self.cluster.log_folder) / f"rank{rank}.log"
        return require_here(path, rank, self.cluster.config.job_file)

    def send_new(self) -> None:
        """Send new data."""
        with self._sending:
            if self._repeats_at is not None and time.monotonic() >= self._repeats_at:
                self._feed = Feed(self.cluster.telemetry)
                self._repeats_at = time.monotonic() + self._repeat_s
                self._repeat_s = min(2 * self._repeat_s, MOST_REPEAT_SECONDS)
            metrics = self._feed.metrics()
            content: dict[str, Any] = {}
            if devices := self._feed.devices():
                content["devices"] = devices
            if metrics:
                content["metrics"] = metrics[0]
            if content:
                self.send(content, [metrics[1]] if metrics else [])

    def update_state(self) -> None:
        """Send the state, if it has changed."""
        found = state_of(self.cluster)
        if found and found != self.state:
            self.state = found

    def draw(self) -> dict[str, Any]:
        """Return the state for front ends without widgets and for the saved notebook, by MIME type."""
        arrived = self.cluster.telemetry.metrics_arrived
        if arrived != self._plots[0]:
            self._plots = arrived, plots(self.cluster)
        static = render_static(self.cluster, self.state, self._plots[1])
        return {"text/plain": status_text(self.cluster), "text/html": static}

    def end(self) -> None:
        """Mark the cluster as ended; called once."""
        if not self.ended:
            self.ended = "has ended; this is its last state"


def _follow(reference: weakref.ref[ClusterWidget]) -> None:
    """Send updates until the widget was closed or the cluster has ended."""
    next_state = next_change = 0.0
    changes = 0
    while True:
        widget = reference()
        if widget is None:
            return
        if widget.cluster.closed:
            widget.end()
            return
        try:
            widget.send_new()
            now, found = time.monotonic(), widget.cluster.telemetry.changes
            if now >= (next_state if found == changes else next_change):
                changes, next_state = found, now + VIEW_STATE_SECONDS
                next_change = now + seconds_until_tick(CHANGE_SECONDS)
                widget.update_state()
        except Exception:  # the next time may succeed, and a thread that ends would freeze the page
            log.exception("the widget of a cluster could not send its data")
        pause = WIDGET_METRIC_SECONDS if widget.cluster.telemetry.metrics_arrived else CHANGE_SECONDS
        del widget
        time.sleep(seconds_until_tick(pause))


def state_of(cluster: Cluster) -> dict[str, Any]:
    """Return a cluster as JSON, as the server does for the panel; empty while its ranks are restarted."""
    table = cluster.table
    if not table:
        return {}
    return {
        "id": cluster.cluster_id,
        "name": cluster.name,
        "launcher": cluster.config.launcher,
        "backend": table[0].info.backend,
        "started_s": cluster.start_report.started_s,
        "notebook": "",
        "held": True,
        "kept": cluster.config.keep,
        "job_file": cluster.config.job_file,
        "logs": cluster.log_folder,
        "sample_s": cluster.config.sample_s,
        "hang": cluster.hang,
        **snapshot(cluster.telemetry, [(entry.info, entry.state) for entry in table]),
    }
