"""Start ranks: ``python -m jupyter_disttrain.rank``, which a launcher runs once per rank or once per host.

Covers: the forks that make the nannies and the ranks, the process that waits for the nannies.
Does not cover: reading the arguments (``rank.startup.startup_args``), the rank itself (``rank.startup.app``), the nanny
itself (``rank.nanny.nanny``), the warm process (``rank.warm``).

This process stays small. It has the node's warm process, which has imported torch, fork one nanny per rank; where that
is not possible it forks them itself, and each rank imports torch. A nanny forks its rank. Then this process waits for
its nannies and passes signals on to them, because the launcher takes it for the rank, or with ``--ranks N`` for all
ranks of this host. With ``--join FILE`` the processes of any job become ranks that a notebook joins. See
``rank.startup.startup_args`` for the other arguments.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import LaunchError
from ..process_table import end_as
from ..protocol.environment import COLD_REASON, LOCAL_DIR, NO_WARM
from ..protocol.shared_memory import NANNIES
from ..protocol.time_limits import HOST_PARENT_END_SECONDS

if TYPE_CHECKING:
    from .cold_nannies import OwnNannies
    from .warm.start import Forks


def main() -> None:
    """Start the nannies, which fork their ranks, and wait for them."""
    from .startup.startup_args import enter, read_arguments  # noqa: PLC0415  (no import before it may read the environment)

    setup = read_arguments(sys.argv[1:])
    guard = None
    if setup.join:
        from ..features.batch_jobs.join import join  # noqa: PLC0415

        guard = join(setup)
    enter(setup)
    nannies = _start_nannies(setup.ranks)
    if guard is None:
        _stay_with(nannies)
    else:
        guard.stay(nannies)


def _start_nannies(count: int) -> OwnNannies | Forks:
    """Have the warm process of this node fork nannies; fork them here if it can't."""
    if not os.environ.get(NO_WARM):
        from .warm.start import fork_nannies  # noqa: PLC0415  (not when this module is only imported)

        try:
            return fork_nannies(count)
        except LaunchError as error:
            os.environ[COLD_REASON] = str(error)
    from .cold_nannies import OwnNannies  # noqa: PLC0415
    from .nanny.fork_rank import import_before_fork, run_nanny  # noqa: PLC0415
    from .process_group.object_replacement import freeze  # noqa: PLC0415

    import_before_fork()
    freeze()
    return OwnNannies(count, run_nanny)


def _stay_with(nannies: OwnNannies | Forks) -> None:
    """Wait for all nannies: the launcher takes this process's exit as the end of the host's ranks.

    SIGHUP is ignored, because ranks end with their cluster and not with an ssh client. On SIGTERM, send SIGTERM to the
    nannies, which end their ranks, and kill the remaining nannies before this process would be killed itself.
    """
    is_ending = False

    def pass_on(number: int, _frame: Any) -> None:
        nonlocal is_ending
        is_ending = True
        nannies.signal(signal.SIGKILL if number == signal.SIGALRM else signal.SIGTERM)
        signal.alarm(HOST_PARENT_END_SECONDS)

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGALRM, pass_on)
    is_single = len(nannies.pids) == 1
    status = 0
    while nannies.pids:
        pid, status = nannies.wait()
        if os.WIFSIGNALED(status) and not is_ending:
            _report_killed(pid, os.WTERMSIG(status))
    local = Path(os.environ[LOCAL_DIR])  # has a file of nannies only on a host other than the notebook's
    if os.path.exists(local / NANNIES):  # noqa: PTH110  (pathlib raises where a folder can't be entered)
        from ..rank_sessions import remove_unheld  # noqa: PLC0415  (its imports would delay the start)

        remove_unheld(local, NANNIES)  # if they were killed
    if is_single:
        end_as(status)  # for the launcher


def _report_killed(nanny: int, number: int) -> None:
    """Report that a nanny was killed: a client whose ranks still start has no other way to know."""
    from ..protocol.rank_death import signal_text  # noqa: PLC0415
    from .startup.startup_args import write_trouble  # noqa: PLC0415

    with suppress(OSError):  # the cluster has ended, and its folder with it
        host = socket.gethostname()
        write_trouble(f"a rank's parent process (process {nanny}) on {host} was killed by {signal_text(number)}")


if __name__ == "__main__":
    main()
