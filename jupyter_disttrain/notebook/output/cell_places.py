"""Track whether the output of an earlier cell still exists.

Covers: cells that were run again or removed, as the front end reports with each request (JupyterLab, Notebook 7).
Does not cover: front ends that report nothing: a cell's output counts as existing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_latest: WeakKeyDictionary[InteractiveShell, dict[str, str]] = WeakKeyDictionary()  # by cell: its last request


def watch_cells(shell: InteractiveShell) -> None:
    """Start to track which cells are run and removed."""
    if shell not in _latest and hasattr(shell, "kernel"):
        _latest[shell] = {}
        shell.events.register("pre_run_cell", lambda _info: _note(shell))


def _note(shell: Any) -> None:
    request = shell.kernel.get_parent("shell") or {}
    metadata = request.get("metadata") or {}
    latest = _latest[shell]
    latest.update((cell, "") for cell in metadata.get("deletedCells") or ())
    if metadata.get("cellId"):
        latest[metadata["cellId"]] = request["header"]["msg_id"]


class CellPlace:
    """The cell that runs now."""

    def __init__(self, shell: Any) -> None:
        request = shell.kernel.get_parent("shell") or {}
        self._cell = (request.get("metadata") or {}).get("cellId", "")
        self._request = (request.get("header") or {}).get("msg_id", "")
        self._latest = _latest.get(shell, {})
        self._name = f"cell {shell.execution_count}"

    def where_it_was(self) -> str:
        """Return the cell's name if it was run again or removed; else an empty string."""
        latest = self._latest.get(self._cell, self._request)
        if latest == self._request:
            return ""
        return f"{self._name}, {'run again since' if latest else 'removed since'}"
