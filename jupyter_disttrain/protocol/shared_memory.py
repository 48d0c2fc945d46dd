"""Pass large memory from one process of a host to another.

Covers: a file in shared memory that holds the buffers of one message, mapping it without a copy, removing it; removing
the folders of processes that were killed.
Does not cover: what the buffers mean (``serialization``), hosts that don't share memory: there the buffers are sent as
frames.

The receiver maps the file privately: what it writes stays its own, so several ranks can map the same file. It accepts
files from its own shelf only, by a bare name: a sender can't name any other file of the receiver.
"""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path("/dev/shm")  # noqa: S108  (the folder below it is the user's alone)
PREFIX = "disttrain-"  # prefix of the folders
NOTEBOOK = "notebook"  # the file that identifies the folder on the notebook's host among those of its name
NANNIES = "nannies"  # the file in those other folders; each nanny there holds a shared lock on it
THRESHOLD = 1 << 20  # bytes; smaller messages are not worth a file
_NAME = re.compile(r"[0-9a-f]{32}")  # name of a file
_ALIGNMENT = 64  # bytes; alignment of each buffer, for torch and numpy


def is_shared(folder: str | None, token: str) -> bool:
    """Whether this process sees the folder with this token, and not one of the same name on another host."""
    try:
        return folder is not None and (Path(folder) / NOTEBOOK).read_text() == token
    except OSError:
        return False


def lend(folder: str | None, buffers: Sequence[Any]) -> tuple[dict[str, Any] | None, list[Any]]:
    """Put buffers, memory as plain bytes, on the shelf; ``folder`` is None where the receiver can't see it.

    Returns a note, which is what :func:`fetch` needs, and frames. Without a shelf, or without room on it, the note is
    None and the frames are the buffers.
    """
    views = [memoryview(buffer) for buffer in buffers]
    if folder is None or sum(view.nbytes for view in views) < THRESHOLD:
        return None, views
    name = os.urandom(16).hex()
    path = str(Path(folder) / name)
    spans = []
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            at = 0
            for view in views:
                spans.append((at, view.nbytes))
                _write(descriptor, view, at)
                at += -(-view.nbytes // _ALIGNMENT) * _ALIGNMENT
            os.ftruncate(descriptor, at)
        finally:
            os.close(descriptor)
    except BaseException as error:
        Path(path).unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise  # e.g. an interrupt of %dist_push
        return None, views  # no room (containers get 64 MB): frames are slower, but work as well
    return {"name": name, "spans": spans}, []


def _write(descriptor: int, view: memoryview, at: int) -> None:
    while view:
        written = os.pwrite(descriptor, view, at)
        view = view[written:]
        at += written


def fetch(folder: str | None, note: dict[str, Any] | None, frames: Sequence[Any]) -> list[Any]:
    """Return the buffers; those from the shelf are writable and cost memory only where they are written.

    ``folder`` is the receiver's own shelf, None where it has none; ``note`` and ``frames`` are as :func:`lend` returned
    them to the sender. Raises an OSError if the file was removed or can't be mapped, and a ValueError if the note names
    no file of the shelf.
    """
    if note is None:
        return list(frames)
    try:
        spans = [(int(at), int(size)) for at, size in note["spans"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{note!r:.200} does not locate its buffers") from error
    # O_NONBLOCK: a pipe of that name would block the reader forever.
    descriptor = os.open(_path(folder, note), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        memory = memoryview(mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    finally:
        os.close(descriptor)
    return [memory[at : at + size] for at, size in spans]


def drop(folder: str | None, note: dict[str, Any] | None) -> None:
    """Remove the file from the shelf; a process that has mapped it keeps the memory.

    Raises a ValueError if the note names no file of the shelf.
    """
    if note is not None:
        _path(folder, note).unlink(missing_ok=True)


def _path(folder: str | None, note: dict[str, Any]) -> Path:
    """Return the path of a file on the receiver's shelf."""
    name = note.get("name") if isinstance(note, dict) else None
    if folder is None or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{note!r:.200} names no file in this cluster's shared memory")
    return Path(folder) / name
