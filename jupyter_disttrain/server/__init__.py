"""Serve this user's clusters, live, to the side panel (the Jupyter Server extension).

Covers: the entry point of the extension.
Does not cover: HTTP (``handlers``), following clusters (``clusters``, ``live_cluster``).

Nothing here imports ``notebook``, and nothing is unpickled: ranks publish JSON.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jupyter_server.serverapp import ServerApp
    from tornado.web import Application


def load(server: ServerApp) -> None:
    """Add the HTTP handlers to the server."""
    from .clusters import Clusters  # noqa: PLC0415  (import tornado only in a server)
    from .handlers import routes  # noqa: PLC0415

    application: Application = server.web_app
    application.settings["disttrain_clusters"] = Clusters(server.log)
    application.add_handlers(".*$", routes(application.settings["base_url"]))
    server.log.info("jupyter_disttrain: the clusters of this user are served to the side panel")
