"""Run Horovod on this rank over the session's MPI world.

Covers: starting it over the session's world, ending operations that wait, restarting it with the next world.
Does not cover: a cell's calls of it (``calls``), installing it (``build``).

Horovod's own thread communicates with its peers all the time, so it detects that one has died or has shut Horovod down:
all operations then end with an error. It can be started again once all ranks have shut it down.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from ...protocol.time_limits import HOROVOD_START_SECONDS
from ...rank.libraries.import_hooks import on_import
from ...rank.mpi.world import within
from ...rank.process_group.errors import RendezvousError
from ...rank.process_group.object_replacement import thaw
from .calls import MPI_OPS, HorovodCalls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...rank.mpi.world import MpiWorld

ADDS_SETS = "HOROVOD_DYNAMIC_PROCESS_SETS"  # Horovod's variable that allows adding process sets after init
JOIN_CUT_OFF = "hvd.join() was interrupted, after which Horovod 0.28 can't start in the same processes; run %dist_reset"
# Names of Horovod that can be used before it is started.
_BEFORE_INIT = ("init", "shutdown", "is_initialized", "ProcessSet")


class _State(NamedTuple):
    """The state of a rank's Horovod, which all ranks exchange before it is restarted."""

    modules: list[str]  # modules whose bindings were started
    sets: list[tuple[int, ...]]  # the ranks of each process set except the first
    adds_sets: bool
    is_join_cut_off: bool


class HorovodWorld:
    """Horovod's bindings that this rank has started; each, e.g. torch's, runs by itself."""

    def __init__(self, mpi: MpiWorld) -> None:
        self._mpi = mpi
        self.calls = HorovodCalls()
        self._started: dict[str, Any] = {}  # Horovod's "basics" objects, by the name of their module
        self._generation = 0  # of the process group, as of the last call of settle
        self._ending: threading.Thread | None = None
        self._ends: defaultdict[Any, threading.Lock] = defaultdict(threading.Lock)  # two ends at once abort the process
        self._turns = threading.Lock()  # between the control thread, which releases, and the main thread, which forms

    def enter(self) -> None:
        """Patch Horovod so that every ``hvd.init()`` uses the session's world."""
        on_import("horovod.common.basics", self._hook)
        on_import(MPI_OPS, self.calls.watch)

    def _hook(self, module: Any) -> None:
        start, end = module.HorovodBasics.init, module.HorovodBasics.shutdown

        def init(basics: Any, comm: Any = None, process_sets: Any = None) -> None:
            """Start Horovod over the session's MPI world, or over the given communicator or ranks."""
            if self.calls.is_join_cut_off:
                raise RendezvousError(JOIN_CUT_OFF)
            communicator = self._communicator(comm)
            if not basics.is_initialized():
                # A rank that waits in Horovod's own start for another rank can't be released without killing it.
                communicator.Barrier()
            start(basics, communicator, process_sets)
            self._started[_module_of(basics)] = basics
            self.calls.reset(on_all_ranks=communicator.Get_size() == self._mpi.comm.Get_size())

        def shutdown(basics: Any) -> None:
            """Shut Horovod down."""
            self._started.pop(_module_of(basics), None)
            with self._ends[basics]:
                end(basics)
            self.calls.reset(on_all_ranks=True)

        module.HorovodBasics.init, module.HorovodBasics.shutdown = init, shutdown

    def _communicator(self, asked: Any) -> Any:
        """Return the communicator that Horovod is to use; MPI's own COMM_WORLD may contain a rank that has died."""
        if self._mpi.comm is None and self._mpi.shown is None:
            raise RendezvousError("Horovod needs ranks that were started by MPI: %dist_init --launcher mpi")
        world = self._mpi.shown
        if asked is None or (isinstance(asked, (list, tuple, range)) and not asked):
            world.Get_size()  # raises the reason if there is no world of all ranks
            return world
        if not isinstance(asked, (list, tuple, range)):
            return asked
        if world.Get_rank() not in asked:
            raise RendezvousError(
                f"rank {world.Get_rank()} is not in comm={list(asked)}; call hvd.init() on those ranks only"
            )
        return world.Create_group(world.Get_group().Incl(list(asked)))

    # While a cell runs, on the control thread

    def release(self, generation: int) -> None:
        """End every operation of Horovod that a rank waits in.

        A release that arrives after a later ``generation`` was formed has no effect.
        """
        with self._turns:
            is_ending = self._ending is not None and self._ending.is_alive()
            if generation < self._generation or not self._started or is_ending:
                return
            # In a thread: Horovod shuts down together with the other ranks' Horovod. These are released too, but one
            # may be stopped.
            basics = list(self._started.values())
            self._ending = threading.Thread(target=self._shut_down, args=(basics,), name="end horovod", daemon=True)
            self._ending.start()

    def _shut_down(self, basics: Sequence[Any]) -> None:
        for each in basics:
            if self._ends[each].acquire(blocking=False):  # else the cell itself is shutting it down
                try:
                    each.MPI_LIB_CTYPES.horovod_shutdown()
                finally:
                    self._ends[each].release()

    # When no cell runs

    def settle(self, generation: int) -> list[str]:
        """Restart Horovod on all ranks if it ran on any; all ranks call this together.

        ``generation`` counts the process groups of the session. Returns descriptions of what could not be restarted.
        """
        with self._turns:
            self._generation = generation
        world = self._mpi.comm
        if generation == 1 or world is None or self._mpi.failure:
            return []
        try:
            adds_sets = bool(os.environ.get(ADDS_SETS))
            own = _State(sorted(self._started), _process_sets(), adds_sets, self.calls.is_join_cut_off)
            states = within(HOROVOD_START_SECONDS, lambda: [_State(*each) for each in world.allgather(tuple(own))])
            if any(each.modules for each in states):
                within(HOROVOD_START_SECONDS, lambda: self._restart(states))
        except Exception as error:  # noqa: BLE001  (the session continues without Horovod)
            remedy = "" if self.calls.is_join_cut_off else "; hvd.init() starts it"
            return [f"Horovod ({type(error).__name__}: {error}){remedy}"]
        return []

    def _restart(self, states: Sequence[_State]) -> None:
        if self._ending is not None:
            self._ending.join()
            self._ending = None
        for basics in list(self._started.values()):
            basics.shutdown()
        self.calls.is_join_cut_off = any(each.is_join_cut_off for each in states)
        if any(each.adds_sets for each in states):
            os.environ[ADDS_SETS] = "1"
        sets = max((each.sets for each in states), key=len)
        for name in sorted({name for each in states for name in each.modules}):
            module = importlib.import_module(name)
            module.shutdown()  # also resets Horovod's numbering to 0
            module.init(self._mpi.comm, [module.ProcessSet(list(ranks)) for ranks in sets])
        _renew_process_sets()
        renew_optimizers()


def _module_of(basics: Any) -> str:
    """Return the name of the module that holds a binding's basics."""
    names = [name for name in sys.modules if name.startswith("horovod.") and name.endswith(".mpi_ops")]
    return next((name for name in names if getattr(sys.modules[name], "_basics", None) is basics), MPI_OPS)


def _process_sets() -> list[tuple[int, ...]]:
    """Return the ranks of each process set except that of all ranks, ordered by id."""
    sets = {each.process_set_id: tuple(each.ranks) for each in _process_set_objects() if each.process_set_id}
    return [sets[number] for number in sorted(sets)]


def _process_set_objects() -> list[Any]:
    process_sets = sys.modules.get("horovod.common.process_sets")
    if process_sets is None:
        return []
    thaw()
    return [thing for thing in gc.get_objects() if type(thing) is process_sets.ProcessSet and thing.ranks]


def _renew_process_sets() -> None:
    """Set the new ids on the process set objects that cells hold."""
    basics = sys.modules["horovod.common.process_sets"]._basics  # noqa: SLF001
    numbers = {tuple(ranks): number for number, ranks in basics._get_process_set_ids_and_ranks().items()}  # noqa: SLF001
    for each in _process_set_objects():
        if each.process_set_id:
            each.process_set_id = numbers.get(tuple(each.ranks))


def renew_optimizers() -> None:
    """Reset each ``hvd.DistributedOptimizer`` after a step that an error or an interrupt has ended early.

    This does the same as its own ``load_state_dict``. The optimizers have no common class, so they are found by a
    method.
    """
    thaw()
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
    """``hvd`` in cells: ``horovod.torch``, initialized at the first use of a name that requires it."""

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
