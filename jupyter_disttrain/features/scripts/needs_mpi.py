"""Find out whether a script uses MPI, from its source and that of the modules beside it.

Covers: imports of mpi4py and Horovod, wherever they are in the files.
Does not cover: scripts that only other hosts have; imports by name at run time: ``--mpi`` is for these.
"""

from __future__ import annotations

import os
from pathlib import Path

from ...source_imports import imported

MPI_MODULES = ("mpi4py", "horovod")


def needs_mpi(target: str, folder: str, *, is_module: bool) -> bool:
    """Whether a script, or a module, of the notebook's folder imports mpi4py or Horovod, or a module that does."""
    if is_module:
        base = Path(folder)
        found = _file_of(base, target)
        begin = [(file, target) for file in (found, base.joinpath(*target.split("."), "__main__.py")) if file]
    else:
        path = Path(folder, target)
        path = path / "__main__.py" if os.path.isdir(path) else path  # noqa: PTH112  (any name: also one that is too long)
        base, begin = path.parent, [(path, "")]
    waiting, seen = begin, {file for file, _ in begin}
    while waiting:
        file, name = waiting.pop()
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        for each in _imports(file, package):
            if each.partition(".")[0] in MPI_MODULES:
                return True
            local = _file_of(base, each)
            if local is not None and local not in seen:
                seen.add(local)
                waiting.append((local, each))
    return False


def _imports(file: Path, package: str) -> set[str]:
    try:
        return imported(file.read_bytes(), package)
    except OSError:  # the ranks report a script that is not there
        return set()


def _file_of(base: Path, name: str) -> Path | None:
    """Return the file of a module below a folder; None if it has none there."""
    place = base.joinpath(*name.split("."))
    candidates = (place.with_name(f"{place.name}.py"), place / "__init__.py") if name else ()
    return next((file for file in candidates if file.is_file()), None)
