"""Where a screen is drawn.

Covers: a notebook's output, IPython in a terminal.
"""

from __future__ import annotations

import sys
import uuid
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from IPython.core.interactiveshell import InteractiveShell

    from .rows import Section


class Sink(Protocol):
    """Something that holds displays."""

    def show(self, shown_as: str | None, data: dict[str, Any], metadata: dict[str, Any]) -> str:
        """Show a display, or change the one that was shown; returns its name."""

    def clear(self, *, wait: bool) -> None:
        """Remove all displays; with ``wait`` when the next one is shown."""

    def close(self, sections: Sequence[Section]) -> None:
        """Take note that nothing changes any more."""


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

    def close(self, sections: Sequence[Section]) -> None:
        """Do nothing: all is there."""


class TerminalSink:
    """IPython in a terminal, where nothing can be changed once it is printed: everything is printed at the end."""

    def show(self, shown_as: str | None, data: dict[str, Any], metadata: dict[str, Any]) -> str:  # noqa: ARG002
        """Wait for the end."""
        return shown_as or "terminal"

    def clear(self, *, wait: bool) -> None:
        """Do nothing: nothing was printed yet."""

    def close(self, sections: Sequence[Section]) -> None:
        """Print."""
        for section in sections:
            text = section.drawn if section.data is None else str(section.data.get("text/plain", ""))
            if text:
                sys.stdout.write(text + "\n")
        sys.stdout.flush()


def sink_for(shell: InteractiveShell) -> Sink:
    """Return the sink that suits the shell."""
    return NotebookSink(shell) if hasattr(shell, "kernel") else TerminalSink()
