"""Where a screen is drawn.

Covers: a notebook's output, IPython in a terminal.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class Sink(Protocol):
    """Something that holds displays."""

    def show(self, shown_as: str | None, data: dict[str, Any], metadata: dict[str, Any]) -> str:
        """Show a display, or change the one that was shown; returns its name."""

    def clear(self, *, wait: bool) -> None:
        """Remove all displays; with ``wait`` when the next one is shown."""


class NotebookSink:
    """A notebook's output: displays are updated in place."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._publisher = shell.display_pub

    def show(self, shown_as: str | None, data: dict[str, Any], metadata: dict[str, Any]) -> str:
        """Show or change a display."""
        name = shown_as or uuid.uuid4().hex
        self._publisher.publish(
            data=data, metadata=metadata, transient={"display_id": name}, update=shown_as is not None
        )
        return name

    def clear(self, *, wait: bool) -> None:
        """Clear the cell's output."""
        self._publisher.clear_output(wait)


class TerminalSink:
    """IPython in a terminal, where nothing can be changed once it is printed; cells have their own way there."""

    def show(self, shown_as: str | None, data: dict[str, Any], metadata: dict[str, Any]) -> str:  # noqa: ARG002
        """Do nothing: what matters is printed at the end."""
        return shown_as or "terminal"

    def clear(self, *, wait: bool) -> None:
        """Do nothing: nothing was printed."""


def sink_for(shell: InteractiveShell) -> Sink:
    """Return the sink that suits the shell."""
    return NotebookSink(shell) if hasattr(shell, "kernel") else TerminalSink()
