"""The Jupyter Server extension: clusters of this user, live, for the side panel.

Nothing here imports ``notebook``, and no pickle is read: what a rank publishes is JSON.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jupyter_server.serverapp import ServerApp
    from tornado.web import Application


def load(server: ServerApp) -> None:
    """Add the handlers."""
    from .clusters import Clusters  # noqa: PLC0415  (tornado: only a server pays for it)
    from .handlers import routes  # noqa: PLC0415

    clusters = Clusters(server.log)
    server.web_app.settings["disttrain_clusters"] = clusters
    application: Application = server.web_app
    application.add_handlers(".*$", routes(application.settings["base_url"]))
    server.log.info("jupyter_disttrain: the clusters of this user are served to the side panel")
