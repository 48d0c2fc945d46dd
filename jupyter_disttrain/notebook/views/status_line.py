"""Show one line that changes in place.

Covers: a notebook's output, a terminal, output that goes into a file.
Does not cover: the output of cells (``notebook.output.renderer``).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..output.displays import NotebookSink

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from typing_extensions import Self

_REWRITE = "\r\x1b[K"  # move to the first column, and clear the line


class StatusLine:
    """A line that is shown again with each change; :meth:`end` leaves its last text."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._sink = NotebookSink(shell) if hasattr(shell, "kernel") else None
        self._display: str | None = None
        self._is_open = False  # in a terminal: the cursor is in the line

    def show(self, text: str) -> None:
        """Show the text; where it can't be changed afterwards, e.g. in a file, do nothing."""
        if self._sink is not None:
            self._display = self._sink.show(self._display, {"text/plain": text}, {})
        elif sys.stdout.isatty():
            sys.stdout.write(f"{_REWRITE}{text}")
            sys.stdout.flush()
            self._is_open = True

    def wait(self, text: str) -> None:
        """Show a text about a long wait; where it can't be changed afterwards, print each text on a line of its own."""
        if self._sink is None and not sys.stdout.isatty():
            print(text, flush=True)  # noqa: T201  (a magic's output)
        else:
            self.show(text)

    def end(self, text: str) -> None:
        """Show the last text."""
        if self._sink is not None:
            self.show(text)
        else:
            print(f"{_REWRITE if self._is_open else ''}{text}", flush=True)  # noqa: T201
            self._is_open = False

    def __enter__(self) -> Self:
        """Return the line itself."""
        return self

    def __exit__(self, kind: object, *_exc: object) -> None:
        """Remove the line after an error, whose message is enough."""
        if kind is None:
            return
        if self._display is not None and self._sink is not None:
            self._sink.show(self._display, {}, {})
        if self._is_open:
            print(_REWRITE, end="", flush=True)  # noqa: T201
            self._is_open = False
