"""Run a script in the namespace of this rank's cells, as ``%run -i`` does: ``%dist_run --in-session``.

Covers: running its code with the rank's variables, its arguments and folder, its exit.
Does not cover: scripts in processes of their own (``runner``), which is what ``%dist_run`` does otherwise.

The script may change whatever a cell may: nothing is put back but ``sys.argv``, ``sys.path`` and the working directory.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...rank import user_code
from .errors import ScriptError, ScriptExit
from .find_code import find_code

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def run_in_session(
    target: str, arguments: Sequence[str], variables: dict[str, Any], *, is_module: bool, folder: str
) -> None:
    """Run a script, or a module, with the variables of cells; those that it sets are set for cells, too.

    Raises
    ------
    ScriptError
        If there is no such script or folder, or the script exits with a code other than 0.
    """
    with _as_program(folder):
        found = find_code(target, is_module=is_module)
        sys.argv = [found.first, *arguments]
        sys.path = [found.folder, *(path for path in sys.path if path)]
        user_code.begin_script(found.code.co_filename)
        before = {name: variables[name] for name in found.names() if name in variables}
        variables.update(found.names())
        try:
            exec(found.code, variables)  # noqa: S102  (it is what this is for)
        except SystemExit as end:
            if end.code not in (None, 0):
                how = f"exited with code {end.code}" if isinstance(end.code, int) else f"exited: {end.code}"
                raise ScriptExit(f"{Path(found.code.co_filename).name} {how}") from end
        finally:
            for name in found.names():
                variables.pop(name, None)
            variables.update(before)


@contextmanager
def _as_program(folder: str) -> Iterator[None]:
    argv, path, before = sys.argv, sys.path, os.open(".", os.O_PATH | os.O_DIRECTORY)
    try:
        try:
            os.chdir(folder)
        except OSError as error:
            raise ScriptError(
                f"the notebook's folder {folder} can't be entered on this host: {error.strerror}"
            ) from None
        yield
    finally:
        sys.argv, sys.path = argv, path
        os.fchdir(before)
        os.close(before)
