"""The rank's iopub "socket": everything published goes to the nanny, in order with what was printed.

Covers: the few socket methods that IPython's kernel calls.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import cell_threads
from .wire import CELL_BEGIN, CELL_END, FORWARD, LATE, LOGGED, PLACED, RankEnd

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .streams import Turns


class Publisher:
    """Take messages as a zmq socket would.

    Parameters
    ----------
    rank_end
        Where they go.
    turns
        Of what is printed.
    """

    def __init__(self, rank_end: RankEnd, turns: Turns) -> None:
        self._rank_end = rank_end
        self._turns = turns
        self._kind = PLACED

    def send_multipart(self, frames: Sequence[Any], *_args: Any, **_kwargs: Any) -> None:
        """Send a message; returns when the nanny's socket has taken it."""
        self._rank_end.send(self._kind, [getattr(frame, "buffer", frame) for frame in frames])

    def send_aside(self, frames: Sequence[Any]) -> None:
        """Send a message whose place among what is said does not matter; waits for nobody."""
        self._rank_end.send(FORWARD, frames)

    def send_late(self, packed_header: bytes, stream: str, data: bytes) -> None:
        """Send text for an earlier cell; waits for nobody."""
        self._rank_end.send(LATE, [packed_header, stream.encode(), data])

    def log_display(self, data: dict[str, Any]) -> None:
        """Write a display into the rank's log, in its text form; the display itself is sent next, and waited for."""
        text = str(data.get("text/plain", ""))
        if text:
            self._rank_end.send(LOGGED, [f"{text}\n".encode("utf-8", "backslashreplace")])

    def flush(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: nothing is held back."""

    def begin_cell(self, header: dict[str, Any], packed_header: bytes) -> tuple[int, int]:
        """Attribute what is printed, and what is started, to a request; returns the mark for :meth:`is_silent_since`.

        No thread prints meanwhile, and what was printed before is the last cell's: the nanny takes that first.
        """
        with self._turns.lock:
            cell_threads.begin_cell(header)
            self._rank_end.wait_heard()
            mark = self._rank_end.mark
            self._rank_end.begin_cell()
            self._rank_end.send(CELL_BEGIN, [packed_header])
        return mark

    @property
    def was_interrupted(self) -> bool:
        """Whether the cell was interrupted, though a handler of its own may have taken it."""
        return self._rank_end.was_interrupted

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Note that a request is being served within."""
        self._rank_end.begin_use()
        try:
            yield
        finally:
            self._rank_end.end_use()

    def is_silent_since(self, mark: tuple[int, int]) -> bool:
        """Whether nothing was printed or published since ``mark``."""
        return self._rank_end.is_silent_since(mark)

    def ending_cell(self) -> _Ending:
        """Mark the message sent within as the cell's last."""
        return _Ending(self)


class _Ending:
    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def __enter__(self) -> None:
        self._publisher._kind = CELL_END  # noqa: SLF001

    def __exit__(self, *_exc: object) -> None:
        self._publisher._kind = PLACED  # noqa: SLF001
