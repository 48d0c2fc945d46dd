"""Restore the streams that a cell has closed or redirected, so that the next cell's output is shown.

Covers: file descriptors 0, 1 and 2, ``sys.stdout``, ``sys.stderr``.
Does not cover: writing to them (``streams``).
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from ..nanny.ipc import restore_input
from ..proc_self import file_of, own_files

if TYPE_CHECKING:
    from ..nanny.ipc import Wire


class Descriptors:
    """File descriptors 0, 1 and 2, which a cell may close or redirect."""

    def __init__(self, wire: Wire) -> None:
        self._own = {1: wire.stdout_write, 2: wire.stderr_write}
        self._files = {number: file_of(number) for number in (0, *self._own)}

    def restore(self) -> str:
        """Restore the rank's own descriptors; returns a message that names those that were changed."""
        with own_files:
            changed = [number for number, file in self._files.items() if file_of(number) != file]
            for number in changed:
                if number == 0:
                    restore_input()
                else:
                    os.dup2(self._own[number], number)
        if not changed:
            return ""
        which = " and ".join(map(str, changed))
        verb = "descriptor was" if len(changed) == 1 else "descriptors were"
        return f"file {verb} closed or redirected by this cell, and restored for the next one: {which}"


def restore_streams() -> None:
    """Restore the rank's own streams where a cell left something that IPython can't write to."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not all(callable(getattr(stream, method, None)) for method in ("write", "flush")):
            own = getattr(sys, f"__{name}__")
            setattr(sys, name, own)
            own.write(
                f"sys.{name} was {stream!r:.60} after this cell, which has no write() and flush(); it was restored\n"
            )
