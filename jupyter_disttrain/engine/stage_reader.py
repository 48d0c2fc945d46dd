"""Read a data set for the nodes of a chain.

Covers: which blocks are read, in which order; the hashes that travel with them; those of all that the source holds.
Does not cover: where they are read from (``stage_source``), passing them on (``stage_relay``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from .stage_part import hash_of, whole_hash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .stage_sender import Nowhere
    from .stage_source import Source, SourceFile
    from .stage_store import Store

    Target: TypeAlias = Store | Nowhere

Item = tuple[int, int, Any, bytes]  # a file, a block's number, the block, its hash; number -1: the file's own hash


def hash_files(source: Source, check: Callable[[], None]) -> list[SourceFile]:
    """Return the files of a source with the hashes of what they hold: all of it is read.

    ``check`` is called between blocks, and raises what is to end this.
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
    """Read what nodes lack.

    Parameters
    ----------
    source
        The data set.
    needs
        For each file that a node lacks: the first block that is missing anywhere.
    own
        The same of the node that reads.
    store
        What this node has.

    Yields
    ------
    tuple
        See ``Item``. A file's own hash follows its blocks, but where it has one: there it follows from the block's,
        and each of many small files is one message.
    """
    for at, first in needs.items():
        file = source.files[at]
        # Those of the blocks that nobody lacks; none where this node has the file whole.
        digests = store.digests_of(at)[:first] if at in own else []
        for number, block in enumerate(source.read(file, first), first):
            digest = hash_of(block)
            digests.append(digest)
            yield at, number, block, digest
        if file.blocks != 1:
            hashed = file.hashed or (whole_hash(digests) if len(digests) == file.blocks else store.hash_of(at))
            yield at, -1, b"", hashed.encode()
