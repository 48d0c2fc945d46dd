"""Keep the rank's MPI world and recover it after a failure.

Covers: ending calls that wait in MPI, the world without failed ranks, a new process that joins it, the object that
replaces ``comm`` if recovery fails.
Does not cover: when to recover (``client.recovery.state_machine``), the call that a thread is in (``current_call``).

The procedure is that of User-Level Failure Mitigation (W. Bland et al., 2013): Revoke ends every call, Shrink keeps the
living ranks, Spawn starts a process, Merge and Split put all in the order of their ranks. A process that waits in MPI
occupies a core, so the new process merges before it imports torch, and Split waits until all ranks are ready. No other
recovery depends on this one: if it fails, the process group is formed all the same, and using ``comm`` raises an error
with the reason.
"""

from __future__ import annotations

import gc
import inspect
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ...protocol.environment import LAUNCH_RANK, MPI_HEALS
from ...protocol.time_limits import HELP_PAUSE_SECONDS, HELP_SECONDS, MPI_WORLD_LIMIT_SECONDS, RECEIVE_SECONDS
from ..process_group.errors import RendezvousError
from ..process_group.object_replacement import hidden_references
from .comms import (
    comm_within,
    hidden,
    is_received,
    keep_mpi_running,
    pointers_of_comm,
    receive_all,
    usable_comms,
)
from .current_call import mpi_call

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...protocol.ranks import RankInfo
    from ..cell_started import CellStarted
    from .current_call import MpiCall

_UNFINISHED: list[Any] = []  # requests with their receive buffers, to which MPI may still write; kept alive here


class LostWorld:
    """Stands in for ``comm`` once MPI has no world of all ranks; using it raises an error with the reason."""

    def __init__(self, why: str) -> None:
        self._reason = f"MPI has no world of all ranks: {why}; use dist"
        if not os.environ.get(LAUNCH_RANK):  # %dist_reset can't restart the ranks of a batch job
            self._reason += ", or restart all ranks with %dist_reset"

    def __getattr__(self, name: str) -> NoReturn:
        """Raise the error."""
        raise RendezvousError(self._reason)

    def __repr__(self) -> str:
        """Show the reason."""
        return f"<{self._reason}>"


class MpiWorld:
    """MPI on this rank; without MPI its methods have no effect."""

    def __init__(self) -> None:
        self._mpi = sys.modules.get("mpi4py.MPI")
        self.comm: Any = None
        self._held_in_c = 0  # number of references to ``shown`` that mpi4py's C code holds, e.g. in its table of names
        if self._mpi is not None:
            gc.collect()  # from its first collection on, the collector does not show mpi4py's table of names
            (self._held_in_c,) = hidden_references([self._mpi.COMM_WORLD])
            self.comm = self._mpi.COMM_WORLD
            keep_mpi_running(self._mpi)
        self.shown: Any = self.comm  # what cells have as ``comm``
        self._merged = join_starters()  # communicator of the living ranks and those started since, in no order
        self._heals = bool(os.environ.get(MPI_HEALS)) and self.comm is not None
        self._rank = 0
        self._folder = str(Path.cwd())  # of new processes too: cells may change to another
        self._respawning: threading.Thread | None = None
        self.failure = ""  # why there is no world of all ranks; never cleared
        self._lost: LostWorld | None = None  # replaces ``comm`` after a failure
        self._proved: Any = None  # the world in which an allreduce has counted all ranks
        self._is_revoked = False  # the world was revoked and not replaced yet
        self._generation = 0  # of the process group, as of the last call of settle
        self._runs_cell = False
        self._helping: threading.Thread | None = None  # makes MPI calls for other ranks that are being released
        self._turns = threading.Lock()  # between the control thread, which releases, and the main thread

    def enter(self, info: RankInfo) -> None:
        """Take the rank's identity in the world that mpiexec started, or in the next one that is made.

        Raises ``RendezvousError`` if MPI's rank or size differs from the client's, as ``comm`` would disagree with
        ``dist``.
        """
        self._rank = info.rank
        if self._mpi is None:
            return
        if self._merged is not None:
            # MPI's own COMM_WORLD has this process alone; a sum over it would be silently wrong.
            self.comm, self.shown = None, LostWorld("it is rebuilt with the next process group")
            self._held_in_c = 0
            vars(self._mpi)["COMM_WORLD"] = self.shown
        elif (self.comm.Get_rank(), self.comm.Get_size()) != (info.rank, info.world_size):
            raise RendezvousError(
                f"MPI reports rank {self.comm.Get_rank()} of {self.comm.Get_size()}, "
                f"the notebook assigned rank {info.rank} of {info.world_size}; "
                "mpi4py was built for another MPI than the mpiexec that started the ranks "
                "(run: jupyter disttrain doctor)"
            )

    # While a cell runs, on the control thread

    def allow_release(self, _cell: CellStarted) -> None:
        """Mark that a cell runs, so that a release may have calls to end."""
        self._runs_cell = True

    def end_cell(self) -> bool:
        """Mark that the cell has ended, after which nothing revokes the world; return whether it was revoked."""
        with self._turns:
            self._runs_cell = False
            return self._is_revoked

    def release(self, generation: int, *, forced: bool, others: str) -> None:
        """End the MPI call that the main thread is in, on all ranks that are in it.

        A rank that is in no MPI call takes part too: a send that no rank receives ends only once its receiver refuses
        it, which MPI does during the receiver's own calls. A release that arrives after a later ``generation`` was
        formed has no effect. ``forced`` ends the calls in all communicators even if the main thread's call was not
        found. ``others`` is the kind of call that a rank waits in, see ``MpiCall``, or empty. A rank that waits in
        partitioned communication would crash.
        """
        with self._turns:
            if not self._heals or self.failure or generation < self._generation or self.comm is None:
                return
            call = _call_of_main_thread() if self._runs_cell else None
            kinds = {others, "" if call is None else call.kind}
            if "partitioned" in kinds:
                return
            is_late = "many" in kinds
            if self._is_respawning or not is_late:
                self._revoke(forced=forced)
            is_helping = self._helping is not None and self._helping.is_alive()
            if (forced or is_late or others) and not self._is_respawning and not is_helping:
                args = generation, forced, is_late
                self._helping = threading.Thread(target=self._help_others, args=args, name="mpi release", daemon=True)
                self._helping.start()

    @property
    def _is_respawning(self) -> bool:
        """Whether a new process is being started or has not joined the world yet."""
        return self._merged is not None or (self._respawning is not None and self._respawning.is_alive())

    def _revoke(self, *, forced: bool) -> None:
        call = _call_of_main_thread()
        if not self._runs_cell or (call is None and not forced):
            return
        mpi: Any = self._mpi
        owner = None if call is None else call.owner
        if isinstance(owner, type) and issubclass(owner, (mpi.Win, mpi.File)):
            return  # the call makes a window or file; Open MPI may crash if that is interrupted
        comm = self.comm if call is None else owner
        if isinstance(owner, (mpi.Request, mpi.File)):
            comm = comm_within(mpi, owner)
        if comm == mpi.COMM_SELF:
            return  # no other rank is in it, and nothing could take its place once it is revoked
        comms: Any = [comm, *hidden(mpi, comm)] if isinstance(comm, mpi.Comm) else []
        if all(each.Is_revoked() for each in comms):
            self._wake_who_waits()
            if self._is_respawning:
                comms = [self.comm]  # other communicators are being made
            elif forced or not comms or isinstance(owner, mpi.File):  # a file has further ones that are not found
                comms = usable_comms(mpi)  # lazily: the main thread may free some once it is released
        for each in comms:
            self._is_revoked = self._is_revoked or each == self.comm
            each.Revoke()

    def _help_others(self, generation: int, forced: bool, is_late: bool) -> None:
        """Call MPI for a while so that it makes progress for other ranks; this rank may be in no MPI call itself.

        With ``is_late``, receive messages first and revoke only then. Open MPI aborts the whole job when a wait for
        several requests fails while one of them is a send that its receiver has not refused yet ("Send error after
        request freed"). Messages in a revoked communicator are lost in any case.
        """
        mpi: Any = self._mpi
        begun = time.monotonic()
        taken: list[Any] = []  # requests of messages being received, with their buffers
        try:
            while (passed := time.monotonic() - begun) < HELP_SECONDS and not mpi.Is_finalized():
                with self._turns:
                    if generation < self._generation or self._is_respawning:
                        return  # all ranks are in a new world or are making one
                    mpi.COMM_SELF.Iprobe()  # any MPI call makes progress
                    if is_late:
                        taken += receive_all(mpi)
                    if is_late and passed > RECEIVE_SECONDS:
                        is_late = False
                        self._revoke(forced=forced)
                time.sleep(HELP_PAUSE_SECONDS)
        finally:
            _UNFINISHED.extend(each for each in taken if mpi.Is_finalized() or not is_received(mpi, each[0]))

    def _wake_who_waits(self) -> None:
        """Have Open MPI check again what its calls wait for.

        A call first checks that its communicator is not revoked and then starts to wait. It misses a Revoke that comes
        in between, and revoking again has no effect (``ompi_comm_revoke_local``). Revoking any other communicator wakes
        all waiting calls of this process.
        """
        alone = self._mpi.COMM_SELF.Dup()  # type: ignore[union-attr]
        alone.Revoke()
        alone.Free()

    def respawn(self, command: Sequence[str], host: str) -> None:
        """Start, together with all living ranks, a process that replaces a dead rank; return at once.

        ``host`` is the new process's host as mpiexec names it; empty on one machine.
        """
        args = command, host, self._respawning
        self._respawning = threading.Thread(target=self._respawn, args=args, name="respawn", daemon=True)
        self._respawning.start()

    def _respawn(self, command: Sequence[str], host: str, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        if self.failure:
            return
        mpi: Any = self._mpi
        try:
            base = self.comm if self._merged is None else self._merged
            base.Revoke()
            # Open MPI considers all slots of the host in use.
            on_host = {"host": host, "map_by": "slot:oversubscribe"} if host else {}
            info = mpi.Info.Create({"wdir": self._folder, **on_host})
            _leave_deleted_folder(self._folder)
            self._merged = base.Shrink().Spawn(command[0], list(command[1:]), 1, info, root=0).Merge(high=False)
        except mpi.Exception as error:
            self.failure = f"{error}"

    # When no cell runs

    def settle(self, generation: int, lost: str, *, revoked: bool) -> str:
        """Make a world of all ranks again if possible; return why it is not, empty if it is.

        ``generation`` is that of the process group that is formed next, ``lost`` the client's reason why there can be
        no world of all ranks. ``revoked`` states whether any rank has revoked the world.
        """
        with self._turns:
            self._generation = generation
        if self.comm is None and self._merged is None and not lost:
            return ""
        self.failure = lost or self.failure
        if not self.failure:
            try:
                if self._respawning is not None:
                    self._respawning.join(MPI_WORLD_LIMIT_SECONDS)
                    if self._respawning.is_alive():
                        raise RendezvousError("a new process did not join it in time")  # noqa: TRY301
                if revoked or self._merged is not None:
                    self.comm = within(MPI_WORLD_LIMIT_SECONDS, self._remake)
                    self._is_revoked = False
                if self.comm is not self._proved:
                    within(MPI_WORLD_LIMIT_SECONDS, self._prove)
            except (RendezvousError, self._mpi.Exception) as error:  # type: ignore[union-attr]
                self.failure = str(error)
        self._merged = None
        if self.failure:
            self._is_revoked = False  # it won't be made again
        return self.failure

    def _remake(self) -> Any:
        return self.comm.Shrink() if self._merged is None else self._merged.Split(0, self._rank)

    def _prove(self) -> None:
        """Verify that the world has all ranks.

        This also has mpi4py duplicate the communicator, which it does in its first reduction. mpi4py keeps other
        threads from running meanwhile, so a rank that waited there in a cell could not be released.
        """
        if self.comm.allreduce(1) != self.comm.Get_size():
            raise RendezvousError("its first allreduce did not count all ranks")
        if self._heals:
            pointers_of_comm(self._mpi)
        self._proved = self.comm

    def take_new(self) -> tuple[Any, Any, int] | None:
        """Return what cells had as ``comm``, what replaces it, and how many references to the former stay in C.

        None if it is unchanged. The first is None on a rank that was started outside the MPI job.
        """
        if self.failure and self._lost is None:
            self._lost = LostWorld(self.failure)
        new = self.comm if self._lost is None else self._lost
        if new is self.shown:
            return None
        before, self.shown = self.shown, new
        held, self._held_in_c = self._held_in_c, 0
        return before, new, held


@cache
def join_starters() -> Any:
    """Return the communicator of this process and the living ranks that spawned it; None if it was not spawned.

    Those ranks wait for this call, so make it before anything slow. Raises ``RendezvousError`` if the merge does not
    finish in time.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None:
        return None
    parent = mpi.Comm.Get_parent()
    return None if parent == mpi.COMM_NULL else within(MPI_WORLD_LIMIT_SECONDS, lambda: parent.Merge(high=True))


def finalize(limit_s: float) -> None:
    """Finalize MPI, on the thread that initialized it; kill this process if that takes longer than ``limit_s``."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    limit = threading.Timer(limit_s, os.kill, (os.getpid(), signal.SIGKILL))
    limit.daemon = True
    limit.start()
    inspect.unwrap(mpi.Finalize)()
    limit.cancel()


def within(limit_s: float, call: Callable[[], Any]) -> Any:
    """Return the result of a call that may block forever.

    Raises ``RendezvousError`` if it takes longer than ``limit_s`` seconds; its thread is abandoned.
    """
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001  (it is raised below)
            future.set_exception(error)

    thread = threading.Thread(target=work, name="mpi", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not future.done():
        raise RendezvousError(f"not all ranks replied within {limit_s:g} s")
    return future.result()


def _leave_deleted_folder(folder: str) -> None:
    """Change the working directory to ``folder`` if it was deleted: Open MPI starts no process without one."""
    try:
        Path.cwd()
    except FileNotFoundError:
        os.chdir(folder)
        sys.stderr.write(f"the working directory was deleted; it is {folder} now, so that MPI can start a process\n")


def _call_of_main_thread() -> MpiCall | None:
    return mpi_call(sys._current_frames().get(threading.main_thread().ident or 0))  # noqa: SLF001
