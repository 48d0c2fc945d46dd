"""A file of a data set that is not whole yet.

Covers: what of it was written, telling that from what only looks like it, becoming a whole file.
Does not cover: which files are whole (``stage_store``).
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .stage_source import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from .stage_source import SourceFile


def hash_of(block: bytes | memoryview) -> bytes:
    """Return a block's hash."""
    return hashlib.sha256(block).digest()


def whole_hash(digests: Sequence[bytes]) -> str:
    """Return a file's hash from those of its blocks."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def hash_file(path: Path, check: Callable[[], None]) -> str:
    """Return a file's hash; ``check`` is called between blocks, and raises what is to end this."""
    digests = []
    with path.open("rb") as opened:
        while block := opened.read(BLOCK_BYTES):
            check()
            digests.append(hash_of(block))
    return whole_hash(digests)


def parse(line: str) -> Any:
    """Return what a line holds; None if it was cut off when its process died."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


class Part:
    """What has come of one file."""

    def __init__(self, file: SourceFile, path: Path) -> None:
        self.file = file
        self.path = path
        self.digests: list[bytes] = []
        self._blocks = path.with_suffix(".blocks")
        self._told: Any = None
        self._fd = -1

    def _head(self) -> list[Any]:
        return [self.file.name, self.file.size_bytes, self.file.version]

    def read_digests(self) -> list[bytes]:
        """Return the hashes of the blocks that were written; none if the file is another by now."""
        try:
            head, *lines = self._blocks.read_text().splitlines()
            digests = [bytes.fromhex(line) for line in lines if len(line) == 2 * hashlib.sha256().digest_size]
        except (FileNotFoundError, ValueError):  # zeros, say, that a machine which crashed has left in it
            return []
        if not self.file.version or parse(head) != self._head() or not self.path.exists():
            return []
        return digests

    def trusted(self, check: Callable[[], None]) -> list[bytes]:
        """Return the hashes of the blocks that are on the disk as they were written; the others are cut off.

        ``check`` is called between blocks, and raises what is to end this.
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
        """Go on where it was left; all that is on the disk has been looked at."""
        self.digests = self.read_digests()
        flags = os.O_RDWR | os.O_CREAT | (0 if self.digests else os.O_TRUNC)
        self._fd = os.open(self.path, flags, 0o600)
        if self.file.blocks > 1:  # one block is written again sooner than looked up
            if not self.digests:
                self._write_blocks([])
            self._told = self._blocks.open("a", buffering=1)

    def write(self, number: int, block: bytes | memoryview, digest: bytes) -> None:
        """Write a block, and then that it is there."""
        assert number == len(self.digests), "blocks come in their order"
        offset, view = number * BLOCK_BYTES, memoryview(block)
        while view:
            written = os.pwrite(self._fd, view, offset)
            offset, view = offset + written, view[written:]
        self.digests.append(digest)
        if self._told is not None:
            self._told.write(digest.hex() + "\n")

    def become(self, target: Path) -> None:
        """Stand as a whole file where it belongs."""
        os.fchmod(self._fd, self.file.mode | 0o600)
        self.close()
        if self.file.modified_ns is not None:
            os.utime(self.path, ns=(self.file.modified_ns, self.file.modified_ns))
        self.path.replace(target)
        if self.file.blocks > 1:
            self._blocks.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files."""
        opened, self._told = self._told, None
        with suppress(OSError):  # a full disk refuses the same line once more; it was told when it did first
            if opened is not None:
                opened.close()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def remove(self) -> None:
        """Forget it."""
        self.close()
        self.path.unlink(missing_ok=True)
        self._blocks.unlink(missing_ok=True)
