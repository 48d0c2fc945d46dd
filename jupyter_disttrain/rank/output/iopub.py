"""Provide the rank's iopub "socket": published messages go to the nanny, in order with the printed output.

Covers: the few socket methods that IPython's kernel calls.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..kernel import cell_threads
from ..nanny.ipc import CELL_BEGIN, CELL_END, LATE, LOGGED, PLACED, RankEnd

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .streams import Turns


class Publisher:
    """Accept messages as a zmq socket would.

    Parameters
    ----------
    rank_end
        Where they are sent.
    turns
        Lock and order of the printed output.
    """

    def __init__(self, rank_end: RankEnd, turns: Turns) -> None:
        self._rank_end = rank_end
        self._turns = turns
        self._kind = PLACED

    def send_multipart(self, frames: Sequence[Any], *_args: Any, **_kwargs: Any) -> None:
        """Send a message; returns when the nanny's socket has taken it."""
        self._rank_end.send(self._kind, [getattr(frame, "buffer", frame) for frame in frames])

    def send_late(self, packed_header: bytes, stream: str, data: bytes) -> None:
        """Send text for an earlier cell, without waiting for the nanny."""
        self._rank_end.send(LATE, [packed_header, stream.encode(), data])

    def log_display(self, data: dict[str, Any]) -> None:
        """Write the text form of a display to the rank's log; the display itself is sent next, and waited for."""
        text = str(data.get("text/plain", ""))
        if text:
            self._rank_end.send(LOGGED, [f"{text}\n".encode("utf-8", "backslashreplace")])

    def flush(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: nothing is buffered."""

    def begin_cell(self, header: dict[str, Any], packed_header: bytes) -> tuple[int, int]:
        """Attribute what is printed and started to a request; returns the mark for :meth:`is_silent_since`.

        No thread prints meanwhile, and what was printed before belongs to the last cell: the nanny handles that first.
        """
        with self._turns.lock:
            self._turns.send_rest()
            cell_threads.begin_cell(header)
            self._rank_end.wait_until_handled()
            mark = self._rank_end.mark
            self._rank_end.begin_cell()
            self._rank_end.send(CELL_BEGIN, [packed_header])
        return mark

    @property
    def was_interrupted(self) -> bool:
        """Whether the cell was interrupted, even if the cell caught the interrupt."""
        return self._rank_end.was_interrupted

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Mark for the duration of the block that a request is being served."""
        self._rank_end.begin_use()
        try:
            yield
        finally:
            self._rank_end.end_use()

    def is_silent_since(self, mark: tuple[int, int]) -> bool:
        """Whether nothing was printed or published since ``mark``."""
        return self._rank_end.is_silent_since(mark)

    @contextmanager
    def ending_cell(self) -> Iterator[None]:
        """Mark the message sent within as the cell's last."""
        self._kind = CELL_END
        try:
            yield
        finally:
            self._kind = PLACED
