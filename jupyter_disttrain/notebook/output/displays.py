"""Display a screen's sections in a front end.

Covers: a notebook's output, IPython in a terminal.
"""

from __future__ import annotations

import threading
import uuid
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Protocol

from .cell_places import CellPlace

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class Sink(Protocol):
    """Something that holds displays."""

    def show(self, shown_as: str | None, data: dict[str, Any], metadata: dict[str, Any]) -> str:
        """Show a display, or update the one of that name; returns its name."""

    def clear(self, *, wait: bool) -> None:
        """Remove all displays; with ``wait`` when the next one is shown."""

    def where_it_was(self) -> str:
        """Return the name of the cell if it was run again or removed, and its output with it; else an empty string."""


class NotebookSink:
    """A notebook's output: displays are updated in place."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._publisher = shell.display_pub
        self._context = copy_context()  # displays go to this cell in this context, whichever cell runs
        self._thread = threading.get_ident()
        self._place = CellPlace(shell)

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
        return self._place.where_it_was()


class TerminalSink:
    """IPython in a terminal, where printed text can't be changed; cells print by ``terminal_renderer`` there."""

    def show(self, shown_as: str | None, data: dict[str, Any], metadata: dict[str, Any]) -> str:  # noqa: ARG002
        """Do nothing: the text is printed at the end."""
        return shown_as or "terminal"

    def clear(self, *, wait: bool) -> None:
        """Do nothing: nothing was printed."""

    def where_it_was(self) -> str:
        """Return an empty string: printed text stays."""
        return ""


def sink_for(shell: InteractiveShell) -> Sink:
    """Return the sink for the shell's front end."""
    return NotebookSink(shell) if hasattr(shell, "kernel") else TerminalSink()
