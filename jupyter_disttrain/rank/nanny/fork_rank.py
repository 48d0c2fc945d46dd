"""Make a process a nanny and fork its rank.

Covers: what is imported before the forks, each side's part of their connection.
Does not cover: which process forks the nanny (``rank.cold_nannies``, ``rank.warm``).
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

from ...errors import LaunchError
from ..startup.host_dir import HostFolder
from ..startup.startup_args import write_trouble
from .ipc import Wire
from .nanny import Nanny
from .process_tree import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Mapping


def import_before_fork() -> None:
    """Import what is not loaded with this module, so that nannies and ranks share its memory."""
    # Import ipykernel without debugpy, which no front end can reach on a rank; saves 8 MB and 0.1 s per rank.
    sys.modules["debugpy"] = None  # type: ignore[assignment]  # makes the import fail
    import ipykernel.debugger  # noqa: F401, PLC0415

    del sys.modules["debugpy"]  # a cell may import it
    from IPython.core.ultratb import AutoFormattedTB  # noqa: PLC0415

    from ..startup import app  # noqa: F401, PLC0415  (it imports ipykernel)

    try:  # what IPython needs to format a traceback; otherwise each rank's first error costs 40 ms of a core
        raise RuntimeError  # noqa: TRY301
    except RuntimeError:
        AutoFormattedTB(mode="Context").structured_traceback(*sys.exc_info())


def run_nanny(named: Mapping[str, int]) -> NoReturn:
    """Become a nanny, fork its rank, and exit when the rank has ended.

    ``named`` may have ``"lifeline"``, a descriptor that shows the end of the process which a launcher started for this
    nanny alone. No exit function of what was imported before the fork is called.
    """
    code = 1
    try:
        _become_nanny(named.get("lifeline"))
        code = 0
    except SystemExit:
        pass  # the trouble was written
    except BaseException:  # noqa: BLE001  (nothing may get back into the code that has forked this process)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become_nanny(lifeline: int | None) -> None:
    """Become a nanny, and fork its rank; returns when the rank has ended.

    ``lifeline`` is that of :func:`run_nanny`.
    """
    os.environ.pop("PYTHONSAFEPATH", None)  # meant for this process only, not for programs that the user starts
    try:
        folder = HostFolder()
    except LaunchError as error:
        write_trouble(str(error))
        raise SystemExit(1) from error
    from ..startup.app import run_rank  # noqa: PLC0415  (imported before the fork)

    wire = Wire()
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        # Linux divides CPU time between sessions first (sched_autogroup). Ranks in mpiexec's session would often share
        # one core: a training loop took 20 % longer on two cores.
        os.setsid()
        wire.become_rank()
        folder.forget()
        if lifeline is not None:
            os.close(lifeline)
        run_rank(wire)
        return
    wire.become_nanny()
    try:
        Nanny(pid, wire, folder.leave, lifeline).run()
    except ConnectionError as error:
        write_trouble(str(error))
    finally:
        folder.leave()
    sys.stdout.flush()
