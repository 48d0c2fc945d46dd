"""Record what changed the ranks' variables, in order.

Covers: cells that ran, variables that were pushed and copied, for an exported script to repeat.
Does not cover: the script (``features.export.export``).

The record is kept in the notebook's process: the text of cells, and small pushed values as they were sent.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MOST_BYTES = 16 << 20  # of one push; larger ones are recorded without values
MOST_BYTES_EVER = 256 << 20  # of all pushes together


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where code comes from in a notebook."""

    execution_count: int | None = None  # the prompt number
    cell_id: str = ""  # of the notebook's cell; empty if the front end does not provide it
    is_cell: bool = True  # whether the user wrote the code
    magic: str = ""  # the magic that the user wrote, if not
    runs_program: bool = False  # whether its ranks run programs, and wait for them


@dataclass(frozen=True, slots=True, kw_only=True)
class CellEntry:
    """A cell that was sent."""

    number: int  # the cluster's number of the cell
    execution_count: int  # its prompt number
    cell_id: str  # of the notebook's cell; empty if the front end does not provide it
    code: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """Variables that the notebook has set on ranks."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    pickled: bytes | None  # None: too large to keep
    buffers: tuple[bytes, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """Variables that were copied from one rank to others."""

    names: tuple[str, ...]
    source: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MagicEntry:
    """A change of the ranks' variables by a magic, which no script can repeat."""

    magic: str


Entry = CellEntry | Pushed | Copied | MagicEntry


class Journal:
    """The entries since the ranks were started, or since this process attached to them."""

    def __init__(self, *, began_late: bool) -> None:
        self.began_late = began_late  # whether this process attached to the ranks, which ran earlier cells
        self._lock = threading.Lock()  # for the notebook's threads and the link's
        self._entries: list[Entry] = []
        self._endings: dict[int, str] = {}  # names of a cell's errors, by its number
        self._kept_bytes = 0

    def add(self, entry: Entry) -> None:
        """Record a change."""
        with self._lock:
            self._entries.append(entry)

    def ended(self, number: int, errors: set[str]) -> None:
        """Record the end of a cell, with the names of its errors."""
        with self._lock:
            self._endings[number] = ", ".join(sorted(errors))

    def pushed(self, names: Iterable[str], ranks: Sequence[int], pickled: bytes, buffers: Sequence[Any]) -> None:
        """Record pushed variables, with their values as they were sent if these are small."""
        size = len(pickled) + sum(memoryview(buffer).nbytes for buffer in buffers)
        keeps = size <= MOST_BYTES and self._kept_bytes + size <= MOST_BYTES_EVER
        self._kept_bytes += size if keeps else 0
        self.add(
            Pushed(
                names=tuple(names),
                ranks=tuple(ranks),
                pickled=pickled if keeps else None,
                buffers=tuple(bytes(memoryview(buffer)) for buffer in buffers) if keeps else (),
                size_bytes=size,
            )
        )

    def entries(self) -> tuple[list[Entry], dict[int, str]]:
        """Return the entries, in order, and the error names of ended cells by number; empty text for no error."""
        with self._lock:
            return list(self._entries), dict(self._endings)


def last_of_each(entries: Sequence[Entry]) -> list[Entry]:
    """Keep only the last run of each notebook cell, at the place of its first run: entries between may use it."""
    last = {entry.cell_id: entry for entry in entries if isinstance(entry, CellEntry)}
    kept: list[Entry] = []
    for entry in entries:
        if not isinstance(entry, CellEntry) or not entry.cell_id:
            kept.append(entry)
        elif entry.cell_id in last:
            kept.append(last.pop(entry.cell_id))
    return kept


def is_whole(entry: CellEntry, endings: dict[int, str]) -> bool:
    """Whether a script can repeat a cell: it ended without an error, or the user interrupted it."""
    # The script runs an interrupted cell to its end. Another error in it is why the user interrupted it.
    return endings.get(entry.number, "it still runs") in ("", "KeyboardInterrupt")
