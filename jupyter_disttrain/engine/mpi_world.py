"""The rank's MPI world, and how it is made whole again.

Covers: ending who waits in MPI, the world without the dead, a new process that joins it, what takes its place if all
that fails.
Does not cover: when (``cluster.recovery``), whether a thread is in MPI (``mpi_calls``).

The recipe is that of User-Level Failure Mitigation (W. Bland et al., 2013): Revoke ends every call, Shrink leaves the
living, Spawn starts a process, Merge and Split put all in the order of their ranks. Whoever waits in MPI burns a core:
so the new process merges before it imports torch, and Split is left for when all are there. It takes part in no other
recovery: whatever goes wrong here, the process group is formed, and ``comm`` says what is missing.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from .connection import MPI_HEALS
from .mpi_calls import mpi_call
from .mpi_comms import all_comms, comm_within, for_cells, hidden, is_received, pointers_of_comm, receive_all
from .process_group import RendezvousError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..ranks import RankInfo
    from .mpi_calls import MpiCall

LIMIT_SECONDS = 5.0  # for a step that all ranks take together
HELP_SECONDS = 1.0  # that a rank in no call of MPI helps others to be released
HELP_PAUSE_SECONDS = 0.001
RECEIVE_SECONDS = 0.2  # for sends that no rank has received to be received
_UNFINISHED: list[Any] = []  # places to which MPI may still write what is received


class LostWorld:
    """What stands in the place of ``comm`` once MPI has no world of all ranks."""

    def __init__(self, why: str) -> None:
        self._reason = f"MPI has no world of all ranks: {why}; use dist, or start all ranks anew with %dist_reset"

    def __getattr__(self, name: str) -> NoReturn:
        """Say so."""
        raise RendezvousError(self._reason)

    def __repr__(self) -> str:
        """Say so."""
        return f"<{self._reason}>"


class MpiWorld:
    """MPI on this rank; without it there is nothing to do."""

    def __init__(self) -> None:
        self._mpi = sys.modules.get("mpi4py.MPI")
        self.comm: Any = None if self._mpi is None else for_cells(self._mpi, self._mpi.COMM_WORLD)
        self.shown: Any = self.comm  # what the cells have seen
        self._merged = join_starters()  # of the living and who was started since, in no order
        self._heals = bool(os.environ.get(MPI_HEALS)) and self.comm is not None
        self._rank = 0
        self._respawning: threading.Thread | None = None
        self.failure = ""  # why there is no world of all ranks; for good
        self._lost: LostWorld | None = None  # that then stands in its place
        self._proved: Any = None  # the world in which all ranks were seen
        self._is_revoked = False  # and not made anew yet
        self._generation = 0  # how often it was settled, counted with the process group
        self._runs_cell = False
        self._helping: threading.Thread | None = None  # other ranks that are released
        self._turns = threading.Lock()  # of the control thread, which releases, and the main thread, which ends a cell

    def enter(self, info: RankInfo) -> None:
        """Become a rank: of the world that was started, or of the one that is made with the next process group.

        Raises
        ------
        RendezvousError
            If MPI counts in another way than the client: ``comm`` and ``dist`` would disagree.
        """
        self._rank = info.rank
        if self._mpi is None:
            return
        if self._merged is not None:
            # MPI's own is a world of this process alone, in which a sum would be wrong without a word.
            self.comm, self.shown = None, LostWorld("it is made anew with the next process group")
            vars(self._mpi)["COMM_WORLD"] = self.shown
        elif (self.comm.Get_rank(), self.comm.Get_size()) != (info.rank, info.world_size):
            raise RendezvousError(
                f"MPI says this is rank {self.comm.Get_rank()} of {self.comm.Get_size()}, "
                f"the notebook says {info.rank} of {info.world_size}; "
                "mpi4py was built for another MPI than the mpiexec that started the ranks "
                "(run: jupyter disttrain doctor)"
            )
        else:
            vars(self._mpi)["COMM_WORLD"] = self.comm

    # While a cell runs, on the control thread

    def begin_cell(self) -> None:
        """Note that there may be calls to end from now on."""
        self._runs_cell = True

    def end_cell(self) -> bool:
        """Return whether the world was revoked; from now on it isn't."""
        with self._turns:
            self._runs_cell = False
            return self._is_revoked

    def release(self, generation: int, *, forced: bool, others: str) -> None:
        """End the call of MPI that the main thread is in, on all ranks that are in it.

        A rank that is in no call takes part too: a send that no rank receives ends only once its receiver refuses it,
        which MPI does within the receiver's own calls. One that comes late, when a next ``generation`` was formed, does
        nothing.

        Parameters
        ----------
        forced
            End the calls in all communicators even if none can be seen.
        others
            What a rank was seen waiting in: "one" call of MPI, "many" requests at once, or nothing.
        """
        with self._turns:
            if not self._heals or self.failure or generation < self._generation or self.comm is None:
                return
            call = self._call() if self._runs_cell else None
            is_late = others == "many" or (call is not None and call.waits_for_many)
            if self._is_respawning or not is_late:
                self._revoke(forced=forced)
            is_helping = self._helping is not None and self._helping.is_alive()
            if (forced or is_late or others) and not self._is_respawning and not is_helping:
                args = generation, forced, is_late
                self._helping = threading.Thread(target=self._help_others, args=args, name="mpi release", daemon=True)
                self._helping.start()

    @property
    def _is_respawning(self) -> bool:
        """Whether a new process is being started, or is not in the world yet."""
        return self._merged is not None or (self._respawning is not None and self._respawning.is_alive())

    def _call(self) -> MpiCall | None:
        """Return the call of MPI that the main thread is in."""
        return mpi_call(sys._current_frames().get(threading.main_thread().ident or 0))  # noqa: SLF001

    def _revoke(self, *, forced: bool) -> None:
        call = self._call()
        if not self._runs_cell or (call is None and not forced):
            return
        mpi: Any = self._mpi
        owner = None if call is None else call.owner
        comm = self.comm if call is None else owner
        if isinstance(owner, (mpi.Request, mpi.File)):
            comm = comm_within(mpi, owner)
        comms: Any = [comm, *hidden(mpi, comm)] if isinstance(comm, mpi.Comm) else []
        if all(each.Is_revoked() for each in comms):
            self._wake_who_waits()
            if self._is_respawning:
                comms = [self.comm]  # others are just being made
            elif forced or not comms:
                comms = all_comms(mpi)  # one by one: the main thread may free some once it is released
        for each in comms:
            self._is_revoked = self._is_revoked or each == self.comm
            each.Revoke()

    def _help_others(self, generation: int, forced: bool, is_late: bool) -> None:
        """Have MPI do for a moment what other ranks need of this one, which may be in no call of MPI.

        ``is_late``: revoke only after a moment in which messages are received. Open MPI ends the whole job when a wait
        for several requests fails while one of them is a send that its receiver has not refused yet ("Send error after
        request freed"). What was sent in a communicator that is revoked is lost in any case.
        """
        mpi: Any = self._mpi
        begun = time.monotonic()
        taken: list[Any] = []  # what is being received, and where to
        try:
            while (passed := time.monotonic() - begun) < HELP_SECONDS and not mpi.Is_finalized():
                with self._turns:
                    if generation < self._generation or self._is_respawning:
                        return  # all are in a new world, or make one
                    mpi.COMM_SELF.Iprobe()  # MPI works in any of its calls
                    if is_late:
                        taken += receive_all(mpi)
                    if is_late and passed > RECEIVE_SECONDS:
                        is_late = False
                        self._revoke(forced=forced)
                time.sleep(HELP_PAUSE_SECONDS)
        finally:
            _UNFINISHED.extend(each for each in taken if mpi.Is_finalized() or not is_received(mpi, each[0]))

    def _wake_who_waits(self) -> None:
        """Have Open MPI look once more at what its calls wait for.

        A call that finds its communicator whole and only then gets in line to wait misses a Revoke that comes in
        between, and the next Revoke does nothing (``ompi_comm_revoke_local``). That of any other communicator wakes all
        who wait in this process.
        """
        alone = self._mpi.COMM_SELF.Dup()  # type: ignore[union-attr]
        alone.Revoke()
        alone.Free()

    def respawn(self, command: Sequence[str], host: str) -> None:
        """Have all living ranks start a process together that takes the place of a dead one; returns at once.

        ``host``: where, as mpiexec calls it; empty on one machine.
        """
        args = command, host, self._respawning
        self._respawning = threading.Thread(target=self._respawn, args=args, name="respawn", daemon=True)
        self._respawning.start()

    def _respawn(self, command: Sequence[str], host: str, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        if self.failure:
            return
        try:
            base = self.comm if self._merged is None else self._merged
            base.Revoke()
            child = base.Shrink().Spawn(command[0], list(command[1:]), 1, self._where(host), root=0)
            self._merged = child.Merge(high=False)
        except self._mpi.Exception as error:  # type: ignore[union-attr]
            self.failure = f"{error}"

    def _where(self, host: str) -> Any:
        """Return what tells Open MPI to start a process on a host, all of whose places are taken in its view."""
        info = self._mpi.INFO_NULL  # type: ignore[union-attr]
        if host:
            info = self._mpi.Info.Create({"host": host, "map_by": "slot:oversubscribe"})  # type: ignore[union-attr]
        return info

    # When no cell runs

    def settle(self, generation: int, lost: str, *, revoked: bool) -> str:
        """Have a world of all ranks again, if that can be; returns why not.

        Parameters
        ----------
        generation
            Of the process group that is formed next.
        lost
            Why there can't be one, as the client knows; empty if there can.
        revoked
            Some ranks have revoked it.
        """
        with self._turns:
            self._generation = generation
        if self.comm is None and self._merged is None and not lost:
            return ""
        self.failure = lost or self.failure
        if not self.failure:
            try:
                if self._respawning is not None:
                    self._respawning.join(LIMIT_SECONDS)
                    if self._respawning.is_alive():
                        raise RendezvousError("a new process did not join it in time")  # noqa: TRY301
                if revoked or self._merged is not None:
                    self.comm = for_cells(self._mpi, within(LIMIT_SECONDS, self._make_anew))
                    self._is_revoked = False
                if self.comm is not self._proved:
                    within(LIMIT_SECONDS, self._prove)
            except (RendezvousError, self._mpi.Exception) as error:  # type: ignore[union-attr]
                self.failure = str(error)
        self._merged = None
        if self.failure:
            self._is_revoked = False  # for good
        return self.failure

    def _make_anew(self) -> Any:
        return self.comm.Shrink() if self._merged is None else self._merged.Split(0, self._rank)

    def _prove(self) -> None:
        """See that all ranks are there.

        This also has mpi4py make its own duplicate of the communicator: it does so in its first reduction, and lets no
        other thread run meanwhile, so that nobody could be released who waits there.
        """
        if self.comm.allreduce(1) != self.comm.Get_size():
            raise RendezvousError("its first allreduce did not count all ranks")
        if self._heals:
            pointers_of_comm(self._mpi)
        self._proved = self.comm

    def take_new(self) -> tuple[Any, Any] | None:
        """Return what cells have seen as ``comm`` and what stands in its place now; None if that is the same.

        The first is None on a rank that was started beside the MPI job.
        """
        if self.failure and self._lost is None:
            self._lost = LostWorld(self.failure)
        new = self.comm if self._lost is None else self._lost
        if new is self.shown:
            return None
        before, self.shown = self.shown, new
        return before, new


@cache
def join_starters() -> Any:
    """Return the communicator of this process and the living ranks that have started it; None in any other.

    They wait for it, so it is to be called before anything that takes long.

    Raises
    ------
    RendezvousError
        If they do not come.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None:
        return None
    parent = mpi.Comm.Get_parent()
    return None if parent == mpi.COMM_NULL else within(LIMIT_SECONDS, lambda: parent.Merge(high=True))


def finalize(limit_s: float) -> None:
    """Leave MPI, on the thread that has entered it; a process that waits for longer for the others is killed."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    limit = threading.Timer(limit_s, os.kill, (os.getpid(), signal.SIGKILL))
    limit.daemon = True
    limit.start()
    mpi.Finalize()
    limit.cancel()


def within(limit_s: float, call: Callable[[], Any]) -> Any:
    """Return what a call returns that may never return.

    Raises
    ------
    RendezvousError
        If it takes longer than ``limit_s``; its thread is left to itself.
    """
    results: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001  (it is raised below)
            errors.append(error)

    thread = threading.Thread(target=work, name="mpi", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise RendezvousError(f"not all ranks answered within {limit_s:g} s")
    return results[0]
