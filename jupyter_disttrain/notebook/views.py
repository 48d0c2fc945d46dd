"""Showing clusters in a notebook: live where widgets are, as text and as a picture everywhere else.

Covers: one widget per cluster, its text for a console, the still picture below it that a saved notebook keeps.
Does not cover: what the widget sends (``widget``), the picture (``still``).

The widget and the picture are two outputs: nbconvert leaves out the first, whose kernel is gone, and a page that shows
the first hides the second (``view.css``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.display import display

from .status import status_text
from .still import still

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.display import DisplayHandle

    from ..cluster import Cluster
    from .widget import ClusterWidget

STATIC = Path(__file__).parent / "static"
VIEW = "application/vnd.jupyter.widget-view+json"


class Views:
    """What of clusters is on the screen."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._shown: dict[str, tuple[ClusterWidget, list[DisplayHandle]]] = {}  # by the cluster's id

    @property
    def has_page(self) -> bool:
        """Whether there is a front end that could show a widget, and a widget to show."""
        # From a checkout ``make labextension`` builds the page's part.
        return getattr(self._shell, "kernel", None) is not None and (STATIC / "widget.js").exists()

    def show(self, cluster: Cluster) -> None:
        """Show a cluster below the cell."""
        from .widget import ClusterWidget  # noqa: PLC0415  (ipywidgets: who shows no widget does not pay for it)

        if not self._shown:
            self._shell.events.register("post_run_cell", self.refresh)
        if cluster.cluster_id not in self._shown:
            self._shown[cluster.cluster_id] = ClusterWidget(cluster), []
        widget, pictures = self._shown[cluster.cluster_id]
        view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
        data: dict[str, Any] = {"text/plain": f"{cluster!r}", VIEW: view}
        display(data, raw=True)
        pictures.append(display(_picture(cluster, widget), raw=True, display_id=True))

    def refresh(self, *_result: Any) -> None:
        """Bring the pictures up to date; after each cell, so that a notebook is saved with the last one."""
        for widget, pictures in self._shown.values():
            if widget.ended:
                continue
            widget.tell_state()
            for handle in pictures:
                handle.update(_picture(widget.cluster, widget), raw=True)

    def close(self) -> None:
        """Show nothing any more."""
        if self._shown:
            self._shell.events.unregister("post_run_cell", self.refresh)
        for widget, _ in self._shown.values():
            widget.end()
        self._shown.clear()


def _picture(cluster: Cluster, widget: ClusterWidget) -> dict[str, Any]:
    """Return how a cluster is now, for front ends without widgets and for who opens the saved notebook."""
    return {"text/plain": status_text(cluster), "text/html": still(cluster, widget.state)}
