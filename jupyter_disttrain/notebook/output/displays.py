"""Display a screen's sections in a front end.

Covers: a notebook's output, IPython in a terminal, asking the user, whether the output of an earlier cell still exists.

JupyterLab and Notebook 7 report with each request which cells were run again or removed. In front ends that report
nothing, a cell's output counts as existing.
"""

from __future__ import annotations

import getpass
import threading
import uuid
from contextvars import copy_context
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from IPython.core.error import StdinNotImplementedError

from ...errors import InputRefusedError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_latest: WeakKeyDictionary[InteractiveShell, dict[str, str]] = WeakKeyDictionary()  # by cell: its last request


def watch_cells(shell: InteractiveShell) -> None:
    """Start to track which cells are run and removed."""
    if shell not in _latest and hasattr(shell, "kernel"):
        _latest[shell] = {}
        shell.events.register("pre_run_cell", lambda _info: _note(shell))


def _note(shell: InteractiveShell) -> None:
    request, metadata = _request(shell)
    latest = _latest[shell]
    latest.update((cell, "") for cell in metadata.get("deletedCells") or ())
    if metadata.get("cellId"):
        latest[metadata["cellId"]] = request


def _request(shell: Any) -> tuple[str, dict[str, Any]]:
    """Return the id and the metadata of the request that runs now."""
    message = shell.kernel.get_parent("shell") or {}
    return message.get("header", {}).get("msg_id", ""), message.get("metadata") or {}


class Sink:
    """Something that holds displays; this one is IPython in a terminal, where printed text can't be changed."""

    def show(self, shown_as: str | None, data: dict[str, Any], metadata: dict[str, Any]) -> str:  # noqa: ARG002
        """Show a display, or update the one of that name; returns its name."""
        return shown_as or "terminal"

    def clear(self, *, wait: bool) -> None:
        """Remove all displays; with ``wait`` when the next one is shown."""

    def ask(self, prompt: str, *, is_password: bool) -> str:
        """Ask the user and return the answer; raises an InputRefusedError if the front end can't."""
        try:  # in a notebook, ipykernel has replaced both functions
            return getpass.getpass(prompt) if is_password else input(prompt)
        except StdinNotImplementedError:
            raise InputRefusedError("this front end takes no input, as nbconvert and papermill") from None

    def where_it_was(self) -> str:
        """Return the name of the cell if it was run again or removed, and its output with it; else an empty string."""
        return ""


class NotebookSink(Sink):
    """A notebook's output: displays are updated in place."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._publisher = shell.display_pub
        self._context = copy_context()  # displays go to this cell in this context, whichever cell runs
        self._thread = threading.get_ident()
        self._request, metadata = _request(shell)
        self._cell = metadata.get("cellId", "")
        self._latest = _latest.get(shell, {})
        self._name = f"cell {shell.execution_count}"

    def show(self, shown_as: str | None, data: dict[str, Any], metadata: dict[str, Any]) -> str:
        """Show or update a display."""
        name = shown_as or uuid.uuid4().hex
        options = {"transient": {"display_id": name}, "update": shown_as is not None}
        if threading.get_ident() == self._thread:
            self._publisher.publish(data=data, metadata=metadata, **options)
        else:
            self._context.copy().run(self._publisher.publish, data=data, metadata=metadata, **options)
        return name

    def clear(self, *, wait: bool) -> None:
        """Clear the cell's output."""
        self._publisher.clear_output(wait)

    def where_it_was(self) -> str:
        """Return the name of the cell if its output was removed."""
        latest = self._latest.get(self._cell, self._request)
        if latest == self._request:
            return ""
        return f"{self._name}, {'run again since' if latest else 'removed since'}"
