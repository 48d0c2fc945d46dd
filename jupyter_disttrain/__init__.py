"""Distributed training, interactively, from one notebook.

``%load_ext jupyter_disttrain`` loads the magics; :class:`Cluster` is the same in Python. The public names are imported
when they are first used, so that a rank, which imports this package too, never loads the notebook's side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from .client import Cluster as Cluster
    from .client.cells.cell_run import CellRun as CellRun
    from .integrations import log_metrics as log_metrics

__version__ = "0.1.0"
__all__ = ["CellRun", "Cluster", "__version__", "load_ipython_extension", "log_metrics", "unload_ipython_extension"]

_HOMES = {"Cluster": ".client", "CellRun": ".client.cells.cell_run", "log_metrics": ".integrations"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    return getattr(import_module(_HOMES[name], __name__), name)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Load the magics into this notebook (``%load_ext jupyter_disttrain``)."""
    if getattr(shell, "is_rank", False):
        return  # the user's profile loads it wherever IPython starts
    from .notebook.extension import load  # noqa: PLC0415

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """End this notebook's clusters and remove the magics (``%unload_ext jupyter_disttrain``)."""
    from .notebook.extension import unload  # noqa: PLC0415

    unload(shell)


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    """Name the extension of Jupyter Server."""
    return [{"module": "jupyter_disttrain"}]


def _load_jupyter_server_extension(server: Any) -> None:
    """Serve the clusters of this user to the side panel."""
    from .server import load  # noqa: PLC0415

    load(server)


def _jupyter_labextension_paths() -> list[dict[str, str]]:
    """Name the built JupyterLab extension, for ``jupyter labextension develop``."""
    return [{"src": "labextension", "dest": "jupyter-disttrain"}]
