"""Support ``ipywidgets.Output`` on a rank, which rich's progress bars use.

Covers: what is displayed within it, clearing it.
Does not cover: widgets that are displayed themselves (``notebook.output.comms``).

In a notebook's own kernel the page puts output within an Output into that widget. A rank's cell is one output,
so what is displayed within an Output becomes a display of the cell that the next one replaces after a ``clear_output``;
without this, that would clear all of the rank's output in the cell.
"""

from __future__ import annotations

import functools
import uuid
from typing import TYPE_CHECKING, Any

from ipykernel.zmqshell import ZMQDisplayPublisher

from ..kernel.cell_threads import earlier_cell
from ..libraries.import_hooks import on_import

if TYPE_CHECKING:
    from collections.abc import Callable

_NOTHING = {"text/plain": ""}


class _Shown:
    """What an Output shows."""

    def __init__(self) -> None:
        self.displays: list[str] = []  # by their ids
        self.is_cleared = False

    def place(self) -> tuple[str, bool]:
        """Return the id of the next display, and whether that exists already."""
        is_there, self.is_cleared = self.is_cleared and bool(self.displays), False
        if not is_there:
            self.displays.append(uuid.uuid4().hex)
        return self.displays[0 if is_there else -1], is_there


_entered: list[Any] = []  # Outputs whose ``with`` block is left later, the innermost last; bars draw in threads


def watch_outputs() -> None:
    """Start to track in which Output something is displayed."""
    on_import("ipywidgets.widgets.widget_output", _watch)


def _watch(module: Any) -> None:
    enter: Callable[..., Any] = module.Output.__enter__
    leave: Callable[..., Any] = module.Output.__exit__

    @functools.wraps(enter)
    def on_enter(output: Any) -> Any:
        _entered.append(output)
        return enter(output)

    @functools.wraps(leave)
    def on_exit(output: Any, *error: Any) -> Any:
        if output in _entered:
            _entered.remove(output)
        return leave(output, *error)

    module.Output.__enter__, module.Output.__exit__ = on_enter, on_exit


def _current() -> _Shown | None:
    if not _entered:
        return None
    shown: _Shown = _entered[-1].__dict__.setdefault("_disttrain_shown", _Shown())
    return shown


class RankDisplayPublisher(ZMQDisplayPublisher):
    """Sends a rank's displays."""

    def publish(  # type: ignore[override]
        self, data: Any, metadata: Any = None, *, transient: Any = None, update: bool = False, **options: Any
    ) -> None:
        """Send a display; within an Output it replaces one that was cleared. An Output itself is not shown."""
        if "application/vnd.jupyter.widget-view+json" in data and data.get("text/plain") == "Output()":
            return
        shown = _current()
        if shown is not None and not (transient or {}).get("display_id"):
            name, update = shown.place()
            transient = {**(transient or {}), "display_id": name}
        cell = earlier_cell()
        if cell is not None:
            self._parent_header.set(cell)  # the parent header of this thread or task, which displays for no other cell
        super().publish(data, metadata, transient=transient, update=update, **options)  # type: ignore[no-untyped-call]

    def clear_output(self, wait: bool = False) -> None:
        """Clear the rank's output in this cell, or that of the Output."""
        shown = _current()
        if shown is None:
            super().clear_output(wait)  # type: ignore[no-untyped-call]
            return
        shown.is_cleared = True
        for name in shown.displays[1:] if wait else shown.displays:
            super().publish(_NOTHING, transient={"display_id": name}, update=True)  # type: ignore[no-untyped-call]
        del shown.displays[1:]
