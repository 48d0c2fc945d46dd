"""Choose the folder of a data set on this node.

Covers: the folder that the user names, or the default one; its owner; the source's own folder.
Does not cover: its content (``store``).
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from ...config.data_urls import is_address
from ...errors import StageError
from ...protocol.environment import STAGE_DIR
from .source import source_name

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)


def own_folder() -> Path:
    """Return the default folder of data sets: on this node's own disk, of this user alone."""
    there = next((os.environ[name] for name in ("SLURM_TMPDIR", "TMPDIR") if os.environ.get(name)), "/tmp")  # noqa: S108
    return Path(there) / f"disttrain-stage-{os.getuid()}"


def path_for(source: str, to: str | None, host: str) -> Path:
    """Return the path of a data set on this node.

    Parameters
    ----------
    source, to, host
        See :class:`features.staging.store.Store`.

    Raises
    ------
    StageError
        If that is inside the source, or names a variable that is not set on this node.
    """
    folder = Path(os.environ.get(STAGE_DIR) or own_folder()) if to is None else _expand(to, host)
    path = folder.absolute() / source_name(source)
    # By name too, where this node does not see the source: it would see it from then on.
    if not is_address(source) and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(source)):
        raise StageError(
            f"{path} on {host} would be inside {source}, the data set to copy; name another folder with --to"
        )
    return path


def _expand(to: str, host: str) -> Path:
    """Expand this node's variables and home."""
    for name in (plain or braced for plain, braced in _VARIABLE.findall(to)):
        if not os.environ.get(name):
            raise StageError(f"--to {to}: ${name} is not set on {host}; set it on every node, or name a path")
    try:
        return Path(os.path.expandvars(to)).expanduser()
    except RuntimeError as error:
        raise StageError(f"--to {to}: {error} ({host}); name a path") from None


def is_same(source: str, path: Path) -> bool:
    """Whether a path is the source's own, and not that of a copy."""
    try:
        return not is_address(source) and path.samefile(source)
    except OSError:
        return False


def make_folder(path: Path, to: str | None, host: str) -> None:
    """Make the parent folder of a data set's folder.

    Raises
    ------
    StageError
        If it is the default one, which may be in a folder where all users write, and is not this user's.
    """
    if to is None and not os.environ.get(STAGE_DIR):
        make_own(path.parent, host)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)


def make_own(folder: Path, host: str) -> None:
    """Make a folder where others may have made one of that name.

    Raises
    ------
    StageError
        If it is another user's, or a link.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # a dangling link too, which is reported below
        folder.mkdir(mode=0o700)
    check_own(folder, host)
    if folder.is_symlink():
        raise StageError(
            f"{folder} on {host} is a link to {folder.readlink()}, not a folder; remove it, or name a "
            f"folder with --to or ${STAGE_DIR}"
        )


def check_own(path: Path, host: str) -> None:
    """Refuse a path that another user owns, and could change at any time; the path need not exist.

    Raises
    ------
    StageError
        If it is another user's.
    """
    with suppress(FileNotFoundError):
        if path.lstat().st_uid != os.getuid():
            raise StageError(f"{path} on {host} belongs to another user; name another folder with --to")
