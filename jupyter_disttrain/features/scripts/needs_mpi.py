"""Find out whether a script uses MPI, from its source and that of the modules beside it.

Covers: imports of mpi4py and Horovod, wherever they are in the files.
Does not cover: scripts that only other hosts have; imports by name at run time: ``--mpi`` is for these.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ...source_imports import imported

if TYPE_CHECKING:
    from collections.abc import Iterator

MPI_MODULES = ("mpi4py", "horovod")


def needs_mpi(target: str, folder: str, *, is_module: bool) -> bool:
    """Whether a script, or a module, of the notebook's folder imports mpi4py or Horovod, or a module that does."""
    if is_module:
        base = Path(folder)
        begin = [*_files_of(base, target), (base.joinpath(*target.split("."), "__main__.py"), target)]
    else:
        path = Path(folder, target)
        path = path / "__main__.py" if os.path.isdir(path) else path  # noqa: PTH112  (any name: also one that is too long)
        base, begin = path.parent, [(path, "")]
    waiting, seen = begin, {file for file, _ in begin}
    while waiting:
        file, name = waiting.pop()
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        try:
            names = imported(file.read_bytes(), package)
        except OSError:  # the ranks report a script that is not there
            continue
        for each in names:
            if each.partition(".")[0] in MPI_MODULES:
                return True
            local = [(path, name) for path, name in _files_of(base, each) if path not in seen]
            seen.update(path for path, _ in local)
            waiting.extend(local)
    return False


def _files_of(base: Path, name: str) -> Iterator[tuple[Path, str]]:
    """Yield the files below a folder that an import of a module runs, each with its module's name."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        place = base.joinpath(*parts[:count])
        candidates = (place.with_name(f"{place.name}.py"), place / "__init__.py") if parts[count - 1] else ()
        found = next((file for file in candidates if os.path.isfile(file)), None)  # noqa: PTH113  (any name, as above)
        if found is not None:
            yield found, ".".join(parts[:count])
