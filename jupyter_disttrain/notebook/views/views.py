"""Show clusters in a notebook: live where widgets are supported, as text and as a picture everywhere else.

Covers: one widget per cluster, its text for a console, the still picture below it that a saved notebook keeps.
Does not cover: what the widget sends (``widget``), the picture (``static_html``).

The widget and the picture are two outputs: nbconvert omits the first, whose kernel has ended, and a page that shows
the first hides the second (``view.css``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.display import display, update_display

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ...client import Cluster
    from .widget import ClusterWidget

STATIC = Path(__file__).parents[1] / "static"
VIEW = "application/vnd.jupyter.widget-view+json"


class Views:
    """The clusters that are shown."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._shown: dict[int, ClusterWidget] = {}  # by the cluster's id()
        shell.events.register("post_run_cell", self.refresh)

    @property
    def missing(self) -> str:
        """Why no widget can be shown here; empty if it can."""
        if getattr(self._shell, "kernel", None) is None:
            return "a live view needs a notebook"
        if not (STATIC / "widget.js").exists():
            return "the live view is not built in this checkout; run `make labextension`"
        return ""

    def show(self, cluster: Cluster) -> None:
        """Show a cluster below the cell."""
        from .widget import ClusterWidget  # noqa: PLC0415  (ipywidgets is loaded only where a widget is shown)

        if id(cluster) not in self._shown:
            self._shown[id(cluster)] = ClusterWidget(cluster)
        widget = self._shown[id(cluster)]
        view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
        display({"text/plain": f"{cluster!r}", VIEW: view}, raw=True)
        display(widget.draw(), raw=True, display_id=widget.key)

    def refresh(self, *_result: Any) -> None:
        """Update the pictures; after each cell, so that a notebook is saved with the last one."""
        self._shown = {key: widget for key, widget in self._shown.items() if not widget.ended}
        for widget in self._shown.values():
            if widget.cluster.table:  # else its ranks are being restarted
                widget.update_state()
                update_display(widget.draw(), raw=True, display_id=widget.key)

    def close(self) -> None:
        """Stop showing clusters."""
        self._shell.events.unregister("post_run_cell", self.refresh)
        for widget in self._shown.values():
            widget.end()
        self._shown.clear()
