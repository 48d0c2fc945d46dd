"""Choose the folder of a data set on this node.

Covers: the folder that the user names, or the default one; its owner.
Does not cover: its content (``store``).
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from ...config.data_urls import is_address
from ...errors import StageError
from ...private_files import why_not_private
from ...protocol.environment import STAGE_DIR
from .source import source_name

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)


def own_folder() -> Path:
    """Return the default folder of data sets: on this node's own disk, of this user alone."""
    there = next((os.environ[name] for name in ("SLURM_TMPDIR", "TMPDIR") if os.environ.get(name)), "/tmp")  # noqa: S108
    return Path(there) / f"disttrain-stage-{os.getuid()}"


def is_default(to: str | None) -> bool:
    """Whether the user names no folder: the default one may be in a folder where all users write."""
    return to is None and not os.environ.get(STAGE_DIR)


def path_for(source: str, to: str | None, host: str) -> Path:
    """Return the path of a data set on this node, for the arguments of ``Store``.

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


def make_own(folder: Path, host: str) -> None:
    """Make a folder where others may have made one of that name.

    Raises
    ------
    StageError
        If it is another user's, or a link.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    reason = why_not_private(folder, shared_mode=0)
    if reason:
        raise StageError(f"{folder} on {host} {reason}; remove it, or name the folder with --to or ${STAGE_DIR}")


def check_own(path: Path, host: str) -> None:
    """Refuse a path that another user owns, and could change at any time; the path need not exist."""
    with suppress(FileNotFoundError):
        if path.lstat().st_uid != os.getuid():
            raise StageError(f"{path} on {host} belongs to another user; name another folder with --to")
