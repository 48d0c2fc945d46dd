"""Read files on behalf of the control thread, which must not wait for a file system.

Covers: a thread for each reading, a time limit, descriptors that a cell has closed.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from ...protocol.time_limits import COMPLETION_FILES_SECONDS
from ...rank.proc_self import has_standard_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Item = TypeVar("Item")
_reading: threading.Thread | None = None  # the last one, which may hang


def within_time(read: Callable[[], Iterable[Item]]) -> list[Item]:
    """Return what a function yields that reads files; nothing if it takes too long, or an earlier one still reads.

    Also nothing while a cell has closed one of the descriptors 0, 1 and 2: they are restored at its end, even if a file
    has got such a number.

    Raises what the function raises.
    """
    global _reading  # noqa: PLW0603  (one at a time)
    found: list[Item] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            found.extend(read())
        except Exception as error:  # noqa: BLE001  (raised by the caller's thread)
            errors.append(error)

    if not has_standard_files() or (_reading is not None and _reading.is_alive()):
        return []
    _reading = threading.Thread(target=run, name="disttrain completion", daemon=True)
    _reading.start()
    _reading.join(COMPLETION_FILES_SECONDS)
    if errors:
        raise errors[0]
    return list(found)
