"""Start ranks: ``python -m jupyter_disttrain.engine``, as a launcher calls it once per rank, or once per host.

This process becomes the nanny and its child the rank. What both need is imported before the fork, so that its memory is
shared; torch and MPI are imported after it, by the rank alone. With ``--ranks N`` this process forks N nannies first
and stays until they have ended. With ``--join FILE`` the processes of any job become ranks that a notebook joins; see
``setup`` for the other arguments.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import Any

END_SECONDS = 4  # for nannies to end, who give their ranks 3 s; ipyparallel kills this process after 5


def _leave_out_debugger() -> None:
    """Import ipykernel without debugpy, which no front end can reach on a rank: 8 MB and 0.1 s of every rank."""
    sys.modules["debugpy"] = None  # type: ignore[assignment]  # what makes an import fail
    import ipykernel.debugger  # noqa: F401, PLC0415

    del sys.modules["debugpy"]  # a cell may import it


def _word_an_error() -> None:
    """Have IPython import what it needs to word an error: else each rank would at its first, 40 ms of a core."""
    from IPython.core.ultratb import AutoFormattedTB  # noqa: PLC0415

    try:
        raise RuntimeError  # noqa: TRY301
    except RuntimeError:
        AutoFormattedTB(mode="Context").structured_traceback(*sys.exc_info())


def main() -> None:
    """Fork; the parent looks after the child."""
    from .setup import enter, read_arguments  # noqa: PLC0415  (nothing may be imported that reads the environment)

    setup = read_arguments(sys.argv[1:])
    keeper = None
    if setup.join is not None:
        from .join import join  # noqa: PLC0415

        keeper = join(setup)
    enter(setup)
    _leave_out_debugger()
    from . import app, nanny  # noqa: F401, PLC0415  (imported before the fork, and not by a mere import of this module)

    if setup.ranks > 1:
        _word_an_error()
    gc.freeze()
    if keeper is not None:
        keeper.stay(_fork_nanny())
        return
    if setup.ranks > 1:
        nannies = [pid for pid in (_fork_nanny() for _ in range(setup.ranks)) if pid]
        _stay_with(nannies)
        return
    _become_nanny()


def _fork_nanny() -> int:
    pid = os.fork()
    if pid == 0:
        _become_nanny()
        os._exit(0)
    return pid


def _stay_with(nannies: list[int]) -> None:
    """Wait for all nannies: who started this process sees by it whether ranks run here.

    It outlives its connection to who started it, because ranks end with their cluster and not with an ssh client.
    Asked to end it has the nannies end their ranks, and kills those that don't before it would be killed itself.
    """

    def pass_on(number: int, _frame: Any) -> None:
        for pid in nannies:
            os.kill(pid, signal.SIGKILL if number == signal.SIGALRM else signal.SIGTERM)
        signal.alarm(END_SECONDS)

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGALRM, pass_on)
    while nannies:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None  # without WNOHANG it waits
        if ended.si_pid in nannies:  # a shell that became this process may have left us others
            nannies.remove(ended.si_pid)  # before its number is free: a signal must not hit who gets that next
        os.waitpid(ended.si_pid, 0)


def _become_nanny() -> None:
    from ..errors import LaunchError  # noqa: PLC0415
    from .app import run_rank  # noqa: PLC0415
    from .connection import CONNECTION_FILE, Connection  # noqa: PLC0415
    from .family import die_with_parent  # noqa: PLC0415
    from .host_folder import HostFolder  # noqa: PLC0415
    from .nanny import Nanny  # noqa: PLC0415
    from .setup import leave_word  # noqa: PLC0415
    from .wire import Wire  # noqa: PLC0415

    os.environ.pop("PYTHONSAFEPATH", None)  # it was for this process; what the user starts is the user's
    try:
        folder = HostFolder()
    except LaunchError as error:
        leave_word(str(error))
        raise SystemExit(1) from error
    wire = Wire.make()
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        # Linux shares the cores among sessions first (sched_autogroup). Ranks that were all in mpiexec's would often
        # share one core: a training loop took 20 % longer on two cores.
        os.setsid()
        wire = wire.become_rank()
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
        leave_word(str(error))
    finally:
        folder.leave()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
