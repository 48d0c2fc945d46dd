"""Read the files of a checkpoint only if they belong to this user, because loading a pickle runs its code.

Covers: refusing another user's checkpoint with an error that names the option to load it nevertheless; a reader for
``torch.distributed.checkpoint`` that checks each file it opens.
Does not cover: where a checkpoint is (``versions``), what is in it (``rank``, ``local_state``).
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ...private_files import open_own, owner_of
from .versions import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator


def check_version(version: Path) -> Path:
    """Return the version after checking that this user owns all its files.

    Raises
    ------
    CheckpointError
        If another user owns a file.
    """
    for path in (version, *sorted(version.rglob("*"))):
        owner = path.lstat().st_uid
        if owner != os.geteuid():
            raise CheckpointError(_refusal(path, owner_of(owner)))
    return version


def _refusal(path: str | os.PathLike[str], owner: str) -> str:
    return (
        f"{path} belongs to another user ({owner}), and loading a checkpoint runs code that is in it; "
        f"if you trust that user, load it with %dist_load --trust-owner"
    )


@contextmanager
def opened(path: str | os.PathLike[str], *, trust_owner: bool) -> Iterator[IO[bytes]]:
    """Open a file of a checkpoint; with ``trust_owner``, also another user's.

    Raises
    ------
    CheckpointError
        If it belongs to another user, without ``trust_owner``.
    """
    if trust_owner:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    else:
        try:
            descriptor = open_own(path)
        except PermissionError as error:
            owner = Path(path).stat().st_uid
            if owner == os.geteuid():
                raise  # the file's mode is the reason
            raise CheckpointError(_refusal(path, owner_of(owner))) from error
    with os.fdopen(descriptor, "rb") as file:
        yield file


def reader_of(version: Path, *, trust_owner: bool) -> Any:
    """Return a storage reader for ``torch.distributed.checkpoint.load``."""
    from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader  # noqa: PLC0415

    class OwnFiles(FileSystem):
        @contextmanager
        def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
            assert mode == "rb", mode
            with opened(path, trust_owner=trust_owner) as file:
                yield file

    reader = FileSystemReader(version)
    reader.fs = OwnFiles()
    return reader
