"""Provide the rank's iopub "socket": published messages go to the nanny, in order with the printed output.

Covers: the few socket methods that IPython's kernel calls; lone surrogates in the user's text, e.g. half an emoji or a
file name that is not valid text, which UTF-8 can't encode and so no JSON message can carry.
Does not cover: printed text (``streams``), values that are pickled (``protocol.serialization``).
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from jupyter_client.jsonutil import json_clean

from ..kernel import cell_threads
from ..nanny.ipc import LATE, PLACED, RankEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..cell_started import CellStarted
    from .streams import Turns

_SURROGATE = re.compile("[\ud800-\udfff]")


class Publisher:
    """Accept messages as a zmq socket would; ``pack`` packs a header as the session does."""

    def __init__(self, rank_end: RankEnd, turns: Turns, pack: Callable[[dict[str, Any]], bytes]) -> None:
        self._rank_end, self._turns, self._pack = rank_end, turns, pack

    def send_multipart(self, frames: Sequence[Any], *_args: Any, **_kwargs: Any) -> None:
        """Send a message; returns when the nanny's socket has taken it."""
        self._rank_end.send(PLACED, [getattr(frame, "buffer", frame) for frame in frames])

    def send_late(self, header: dict[str, Any], stream: str, data: bytes) -> None:
        """Send text for an earlier cell, without waiting for the nanny."""
        self._rank_end.send(LATE, [self._pack(header), stream.encode(), data])

    def flush(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: nothing is buffered."""

    def attribute_output(self, cell: CellStarted) -> None:
        """Attribute what is printed and started from now on to a cell, and have the nanny pass on its interrupts.

        No thread prints meanwhile, and what was printed before belongs to the last cell: the nanny handles that first.
        It then also passes on an interrupt of this cell that it has kept until now.
        """
        header = self._pack(cell.header)
        with self._turns.lock:
            cell_threads.attribute_to(cell.header)
            self._rank_end.begin_cell(header)


def escaping(pack: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Return a function that packs messages like ``pack``, and escapes what ``pack`` can't encode, as on stdout."""

    def pack_any(message: Any) -> bytes:
        try:
            packed = pack(message)
            packed.decode()  # it may hold surrogates as bytes that are no UTF-8
        except UnicodeError:
            text = json.dumps(json_clean(message), ensure_ascii=False)
            return _SURROGATE.sub(lambda found: f"\\\\u{ord(found[0]):x}", text).encode()
        return packed

    return pack_any
