"""Serve clusters to the side panel through REST and one websocket.

Covers: login, XSRF and base_url as in Jupyter Server; the messages of the websocket.
Does not cover: the clusters (``clusters``).

GET  disttrain/api/clusters                     all clusters, as JSON
POST disttrain/api/clusters/ID/interrupt        also reset, stop
GET  disttrain/api/clusters/ID/log?rank=0       the end of a rank's log; rank=all: of each rank's
GET  disttrain/api/clusters/ID/log/file?rank=0  a rank's whole log, as text
GET  disttrain/api/clusters/ID/variables        the variables of the ranks that reply within some seconds, as JSON
WS   disttrain/api/live                         JSON of all clusters; metrics as binary messages

A binary message is the length of its header in 4 bytes, little-endian, the header as JSON, spaces up to a multiple of
8, and the columns of ``features.telemetry.snapshot.Feed.metrics``.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

from jupyter_server.auth.decorator import authorized, ws_authenticated
from jupyter_server.base.handlers import APIHandler, JupyterHandler
from jupyter_server.base.websocket import WebSocketMixin
from jupyter_server.utils import ensure_async, url_path_join
from tornado.web import Finish, HTTPError, authenticated
from tornado.websocket import WebSocketClosedError, WebSocketHandler

from ..errors import DisttrainError
from ..features.telemetry.snapshot import Feed, seconds_until_tick
from ..protocol.time_limits import CHANGE_SECONDS, VIEW_STATE_SECONDS

if TYPE_CHECKING:
    from .clusters import Clusters
    from .live_cluster import LiveCluster

CHUNK_BYTES = 1 << 20
ALIGNMENT = 8
_ID = r"(?P<cluster_id>[A-Za-z0-9_.-]+)"


def routes(base_url: str) -> list[tuple[str, type[Any]]]:
    """Return the handlers by path."""
    root = url_path_join(base_url, "disttrain/api")
    return [
        (f"{root}/clusters", _ClustersHandler),
        (f"{root}/clusters/{_ID}/(?P<what>interrupt|reset|stop)", _ActionHandler),
        (f"{root}/clusters/{_ID}/log", _LogHandler),
        (f"{root}/clusters/{_ID}/log/file", _LogFileHandler),
        (f"{root}/clusters/{_ID}/variables", _VariablesHandler),
        (f"{root}/live", _LiveHandler),
    ]


class _Handler(APIHandler):
    auth_resource = "disttrain"

    @property
    def clusters(self) -> Clusters:
        found: Clusters = self.settings["disttrain_clusters"]
        return found

    async def on_thread(self, work: Any, *args: Any) -> Any:
        """Run work that may wait for a rank or a nanny on a thread; the user's errors become a 409 with the message."""
        try:
            return await asyncio.to_thread(work, *args)
        except DisttrainError as error:
            # HTTPError is not used, since its message doubles each percent sign.
            self.set_status(409)
            self.finish(json.dumps({"message": str(error)}))
            raise Finish from error


class _ClustersHandler(_Handler):
    @authenticated
    @authorized
    async def get(self) -> None:
        self.finish(json.dumps(await self.on_thread(self.clusters.snapshot)))


class _ActionHandler(_Handler):
    @authenticated
    @authorized
    async def post(self, cluster_id: str, what: str) -> None:
        text = await self.on_thread(lambda: self.clusters.find(cluster_id).ask(what))
        self.finish(json.dumps({"done": text}))


class _LogHandler(_Handler):
    @authenticated
    @authorized
    async def get(self, cluster_id: str) -> None:
        ranks = None if self.get_query_argument("rank", "0") == "all" else [self.rank()]
        logs = await self.on_thread(lambda: self.clusters.find(cluster_id).log_ends(ranks))
        self.finish(json.dumps({"logs": logs}))

    def rank(self) -> int:
        try:
            return int(self.get_query_argument("rank", "0"))
        except ValueError:
            raise HTTPError(400, "rank is a number") from None


class _LogFileHandler(_LogHandler):
    @authenticated
    @authorized
    async def get(self, cluster_id: str) -> None:
        """Return the log in chunks."""
        rank = self.rank()
        path = await self.on_thread(lambda: self.clusters.find(cluster_id).log_path(rank))
        self.set_header("Content-Type", "text/plain; charset=UTF-8")
        self.set_header("Content-Disposition", f'inline; filename="rank{rank}.log"')
        if await asyncio.to_thread(path.exists):
            with path.open("rb") as file:
                while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                    self.write(chunk)
                    await self.flush()
        self.finish(set_content_type="text/plain; charset=UTF-8")


class _VariablesHandler(_Handler):
    @authenticated
    @authorized
    async def get(self, cluster_id: str) -> None:
        self.finish(json.dumps(await self.on_thread(lambda: self.clusters.find(cluster_id).variables())))


class _LiveHandler(WebSocketMixin, WebSocketHandler, JupyterHandler):
    """The websocket that publishes changes."""

    auth_resource = "disttrain"
    _task: asyncio.Task[None] | None = None

    @ws_authenticated
    async def get(self, *args: Any, **kwargs: Any) -> None:
        """Open the websocket for users who are logged in and may read."""
        if not await ensure_async(self.authorizer.is_authorized(self, self.current_user, "read", self.auth_resource)):
            raise HTTPError(403)
        await super().get(*args, **kwargs)

    def open(self, *_args: str, **_kwargs: str) -> None:
        """Start to publish."""
        super().open()
        self._watched: set[str] = set()
        self._feeds: dict[LiveCluster, Feed] = {}  # of the clusters that are watched
        self._task = asyncio.create_task(self._publish())

    def on_message(self, message: str | bytes) -> None:
        """Set the clusters whose metrics the page shows."""
        try:
            watched = {str(cluster_id) for cluster_id in json.loads(message)["watch"]}
        except (ValueError, KeyError, TypeError):
            self.close(1003, "not understood")
            return
        self._feeds = {live: feed for live, feed in self._feeds.items() if live.file.cluster_id in watched}
        self._watched = watched

    def on_close(self) -> None:
        """Stop publishing."""
        super().on_close()
        if self._task is not None:
            self._task.cancel()

    async def _publish(self) -> None:
        clusters: Clusters = self.settings["disttrain_clusters"]
        before: dict[str, Any] = {}
        begun: list[dict[str, str]] = []
        changed: dict[str, int] = {}
        next_state = 0.0
        try:
            while True:
                was = begun, changed
                begun, changed = await asyncio.to_thread(clusters.starting), clusters.changes()
                is_due = was != (begun, changed) or time.monotonic() >= next_state
                if is_due:
                    next_state = time.monotonic() + VIEW_STATE_SECONDS
                    state = await asyncio.to_thread(clusters.snapshot)
                    if state != before:
                        await self.write_message(json.dumps({"type": "state", **state}))
                    before = state
                running = await asyncio.to_thread(clusters.running)
                watched = (live for live in running if live.file.cluster_id in self._watched)
                self._feeds = {live: self._feeds.get(live) or Feed(live.telemetry) for live in watched}
                for live, feed in self._feeds.items():
                    cluster_id = live.file.cluster_id
                    if is_due and (devices := await asyncio.to_thread(feed.devices)):
                        await self.write_message(json.dumps({"type": "devices", "id": cluster_id, "ranks": devices}))
                    if metrics := await asyncio.to_thread(feed.metrics):
                        header, columns = metrics
                        await self.write_message(_pack({"id": cluster_id, **header}, columns), binary=True)
                await asyncio.sleep(seconds_until_tick(CHANGE_SECONDS))
        except WebSocketClosedError:
            return  # the browser has closed the websocket
        except Exception:
            # Catch any error: a task that ended silently would leave the page with an open socket without messages.
            self.log.exception("jupyter_disttrain: no message could be sent to the side panel")
            self.close(1011)  # the page connects again


def _pack(header: dict[str, Any], columns: bytes) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 4) % ALIGNMENT)
    return len(text).to_bytes(4, "little") + text + columns
