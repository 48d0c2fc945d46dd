"""Read a data set for the nodes of a chain.

Covers: which blocks are read, in which order; the hashes that are sent with them; hashes of the whole source.
Does not cover: where they are read from (``source``), passing them on (``pipeline``).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from .partial_file import hash_of, whole_hash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from .source import Source, SourceFile
    from .store import Store

Item = tuple[int, int, Any, bytes]  # a file, a block's number, the block, its hash; number -1: the file's own hash


class Nowhere:
    """Takes the place of a :class:`Store` where nothing is to be written, as everything is there."""

    def __init__(self, source: str) -> None:
        self.path = Path(source)
        self.is_source = True

    def begin(
        self, _files: Sequence[SourceFile], _folders: Sequence[str] | None, *, verify: bool, check: Callable[[], None]
    ) -> dict[int, int]:
        """Return no missing blocks."""
        del verify, check
        return {}

    def sees_mark(self, _name: str) -> bool:
        """Return False: no folder is shared."""
        return False

    def digests_of(self, _at: int) -> list[bytes]:
        """Return no hashes: blocks are hashed only when they are read."""
        return []

    def hash_of(self, _at: int) -> str:
        """Return no hash: of a file that is continued, only the nodes have hashed the beginning."""
        return ""

    def write(self, _at: int, _number: int, _block: bytes | memoryview, _digest: bytes) -> None:
        """Refuse."""
        raise AssertionError("nothing is missing here")

    def finish(self, _at: int, _hashed: str) -> None:
        """Refuse."""
        raise AssertionError("nothing is missing here")

    def close(self) -> None:
        """Do nothing."""


if TYPE_CHECKING:
    Target: TypeAlias = Store | Nowhere


def hash_files(source: Source, check: Callable[[], None]) -> list[SourceFile]:
    """Return the files of a source with the hashes of their content: all of it is read.

    ``check`` is called between blocks, and may raise to abort.
    """
    hashed = []
    for file in source.files:
        digests = []
        check()
        for block in source.read(file, 0):
            check()
            digests.append(hash_of(block))
        hashed.append(replace(file, hashed=whole_hash(digests)))
    return hashed


def read_blocks(source: Source, needs: Mapping[int, int], own: Mapping[int, int], store: Target) -> Iterator[Item]:
    """Read the blocks that nodes lack.

    Parameters
    ----------
    source
        The data set.
    needs
        For each file that a node lacks: the first block that is missing anywhere.
    own
        The same for the node that reads.
    store
        What this node has.

    Yields
    ------
    tuple
        See ``Item``. A file's own hash follows its blocks, except for a file of one block: its hash follows from the
        block's, and each of many small files is one message.
    """
    for at, first in needs.items():
        file = source.files[at]
        # Hashes of the blocks that no node lacks; none where this node has the whole file.
        digests = store.digests_of(at)[:first] if at in own else []
        for number, block in enumerate(source.read(file, first), first):
            digest = hash_of(block)
            digests.append(digest)
            yield at, number, block, digest
        if file.blocks != 1:
            hashed = file.hashed or (whole_hash(digests) if len(digests) == file.blocks else store.hash_of(at))
            yield at, -1, b"", hashed.encode()
