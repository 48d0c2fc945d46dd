"""Start ranks: ``python -m jupyter_disttrain.rank``, which a launcher runs once per rank or once per host.

Covers: the forks that make the nanny and the rank, the process that waits for all nannies of a host.
Does not cover: reading the arguments (``rank.startup.startup_args``), the rank itself (``rank.startup.app``), the nanny
itself (``rank.nanny.nanny``).

This process becomes the nanny; its child is the rank. Modules that both need are imported before the fork, so that they
share the memory. Only the rank imports torch and MPI, after the fork. With ``--ranks N`` this process forks N nannies
and waits until they have exited. With ``--join FILE`` the processes of any job become ranks that a notebook joins. See
``rank.startup.startup_args`` for the other arguments.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

from ..protocol.environment import LOCAL_DIR
from ..protocol.shared_memory import NANNIES
from ..protocol.time_limits import HOST_PARENT_END_SECONDS
from ..rank_sessions import remove_unheld


def _leave_out_debugger() -> None:
    """Import ipykernel without debugpy, which no front end can reach on a rank; saves 8 MB and 0.1 s per rank."""
    sys.modules["debugpy"] = None  # type: ignore[assignment]  # makes the import fail
    import ipykernel.debugger  # noqa: F401, PLC0415

    del sys.modules["debugpy"]  # a cell may import it


def _import_error_formatting() -> None:
    """Import what IPython needs to format a traceback; otherwise each rank's first error costs 40 ms of a core."""
    from IPython.core.ultratb import AutoFormattedTB  # noqa: PLC0415

    try:
        raise RuntimeError  # noqa: TRY301
    except RuntimeError:
        AutoFormattedTB(mode="Context").structured_traceback(*sys.exc_info())


def main() -> None:
    """Fork the rank; its parent becomes the nanny."""
    from .startup.startup_args import enter, read_arguments  # noqa: PLC0415  (no import before it may read the environment)

    setup = read_arguments(sys.argv[1:])
    guard = None
    if setup.join is not None:
        from ..features.batch_jobs.join import join  # noqa: PLC0415

        guard = join(setup)
    enter(setup)
    _leave_out_debugger()
    from .nanny import nanny  # noqa: F401, PLC0415  (before the fork, but not when this module is only imported)
    from .startup import app  # noqa: F401, PLC0415  (before the fork, but not when this module is only imported)

    if setup.ranks > 1:
        _import_error_formatting()
    gc.freeze()
    if guard is not None:
        guard.stay(_fork_nanny())
    elif setup.ranks > 1:
        _stay_with([_fork_nanny() for _ in range(setup.ranks)])
    else:
        _become_nanny()


def _fork_nanny() -> int:
    pid = os.fork()
    if pid == 0:
        _become_nanny()
        os._exit(0)
    return pid


def _stay_with(nannies: list[int]) -> None:
    """Wait for all nannies: the launcher takes this process's exit as the end of the host's ranks.

    SIGHUP is ignored, because ranks end with their cluster and not with an ssh client. On SIGTERM, send SIGTERM to the
    nannies, which end their ranks, and kill the remaining nannies before this process would be killed itself.
    """

    def pass_on(number: int, _frame: Any) -> None:
        for pid in nannies:
            os.kill(pid, signal.SIGKILL if number == signal.SIGALRM else signal.SIGTERM)
        signal.alarm(HOST_PARENT_END_SECONDS)

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGALRM, pass_on)
    while nannies:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None  # waitid blocks without WNOHANG
        if ended.si_pid in nannies:  # there may be other children, from a shell that exec'ed this process
            nannies.remove(ended.si_pid)  # before the pid can be reused: pass_on must not signal another process
        os.waitpid(ended.si_pid, 0)
    remove_unheld(Path(os.environ[LOCAL_DIR]), NANNIES)  # if they were killed; only on a host other than the notebook's


def _become_nanny() -> None:
    from ..errors import LaunchError  # noqa: PLC0415
    from ..protocol.environment import CONNECTION_FILE  # noqa: PLC0415
    from .nanny.ipc import Wire  # noqa: PLC0415
    from .nanny.nanny import Nanny  # noqa: PLC0415
    from .nanny.process_tree import die_with_parent  # noqa: PLC0415
    from .startup.app import run_rank  # noqa: PLC0415
    from .startup.connection import Connection  # noqa: PLC0415
    from .startup.host_dir import HostFolder  # noqa: PLC0415
    from .startup.startup_args import write_trouble  # noqa: PLC0415

    os.environ.pop("PYTHONSAFEPATH", None)  # meant for this process only, not for programs that the user starts
    try:
        folder = HostFolder()
    except LaunchError as error:
        write_trouble(str(error))
        raise SystemExit(1) from error
    wire = Wire()
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        # Linux divides CPU time between sessions first (sched_autogroup). Ranks in mpiexec's session would often share
        # one core: a training loop took 20 % longer on two cores.
        os.setsid()
        wire.become_rank()
        folder.forget()
        run_rank(wire)
        return
    wire.become_nanny()

    def connect() -> Connection:
        connection = Connection.wait(os.environ[CONNECTION_FILE])
        connection.check_ports()
        return connection

    try:
        Nanny(pid, wire, connect, folder.leave).run()
    except ConnectionError as error:
        write_trouble(str(error))
    finally:
        folder.leave()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
