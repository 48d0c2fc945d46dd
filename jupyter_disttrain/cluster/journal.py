"""What was done to the ranks' variables, in order.

Covers: cells that ran, variables that were pushed and copied, as an exported script repeats them.
Does not cover: the script (``export``).

Kept in the notebook's process: the text of cells, and small pushed values as they were sent.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MOST_BYTES = 16 << 20  # of one push that are kept
MOST_BYTES_EVER = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where code stands in a notebook."""

    execution_count: int | None = None  # the prompt number
    lines_before: int = 0  # of the notebook's cell before the code, for tracebacks
    cell_id: str = ""  # of the notebook's cell; empty where the front end does not tell
    is_cell: bool = True  # a person has written it
    magic: str = ""  # what they have written in place of a cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A cell that was sent."""

    number: int  # counted in the cluster
    execution_count: int  # its prompt number
    cell_id: str  # of the notebook's cell; empty where the front end does not tell
    code: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """Variables that the notebook has set on ranks."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    pickled: bytes | None  # None: too large to be kept
    buffers: tuple[bytes, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """Variables of one rank that others were given."""

    names: tuple[str, ...]
    source: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Did:
    """What a magic had the ranks do to their variables, and no script can repeat."""

    magic: str


Entry = Ran | Pushed | Copied | Did


class Journal:
    """What was done since the ranks were started."""

    def __init__(self, *, began_late: bool) -> None:
        self.began_late = began_late  # the ranks had run cells of an earlier kernel
        self._lock = threading.Lock()  # of the notebook's thread and the link's
        self._entries: list[Entry] = []
        self._endings: dict[int, str] = {}  # of cells by number: the name of the error
        self._without_group: set[int] = set()  # cells that left the ranks none
        self._kept_bytes = 0

    def ran(self, entry: Ran) -> None:
        """Note a cell."""
        with self._lock:
            self._entries.append(entry)

    def did(self, magic: str) -> None:
        """Note what a magic had the ranks do."""
        with self._lock:
            self._entries.append(Did(magic=magic))

    def ended(self, number: int, errors: Iterable[str], *, without_group: bool = False) -> None:
        """Note how a cell ended: with errors of these names, or none; ``without_group``: it left the ranks no group."""
        names = set(errors)
        with self._lock:
            if without_group:
                self._without_group.add(number)
            # An interrupted cell is one that the script runs to its end; an error beside it is why it was interrupted.
            self._endings[number] = "KeyboardInterrupt" if names == {"KeyboardInterrupt"} else ", ".join(sorted(names))

    def pushed(self, names: Iterable[str], ranks: Sequence[int], pickled: bytes, buffers: Sequence[Any]) -> None:
        """Note variables, with their values as they were sent if these are small."""
        size = len(pickled) + sum(memoryview(buffer).nbytes for buffer in buffers)
        with self._lock:
            keeps = size <= MOST_BYTES and self._kept_bytes + size <= MOST_BYTES_EVER
            self._kept_bytes += size if keeps else 0
            self._entries.append(
                Pushed(
                    names=tuple(names),
                    ranks=tuple(ranks),
                    pickled=pickled if keeps else None,
                    buffers=tuple(bytes(memoryview(buffer)) for buffer in buffers) if keeps else (),
                    size_bytes=size,
                )
            )

    def copied(self, names: Iterable[str], source: int, ranks: Sequence[int]) -> None:
        """Note variables that went from rank to rank."""
        with self._lock:
            self._entries.append(Copied(names=tuple(names), source=source, ranks=tuple(ranks)))

    def entries(self) -> tuple[list[Entry], dict[int, str]]:
        """Return what was done, in order, and how cells ended, by number; empty text for well."""
        with self._lock:
            return list(self._entries), dict(self._endings)

    @property
    def without_group(self) -> frozenset[int]:
        """The cells, by number, that left the ranks no process group."""
        with self._lock:
            return frozenset(self._without_group)


def last_of_each(entries: Iterable[Entry]) -> list[Entry]:
    """Leave of a notebook's cell only the last run, in the place of the first: what uses it may stand between."""
    found = list(entries)
    last = {entry.cell_id: entry for entry in found if isinstance(entry, Ran)}
    kept: list[Entry] = []
    seen: set[str] = set()
    for entry in found:
        if isinstance(entry, Ran) and entry.cell_id:
            if entry.cell_id not in seen:
                kept.append(last[entry.cell_id])
            seen.add(entry.cell_id)
        else:
            kept.append(entry)
    return kept


def is_whole(entry: Ran, endings: dict[int, str]) -> bool:
    """Whether a script can repeat a cell: it ended well, or the person ended it."""
    return endings.get(entry.number, "it still runs") in ("", "KeyboardInterrupt")
