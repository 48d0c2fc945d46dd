"""Horovod on this rank.

Covers: having it run over the session's MPI world, ending whoever waits in it, having it again with the next world.
Does not cover: what a cell calls of it (``horovod_calls``), getting it (``horovod_wheel``).

Horovod's own thread talks to its peers all the time, so it notices by itself that one has died or has shut it down: all
operations end with an error then. It can be started again once all ranks have shut it down.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from .horovod_calls import HorovodCalls
from .mpi_world import LIMIT_SECONDS, within
from .on_import import on_import
from .process_group import RendezvousError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .mpi_world import MpiWorld

TORCH = "horovod.torch.mpi_ops"
ADDS_SETS = "HOROVOD_DYNAMIC_PROCESS_SETS"  # its variable that lets process sets be added after init
START_SECONDS = 30.0  # for all ranks to start it; a new process has to import it first
JOIN_CUT_OFF = "hvd.join() was cut off, after which Horovod 0.28 can't start in the same processes; run %dist_reset"
# What may be asked of Horovod before it runs.
_BEFORE_INIT = ("init", "shutdown", "is_initialized", "ProcessSet")


class _Told(NamedTuple):
    """What a rank says of its Horovod before it is started anew."""

    modules: list[str]  # that were started
    sets: list[tuple[int, ...]]  # the ranks of each process set but the first
    adds_sets: bool
    is_join_cut_off: bool


class HorovodWorld:
    """Horovod's bindings that this rank has started; each, say torch's, runs by itself."""

    def __init__(self, mpi: MpiWorld) -> None:
        self._mpi = mpi
        self.calls = HorovodCalls()
        self._started: dict[str, Any] = {}  # what Horovod calls its basics, by the name of the module that has them
        self._generation = 0  # of the process group that was formed last
        self._ending: threading.Thread | None = None
        self._ends: defaultdict[Any, threading.Lock] = defaultdict(threading.Lock)  # two ends at once abort the process
        self._turns = threading.Lock()  # of the control thread, which releases, and the main thread, which forms

    def enter(self) -> None:
        """From now on have every ``hvd.init()`` use the session's world."""
        on_import("horovod.common.basics", self._hook)
        on_import(TORCH, self.calls.watch)

    def _hook(self, module: Any) -> None:
        start, end = module.HorovodBasics.init, module.HorovodBasics.shutdown

        def init(basics: Any, comm: Any = None, process_sets: Any = None) -> None:
            """Start Horovod over the session's MPI world, or over the communicator or ranks that are given."""
            if self.calls.is_join_cut_off:
                raise RendezvousError(JOIN_CUT_OFF)
            communicator = self._communicator(comm)
            if not basics.is_initialized():
                # A rank that waits in Horovod's own code for one that never comes can't be released alive.
                communicator.Barrier()
            start(basics, communicator, process_sets)
            self._started[_module_of(basics)] = basics
            self.calls.begin_anew(on_all_ranks=communicator.Get_size() == self._mpi.comm.Get_size())

        def shutdown(basics: Any) -> None:
            """End Horovod."""
            self._started.pop(_module_of(basics), None)
            with self._ends[basics]:
                end(basics)
            self.calls.begin_anew(on_all_ranks=True)

        module.HorovodBasics.init, module.HorovodBasics.shutdown = init, shutdown

    def _communicator(self, asked: Any) -> Any:
        """Return the communicator that Horovod is to use; MPI's own may hold a rank that has died since.

        Raises
        ------
        RendezvousError
            If this rank is in no MPI world, or not among the ranks that were asked for.
        """
        if self._mpi.comm is None and self._mpi.shown is None:
            raise RendezvousError("Horovod needs ranks that MPI has started: %dist_init --launcher mpi")
        world = self._mpi.shown
        if asked is None or (isinstance(asked, (list, tuple, range)) and not asked):
            world.Get_size()  # where there is no world of all ranks this says why
            return world
        if not isinstance(asked, (list, tuple, range)):
            return asked
        if world.Get_rank() not in asked:
            raise RendezvousError(
                f"rank {world.Get_rank()} is not in comm={list(asked)}; call hvd.init() on those alone"
            )
        return world.Create_group(world.Get_group().Incl(list(asked)))

    # While a cell runs, on the control thread

    def release(self, generation: int) -> None:
        """End every operation of Horovod that a rank waits in.

        One that comes late, when a next ``generation`` was formed, does nothing.
        """
        with self._turns:
            is_ending = self._ending is not None and self._ending.is_alive()
            if generation < self._generation or not self._started or is_ending:
                return
            # It ends together with the others'; they are told as well, but one may be stopped.
            basics = list(self._started.values())
            self._ending = threading.Thread(target=self._shut_down, args=(basics,), name="end horovod", daemon=True)
            self._ending.start()

    def _shut_down(self, basics: Sequence[Any]) -> None:
        for each in basics:
            if self._ends[each].acquire(blocking=False):  # else the cell itself has begun to
                try:
                    each.MPI_LIB_CTYPES.horovod_shutdown()
                finally:
                    self._ends[each].release()

    # When no cell runs

    def settle(self, generation: int) -> list[str]:
        """Have Horovod run on all ranks again if it ran on one; all ranks call this together.

        ``generation`` counts the process groups of the session. Returns what is not there again, in words.
        """
        with self._turns:
            self._generation = generation
        world = self._mpi.comm
        if generation == 1 or world is None or self._mpi.failure:
            return []
        try:
            own = _Told(sorted(self._started), _process_sets(), _adds_sets(), self.calls.is_join_cut_off)
            told = within(START_SECONDS, lambda: [_Told(*each) for each in world.allgather(tuple(own))])
            if any(each.modules for each in told):
                within(START_SECONDS, lambda: self._start_anew(told))
        except Exception as error:  # noqa: BLE001  (a session without Horovod is worth more than none)
            remedy = "" if self.calls.is_join_cut_off else "; hvd.init() starts it"
            return [f"Horovod ({type(error).__name__}: {error}){remedy}"]
        return []

    def _start_anew(self, told: Sequence[_Told]) -> None:
        if self._ending is not None:
            self._ending.join()
            self._ending = None
        for basics in list(self._started.values()):
            basics.shutdown()
        self.calls.is_join_cut_off = any(each.is_join_cut_off for each in told)
        if any(each.adds_sets for each in told):
            os.environ[ADDS_SETS] = "1"
        sets = max((each.sets for each in told), key=len)
        for name in sorted({name for each in told for name in each.modules}):
            module = importlib.import_module(name)
            module.shutdown()  # which also has it count from 0
            module.init(self._mpi.comm, [module.ProcessSet(list(ranks)) for ranks in sets])
        _renew_process_sets()
        renew_optimizers()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """End with a program what the program has started, as its process would have done."""
        before = set(self._started)
        try:
            yield
        finally:
            for name in self._started.keys() - before:
                within(LIMIT_SECONDS, sys.modules[name].shutdown)


def _module_of(basics: Any) -> str:
    """Return the name of the module that has a binding's basics."""
    names = [name for name in sys.modules if name.startswith("horovod.") and name.endswith(".mpi_ops")]
    return next((name for name in names if getattr(sys.modules[name], "_basics", None) is basics), TORCH)


def _adds_sets() -> bool:
    return bool(os.environ.get(ADDS_SETS))


def _process_sets() -> list[tuple[int, ...]]:
    """Return the ranks of each process set beside that of all ranks, in the order of their numbers."""
    sets = {each.process_set_id: tuple(each.ranks) for each in _process_set_objects() if each.process_set_id}
    return [sets[number] for number in sorted(sets)]


def _process_set_objects() -> list[Any]:
    process_sets = sys.modules.get("horovod.common.process_sets")
    if process_sets is None:
        return []
    return [thing for thing in gc.get_objects() if type(thing) is process_sets.ProcessSet and thing.ranks]


def _renew_process_sets() -> None:
    """Give the process sets that cells hold their new numbers."""
    basics = sys.modules["horovod.common.process_sets"]._basics  # noqa: SLF001
    numbers = {tuple(ranks): number for number, ranks in basics._get_process_set_ids_and_ranks().items()}  # noqa: SLF001
    for each in _process_set_objects():
        if each.process_set_id:
            each.process_set_id = numbers.get(tuple(each.ranks))


def renew_optimizers() -> None:
    """Have each ``hvd.DistributedOptimizer`` forget the step that an error or an interrupt has cut off.

    As its own ``load_state_dict`` does; it has no class by which it could be told.
    """
    for thing in gc.get_objects():
        if not hasattr(type(thing), "_allreduce_grad_async"):
            continue
        thing._handles.clear()  # noqa: SLF001
        thing._synchronized, thing._should_synchronize = False, True  # noqa: SLF001
        for parameter in thing._allreduce_delay:  # noqa: SLF001
            thing._allreduce_delay[parameter] = thing.backward_passes_per_step  # noqa: SLF001
        for group in thing._group_counts:  # noqa: SLF001
            thing._group_counts[group] = 0  # noqa: SLF001


class Horovod:
    """``hvd`` in cells: ``horovod.torch``, started when something is asked of it that needs it to run."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        module = importlib.import_module("horovod.torch")
        value = getattr(module, name)
        if name not in _BEFORE_INIT and not name.endswith(("_built", "_enabled")) and not module.is_initialized():
            module.init()
        return value

    def __dir__(self) -> list[str]:
        return dir(importlib.import_module("horovod.torch"))

    def __repr__(self) -> str:
        return "<hvd: horovod.torch, started when it is used>"
