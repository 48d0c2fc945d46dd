"""Write a partially copied file of a data set.

Covers: which of its blocks were written, verifying them, completing the file.
Does not cover: which files are complete (``store``).
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .source import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from .source import SourceFile


def hash_of(block: bytes | memoryview) -> bytes:
    """Return a block's hash."""
    return hashlib.sha256(block).digest()


def whole_hash(digests: Sequence[bytes]) -> str:
    """Return a file's hash from those of its blocks."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def hash_file(path: Path, check: Callable[[], None]) -> str:
    """Return a file's hash; ``check`` is called between blocks, and may raise to abort."""
    digests = []
    with path.open("rb") as opened:
        while block := opened.read(BLOCK_BYTES):
            check()
            digests.append(hash_of(block))
    return whole_hash(digests)


def parse(line: str) -> Any:
    """Return the content of a line; None if it was cut off when its process died."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


class PartialFile:
    """The written part of one file."""

    def __init__(self, file: SourceFile, path: Path) -> None:
        self.file = file
        self.path = path
        self.digests: list[bytes] = []
        self._blocks = path.with_suffix(".blocks")
        self._digest_file: Any = None
        self._fd = -1

    def _head(self) -> list[Any]:
        return [self.file.name, self.file.size_bytes, self.file.version]

    def read_digests(self) -> list[bytes]:
        """Return the hashes of the blocks that were written; none if the file has changed in the source."""
        try:
            head, *lines = self._blocks.read_text().splitlines()
            digests = [bytes.fromhex(line) for line in lines if len(line) == 2 * hashlib.sha256().digest_size]
        except (FileNotFoundError, ValueError):  # e.g. zeros after a crash of the machine
            return []
        if not self.file.version or parse(head) != self._head() or not self.path.exists():
            return []
        return digests

    def trusted(self, check: Callable[[], None]) -> list[bytes]:
        """Return the hashes of the blocks that are on the disk as they were written; the others are cut off.

        ``check`` is called between blocks, and may raise to abort.
        """
        digests = self.read_digests()
        good: list[bytes] = []
        if digests:
            with self.path.open("r+b") as opened:
                for digest in digests:
                    check()
                    if hash_of(opened.read(BLOCK_BYTES)) != digest:
                        break
                    good.append(digest)
                opened.truncate(len(good) * BLOCK_BYTES)
            if len(good) < len(digests):
                self._write_blocks(good)
        return good

    def _write_blocks(self, digests: Sequence[bytes]) -> None:
        lines = [json.dumps(self._head()), *(digest.hex() for digest in digests)]
        self._blocks.write_text("\n".join(lines) + "\n")

    def open(self) -> None:
        """Open the file to continue after its last block; all that is on the disk has been verified."""
        self.digests = self.read_digests()
        flags = os.O_RDWR | os.O_CREAT | (0 if self.digests else os.O_TRUNC)
        self._fd = os.open(self.path, flags, 0o600)
        if self.file.blocks > 1:  # a single block is rewritten faster than compared
            if not self.digests:
                self._write_blocks([])
            self._digest_file = self._blocks.open("a", buffering=1)

    def write(self, number: int, block: bytes | memoryview, digest: bytes) -> None:
        """Write a block, and then record it."""
        assert number == len(self.digests), "blocks come in their order"
        offset, view = number * BLOCK_BYTES, memoryview(block)
        while view:
            written = os.pwrite(self._fd, view, offset)
            offset, view = offset + written, view[written:]
        self.digests.append(digest)
        if self._digest_file is not None:
            self._digest_file.write(digest.hex() + "\n")

    def become(self, target: Path) -> None:
        """Move the completed file to its place."""
        os.fchmod(self._fd, self.file.mode | 0o600)
        self.close()
        if self.file.modified_ns is not None:
            os.utime(self.path, ns=(self.file.modified_ns, self.file.modified_ns))
        self.path.replace(target)
        if self.file.blocks > 1:
            self._blocks.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files."""
        opened, self._digest_file = self._digest_file, None
        with suppress(OSError):  # a full disk refuses the same line again; it was reported the first time
            if opened is not None:
                opened.close()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def remove(self) -> None:
        """Remove the file."""
        self.close()
        self.path.unlink(missing_ok=True)
        self._blocks.unlink(missing_ok=True)
