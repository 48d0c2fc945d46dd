"""Start a warm process: ``python -m jupyter_disttrain.rank.warm ADDRESS``, which the first start on a node runs."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from .start import NANNY, PROGRAM
from .warm_process import WarmProcess


def main() -> None:
    """Import what ranks need and serve until nothing needs this process any more."""
    if sys.path[0] == str(Path.cwd()):  # not with PYTHONSAFEPATH, which would be a flag of all scripts
        del sys.path[0]
    try:
        process = WarmProcess(sys.argv[1])
    except OSError:
        return  # another process has the address
    gc.disable()  # imports make little garbage, and collecting it would take an eighth of their time
    # Only now: processes that wait for the address to be in use must not wait for imports.
    from ...features.scripts.in_own_process import run_program  # noqa: PLC0415
    from ..nanny.fork_rank import import_before_fork, run_nanny  # noqa: PLC0415

    import_before_fork()
    process.load()
    gc.enable()
    process.preload()
    # Until here its messages have gone to the process that started it, whose launcher waits for the end of its output.
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):
        os.dup2(nothing, number)
    os.close(nothing)
    process.serve({NANNY: run_nanny, PROGRAM: run_program})


if __name__ == "__main__":
    main()
