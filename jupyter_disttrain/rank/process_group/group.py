"""Form, release and rebuild the session's process group on one rank.

Covers: ``init_process_group``, the first collective that verifies it, scripts that make a group of their own, releasing
a rank stuck in a collective, rebuilding the group and its subgroups.
Does not cover: when to release (``client.recovery.state_machine``), the store (``store``), sockets (``sockets``),
replacing references to the old groups (``object_replacement``).
"""

from __future__ import annotations

import _thread
import functools
import gc
import json
import os
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d

from ...config.frameworks import TORCH_BACKENDS
from ...protocol.ranks import NEW_GROUP
from ...protocol.time_limits import ABORT_SECONDS, INITIALIZATION_SECONDS
from ..output.streams import flush_all
from .collective_counts import Counts
from .destroyed_groups import forget_half_ended_groups, keep_ended_groups
from .errors import RELEASE_SIGNAL, RendezvousError
from .gloo_abort import end_forgotten_waits
from .model_rebuild import rearm_models, remember_models, reset_sharded_models
from .object_replacement import replace_everywhere
from .sockets import inodes, shut_down_clients_of, shut_down_opened
from .store import check_backend, connect, serve_store, serves_itself
from .subgroups import Groups, leave_defaults_open

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

    from ...protocol.ranks import RankInfo
    from ..cell_started import CellStarted
    from .subgroups import GroupRecord

_COLLECTIVE = ("torch.distributed.", "torch.autograd.")  # modules whose functions call collectives, also in C code

_HELD = timedelta(days=30)  # the timeout of collectives while a debugger is attached
_WITH_TIMEOUT = tuple(getattr(c10d, name) for name in ("ProcessGroupGloo", "ProcessGroupNCCL") if hasattr(c10d, name))


class Group:
    """The default process group of this session."""

    def __init__(self, info: RankInfo, timeout_s: float) -> None:
        self.info = info
        self.groups = Groups()
        self._destroy = keep_ended_groups()
        self.broken = False  # the groups were aborted, or failed, and were not rebuilt yet
        self._timeout = timedelta(seconds=timeout_s)
        self._timeouts: dict[tuple[str, str], timedelta] = {}  # that are not in force now, by group and device
        self._store: Any = None
        self._port = 0
        self._ours: Any = None  # the process group that the session made
        self.generation = 0  # number of the group, counted over the whole session
        self.since_ns = 0  # wall clock, when the current default group was made, by the session or by a cell
        self._released = 0  # the last generation that was released
        self.lost_work = False  # GPU work of groups was aborted since the cell started
        self.is_raised = False  # the cell got an error for the lost work, or was interrupted
        self._abort: threading.Thread | None = None
        self._sockets = inodes()  # of this process, when the current cell or formation started
        self._turns = threading.Lock()  # between the control thread, which releases, and the main thread, which forms
        self._old: dict[str, GroupRecord] = {}  # destroyed groups that are to be rebuilt
        self._cell = 0
        self._inits = 0  # calls of init_process_group in the current cell
        self._counts = Counts()
        self._own_tag = ""  # tag of a group that a cell made
        self._own_cell = 0  # number of the cell that made it
        self._init = self._wrap_init()
        remember_models()
        leave_defaults_open()

    def hold_timeouts(self, held: bool) -> None:
        """Let collectives that start from now on wait for ranks that a debugger has stopped; or restore the timeouts.

        Only those of Gloo and NCCL, as torch has no way to set the others; early versions can't set these either.
        """
        found = [
            (group.group_name, device.type, group._get_backend(device))  # noqa: SLF001
            for group in list(c10d._world.pg_map)  # noqa: SLF001
            for device in group._device_types  # noqa: SLF001
        ]
        backends = {
            (name, device): each
            for name, device, each in found
            if isinstance(each, _WITH_TIMEOUT) and hasattr(each, "_set_default_timeout")
        }
        for key, each in backends.items():  # all of them before any is set: devices may share one
            if each.options._timeout != _HELD:  # noqa: SLF001
                self._timeouts[key] = each.options._timeout  # noqa: SLF001
        for key, each in backends.items():
            each._set_default_timeout(_HELD if held else self._timeouts.get(key, self._timeout))  # noqa: SLF001
        if not held:
            self._timeouts.clear()

    def open_store(self, address: str, port: int, generation: int) -> int:
        """Open a store on rank 0 for the group of this generation; return its port, which the kernel chooses for 0."""
        self._enter(generation)
        self._store = self.make_store(address, port)
        self._port = self._store.port
        return self._port

    def make_store(self, address: str, port: int = 0) -> Any:
        """Return a new store that this process serves; see ``store.serve_store``."""
        return serve_store(address, port, self.info.world_size, self._timeout)

    def form(self, address: str, port: int, generation: int) -> list[str]:
        """Make the process group and the subgroups that were aborted with it; verify it by a first all_reduce.

        References to an old group are replaced with the new one, those of models in DistributedDataParallel too.
        ``generation`` counts the groups of this session and is the same on all ranks. Returns what could not be
        rebuilt: the lines that made it, or a description.
        """
        self._enter(generation)
        if self._abort is not None:
            self._abort.join()  # it ends within ABORT_SECONDS, or the process does
        # A failed attempt has destroyed them already, but they are still to be rebuilt.
        live = self.groups.of_cells
        old = self._old = live | self._old
        count = c10d._world.group_count  # noqa: SLF001
        if dist.is_initialized():
            # A collective that was started and that no other rank joins would keep the group from being destroyed.
            self._end_waits()
            self._abort_devices()
            self._destroy_all()
        forget_half_ended_groups()
        self._counts.begin_again()
        c10d._world.group_count = 0  # noqa: SLF001  (a failed init has counted; names must be equal on all ranks)
        if self._port != port:
            self._store = connect(address, port, self.info.world_size, self._timeout, self._check_released)
            self._port = port
        store = PrefixStore(f"disttrain/{generation}", self._store)
        self._check_released()
        self._join(store)
        pairs: dict[Any, Any] = {}  # old group that is still referenced -> its replacement
        for record in (*live.values(), *old.values()):
            if not record.ranks and record.held() is not None:
                pairs[record.held()] = self._ours
        lost: list[str] = []
        if generation > 1:
            lost = self._remake({name: record for name, record in old.items() if record.ranks}, store, count, pairs)
        self.broken = False
        self._prove()
        self._old = {}
        if old:
            lost += replace_everywhere([pairs.popitem() for _ in range(len(pairs))])
            gc.collect()  # exceptions in reference cycles hold old groups, and with these their threads and sockets
            reset_sharded_models()
            lost += rearm_models()
        return lost

    def _destroy_all(self) -> None:
        """Destroy all groups; one that was aborted may fail to shut down and is then dropped."""
        try:
            self._destroy()
        except RuntimeError as error:
            sys.stderr.write(f"an aborted process group was not shut down: {error}\n")
            c10d._update_default_pg(None)  # noqa: SLF001

    def _check_released(self) -> None:
        """Stop waiting for other ranks once the group that is being formed was released."""
        if self._released >= self.generation:
            raise RendezvousError("a rank has died while the group was formed")

    def _enter(self, generation: int) -> None:
        """Set the generation, so that a release meant for an earlier group has no effect from here on."""
        with self._turns:
            self.generation = generation
            self._sockets = inodes()

    def _join(self, store: Any) -> None:
        self.since_ns = time.time_ns()
        # No device_id: with it every later group is split off this one, which takes calls of all ranks at once, and
        # sends and receives share one communicator.
        self._init(
            TORCH_BACKENDS.get(self.info.backend, self.info.backend),
            store=store,
            rank=self.info.rank,
            world_size=self.info.world_size,
            timeout=self._timeout,
        )
        self._ours = dist.group.WORLD

    def _prove(self) -> None:
        info = self.info
        expected = info.world_size * (info.world_size - 1) / 2
        for device in dict.fromkeys([info.device, "cpu"] if ":" in str(dist.get_backend()) else [info.device]):
            # Not of the default dtype, which a cell may have set: the sum of many ranks is inexact in bfloat16.
            total = torch.full((1,), info.rank, dtype=torch.float64, device=torch.device(device))
            dist.all_reduce(total)
            found = total.item()
            self._check_released()  # an abort ends a collective on a GPU without an error, and with any value
            if found != expected:
                raise RendezvousError(
                    f"the first all_reduce over {info.backend} on {device} returned {found} instead of {expected}: "
                    "two ranks share an identity; %dist_reset restarts them"
                )

    def _remake(self, old: Mapping[str, GroupRecord], store: Any, count: int, pairs: dict[Any, Any]) -> list[str]:
        """Rebuild the subgroups that all their members still have; returns the lines that made the others."""
        own = {name: list(record.ranks) for name, record in old.items()}
        exchange = PrefixStore("groups", store)
        exchange.set(str(self.info.rank), json.dumps({"groups": own, "count": count}))
        of_ranks = [json.loads(exchange.get(str(rank))) for rank in range(self.info.world_size)]
        # Names are counted: ranks with different counts would give one name to two groups.
        c10d._world.group_count = max(c10d._world.group_count, *(each["count"] for each in of_ranks))  # noqa: SLF001
        lost = []
        members = {name: ranks for each in of_ranks for name, ranks in each["groups"].items()}
        for name in sorted(members):  # in the same order on all ranks, non-members included, as in new_group
            record = old.get(name)
            if not all(of_ranks[member]["groups"].get(name) == members[name] for member in members[name]):
                if record is not None:
                    lost.append(record.made_at or f"the group of ranks {own[name]}")
                continue
            made: Any = c10d._new_process_group_helper  # noqa: SLF001  (each torch types it differently)
            pg, _ = made(
                len(members[name]),
                None if record is None else record.ranks.index(self.info.rank),
                members[name],
                self.info.backend if record is None else record.backend,
                store,
                name,
                timeout=self._timeout if record is None else record.timeout,
                pg_tag=None if record is None else record.tag,
                group_desc=None if record is None else record.description,
            )
            if record is None:
                continue
            c10d._world.pg_group_ranks[pg] = {member: at for at, member in enumerate(record.ranks)}  # noqa: SLF001
            self.groups.keep_line(name, record.made_at)
            if record.held() is not None:
                pairs[record.held()] = pg
        return lost

    def release(self, generation: int, *, raises: bool = True) -> None:
        """Make collectives and waits for the store raise an error; called on the control thread.

        A release that arrives late, when the next ``generation`` is being formed, must not affect that one. Aborted
        collectives on a GPU return without an error and leave any values, so the main thread has to raise before the
        abort; not if it ``raises`` False, because the cell waits for a program and has called none.
        """
        with self._turns:
            if generation < self.generation:
                return
            self.broken = True
            if self._released < generation:
                self.is_raised = False
            self._released = generation
            if self._port:
                shut_down_clients_of(self._port)
            if self.groups.have_devices:
                if raises:
                    self.lost_work = True
                    _thread.interrupt_main(RELEASE_SIGNAL)  # type: ignore[arg-type]  # it takes any number
                if self._abort is None or not self._abort.is_alive():
                    self._abort = threading.Thread(
                        target=self._release_devices,
                        args=(self._sockets, self._port),
                        name="disttrain release",
                        daemon=True,
                    )
                    self._abort.start()  # this thread keeps serving requests
            self._end_waits()

    def _abort_devices(self) -> None:
        """Abort collectives on GPUs; if an abort does not return, exit this process, and the rank is replaced."""
        late = self.groups.abort_devices(ABORT_SECONDS)
        if not late:
            return
        what = f"group{'' if len(late) == 1 else 's'} {', '.join(late)}"
        sys.stderr.write(
            f"rank {self.info.rank} on {self.info.host} can't be released: the abort of process {what} did not return "
            f"within {ABORT_SECONDS:g} s, so the GPU or its driver hangs; this process ends, and the rank is "
            "replaced\n"
        )
        flush_all(sys.stdout, sys.stderr)
        os._exit(os.EX_UNAVAILABLE)

    def _release_devices(self, sockets: frozenset[int] | None, port: int) -> None:
        """Abort collectives on GPUs, and end the initialization of a communicator, which no abort reaches.

        A main thread that waits for that stays in one call of torch. The communicator's sockets were opened since
        ``sockets``, when the cell or the formation started. Connections are shut down first: once its initialization
        has failed, NCCL closes the listening ones itself.
        """
        self._abort_devices()
        call = _torch_call_of_main_thread()
        if call is None or sockets is None:
            return
        deadline = time.monotonic() + ABORT_SECONDS
        for kind in ("connected", "listens"):
            if not self._stays_in(call, INITIALIZATION_SECONDS):
                return
            shut_down_opened(sockets, kind, port)
        while time.monotonic() < deadline and self._stays_in(call, INITIALIZATION_SECONDS):
            shut_down_opened(sockets, "connected", port)  # of further attempts to connect

    def _stays_in(self, call: tuple[FrameType, int], seconds: float) -> bool:
        """Wait for the main thread to leave a call, for some time; return whether it is still there."""
        deadline = time.monotonic() + seconds
        while _torch_call_of_main_thread() == call:
            if time.monotonic() > deadline:
                return True
            time.sleep(seconds / 10)
        return False

    def _end_waits(self) -> None:
        self.groups.release()
        end_forgotten_waits()

    @property
    def tag(self) -> str:
        """The current default group: ``"session/2"``, ``"own/7/1"`` if a cell made it, ``""`` without one.

        Ranks that are in one group have the same tag.
        """
        if self.broken:
            return "broken"
        if not dist.is_initialized():
            return ""
        if dist.group.WORLD is self._ours:
            return f"session/{self.generation}"
        return self._own_tag

    def take_number(self, cell: CellStarted) -> None:
        """Set the cell's number, which is the same on every rank, so it can name what the ranks do together."""
        self._cell, self._inits, self.lost_work = cell.number, 0, False
        if self.info.device != "cpu" or self.groups.have_devices:
            self._sockets = inodes()

    @property
    def counts(self) -> dict[str, Any]:
        """Collectives that this rank has called per group since the group was made, and messages sent and received.

        A call of ``new_group`` counts as a collective of a group of its own: torch names groups by their number, so
        ranks that have made different numbers of groups wait for each other in the next call.
        """
        if self.broken:
            return {"collectives": {}, "messages": None}
        made = {NEW_GROUP: c10d._world.group_count} if dist.is_initialized() else {}  # noqa: SLF001
        return {"collectives": self._counts.totals(self.groups.of_cells) | made, "messages": self._counts.messages}

    def _wrap_init(self) -> Callable[..., None]:
        """Let a script's own ``init_process_group`` work in a cell; returns torch's.

        The session's group is replaced with the script's. Over ``env://`` the script's ranks use the session's
        store under keys that no earlier cell has used; under torchrun they would find a fresh store.
        """
        original: Callable[..., None] = dist.init_process_group

        @functools.wraps(original)
        def init_process_group(
            backend: str | None = None,
            init_method: str | None = None,
            timeout: timedelta | None = None,
            world_size: int = -1,
            rank: int = -1,
            store: Any = None,
            *rest: Any,
            **options: Any,
        ) -> None:
            self._give_way()
            self._counts.begin_again()
            self.since_ns = time.time_ns()
            self._own_tag = f"own/{self._cell}"
            if init_method in (None, "env://") and store is None:
                self._inits += 1
                self._own_tag = f"own/{self._cell}/{self._inits}"
                store = PrefixStore(f"script/{self._cell}/{self._inits}", self._store)
                rank = self.info.rank if rank < 0 else rank
                world_size = self.info.world_size if world_size < 0 else world_size
                init_method = None
                if (rank, world_size) == (self.info.rank, self.info.world_size):
                    check_backend(backend, self.info, store)
            with serves_itself(init_method):
                original(backend, init_method, timeout, world_size, rank, store, *rest, **options)
            self._own_cell = self._cell

        # The two names by which scripts and libraries call it.
        dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
        return original

    def _give_way(self) -> None:
        """Destroy the session's group, if it still exists, or the group that an earlier cell made.

        References to the session's group and its subgroups are replaced as soon as the next ones are formed.
        """
        ours, self._ours = self._ours, None
        world = dist.group.WORLD
        if world is not None and world is ours:
            self._old = self.groups.of_cells | self._old
        if world is not None and (world is ours or self._own_cell != self._cell):
            dist.destroy_process_group()


def _torch_call_of_main_thread() -> tuple[FrameType, int] | None:
    """Return the main thread's innermost frame and the instruction there, if it may call a collective of torch."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
    if frame is None or not f"{frame.f_globals.get('__name__')}.".startswith(_COLLECTIVE):
        return None
    return frame, frame.f_lasti
