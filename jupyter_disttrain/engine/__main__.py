"""Start one rank: ``python -m jupyter_disttrain.engine``, as a launcher calls it once per rank.

This process becomes the nanny and its child the rank. What both need is imported before the fork, so that its memory is
shared; torch and MPI are imported after it, by the rank alone.
"""

from __future__ import annotations

import gc
import os
import sys


def _leave_out_debugger() -> None:
    """Import ipykernel without debugpy, which no front end can reach on a rank: 8 MB and 0.1 s of every rank."""
    sys.modules["debugpy"] = None  # type: ignore[assignment]  # what makes an import fail
    import ipykernel.debugger  # noqa: F401, PLC0415

    del sys.modules["debugpy"]  # a cell may import it


def main() -> None:
    """Fork; the parent looks after the child."""
    _leave_out_debugger()
    from .app import run_rank  # noqa: PLC0415  (imported before the fork, and not by a mere import of this module)
    from .connection import CONNECTION_FILE, Connection  # noqa: PLC0415
    from .family import die_with_parent  # noqa: PLC0415
    from .nanny import Nanny  # noqa: PLC0415
    from .wire import Wire  # noqa: PLC0415

    os.environ.pop("PYTHONSAFEPATH", None)  # it was for this process; what the user starts is the user's
    wire = Wire.make()
    gc.freeze()
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        # Linux shares the cores among sessions first (sched_autogroup). Ranks that were all in mpiexec's would often
        # share one core: a training loop took 20 % longer on two cores.
        os.setsid()
        wire.become_rank()
        run_rank(wire)
        return
    wire.become_nanny()
    Nanny(pid, wire, lambda: Connection.wait(os.environ[CONNECTION_FILE])).run()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
