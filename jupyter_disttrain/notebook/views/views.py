"""Show clusters in a notebook: live where widgets are supported, as text and as a picture everywhere else.

Covers: one widget per cluster, its text for a console, the still picture below it that a saved notebook keeps.
Does not cover: what the widget sends (``widget``), the picture (``static_html``).

The widget and the picture are two outputs: nbconvert omits the first, whose kernel has ended, and a page that shows
the first hides the second (``view.css``).
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.display import display, update_display

from .static_html import plots, render_static
from .status_text import status_text

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ...client import Cluster
    from .widget import ClusterWidget

STATIC = Path(__file__).parents[1] / "static"
VIEW = "application/vnd.jupyter.widget-view+json"


@dataclass(slots=True)
class _Shown:
    """A cluster that is shown, below one cell or below several."""

    widget: ClusterWidget
    picture: str = field(default_factory=lambda: uuid.uuid4().hex)  # display id by which all its pictures are updated
    plots: tuple[int, list[str]] = (0, [])  # number of values drawn, and the plots: drawing takes a while

    def draw(self) -> dict[str, Any]:
        """Return the current state, for front ends without widgets and for the saved notebook."""
        cluster = self.widget.cluster
        if cluster.telemetry.has_metrics and cluster.metrics.arrived != self.plots[0]:
            self.plots = cluster.metrics.arrived, plots(cluster)
        return {
            "text/plain": status_text(cluster),
            "text/html": render_static(cluster, self.widget.state, self.plots[1]),
        }


class Views:
    """The clusters that are shown."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._shown: dict[int, _Shown] = {}  # by the cluster's id()
        self._follows = False  # whether the pictures are updated after each cell

    @property
    def has_page(self) -> bool:
        """Whether there is a front end that can show a widget, and a built widget."""
        # In a checkout ``make labextension`` builds the page's part.
        return getattr(self._shell, "kernel", None) is not None and (STATIC / "widget.js").exists()

    def show(self, cluster: Cluster) -> None:
        """Show a cluster below the cell."""
        from .widget import ClusterWidget  # noqa: PLC0415  (ipywidgets is loaded only where a widget is shown)

        if not self._follows:
            self._shell.events.register("post_run_cell", self.refresh)
            self._follows = True
        if id(cluster) not in self._shown:
            self._shown[id(cluster)] = _Shown(ClusterWidget(cluster))
        shown = self._shown[id(cluster)]
        view = {"version_major": 2, "version_minor": 0, "model_id": shown.widget.model_id}
        data: dict[str, Any] = {"text/plain": f"{cluster!r}", VIEW: view}
        display(data, raw=True)
        display(shown.draw(), raw=True, display_id=shown.picture)

    def refresh(self, *_result: Any) -> None:
        """Update the pictures; after each cell, so that a notebook is saved with the last one."""
        self._shown = {key: shown for key, shown in self._shown.items() if not shown.widget.ended}
        for shown in self._shown.values():
            if not shown.widget.cluster.table:
                continue  # its ranks are being restarted
            shown.widget.update_state()
            update_display(shown.draw(), raw=True, display_id=shown.picture)

    def close(self) -> None:
        """Stop showing clusters."""
        if self._follows:
            self._shell.events.unregister("post_run_cell", self.refresh)
            self._follows = False
        for shown in self._shown.values():
            shown.widget.end()
        self._shown.clear()
