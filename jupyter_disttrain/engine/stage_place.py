"""Where a data set goes on this node.

Covers: the folder that the person names, or the default one; whose it is; the source's own folder.
Does not cover: what comes there (``stage_store``).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ..errors import StageError
from .stage_source import is_address, source_name

FOLDER = "DISTTRAIN_STAGE_DIR"  # where data sets go unless the person says


def default_folder() -> Path:
    """Return where data sets go on this node: a folder on its own disk, of this user alone."""
    given = os.environ.get(FOLDER)
    if given:
        return Path(given)
    there = next((os.environ[name] for name in ("SLURM_TMPDIR", "TMPDIR") if os.environ.get(name)), "/tmp")  # noqa: S108
    return Path(there) / f"disttrain-stage-{os.getuid()}"


def path_for(source: str, to: str | None, host: str) -> Path:
    """Return where a data set goes on this node.

    Parameters
    ----------
    source, to, host
        See :class:`stage_store.Store`.

    Raises
    ------
    StageError
        If that is inside the source.
    """
    folder = default_folder() if to is None else Path(os.path.expandvars(to)).expanduser()
    path = folder.absolute() / source_name(source)
    # By name too, where this node does not see the source: it would see it from then on.
    if not is_address(source) and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(source)):
        raise StageError(
            f"{path} on {host} would be inside of {source}, which is to be copied; name another folder with --to"
        )
    return path


def is_same(source: str, path: Path) -> bool:
    """Whether a path is the source's own, and not that of a copy."""
    try:
        return not is_address(source) and path.samefile(source)
    except OSError:
        return False


def make_own(folder: Path, host: str) -> None:
    """Make a folder where others may have made one of that name.

    Raises
    ------
    StageError
        If it is another user's.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True, mode=0o700)
    told = folder.lstat()
    if told.st_uid != os.getuid() or (stat.S_ISLNK(told.st_mode) and FOLDER not in os.environ):
        raise StageError(f"{folder} on {host} belongs to another user; name another folder with --to")
