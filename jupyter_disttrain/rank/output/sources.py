"""Find the source of classes that were defined in a cell.

Covers: ``inspect.getsource`` of such a class, which ``torch.jit``, ``torch.package`` and users call.

A function has the file it was compiled from; a class has its module only, which for a cell has no file.
"""

from __future__ import annotations

import inspect
import linecache
import re
from typing import Any

from .user_code import CELL


def find_classes_in_cells() -> None:
    """Make ``inspect`` find the classes of cells, too."""
    find_file = inspect.getfile

    def getfile(object: Any) -> str:  # noqa: A002  (the name is inspect's)
        try:
            return find_file(object)
        except (OSError, TypeError):
            cell = _cell_of(object) if inspect.isclass(object) else None
            if cell is None:
                raise
            return cell

    inspect.getfile = getfile


def _cell_of(cls: type) -> str | None:
    """Return the name under which the newest cell that defines ``cls`` was compiled."""
    if cls.__module__ != "__main__":
        return None
    for member in vars(cls).values():
        code = getattr(inspect.unwrap(member) if callable(member) else member, "__code__", None)
        if code is not None and member.__qualname__.startswith(f"{cls.__qualname__}."):
            return str(code.co_filename)
    definition = re.compile(rf"^\s*class\s+{re.escape(cls.__name__)}\b", re.MULTILINE)
    for name, entry in reversed(list(linecache.cache.items())):
        if CELL in name and len(entry) > 2 and definition.search("".join(entry[2])):  # noqa: PLR2004
            return name
    return None
