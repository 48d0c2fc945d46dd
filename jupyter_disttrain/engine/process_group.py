"""The session's process group on one rank.

Covers: the store, ``init_process_group``, the first collective that proves it, scripts that make a group of their own,
releasing who is stuck, making the group and its subgroups anew.
Does not cover: when to release (``cluster.recovery``), sockets (``sockets``), who held the old groups (``replacing``).
"""

from __future__ import annotations

import _thread
import errno
import functools
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..framework_variables import TORCH_BACKENDS
from .counts import Counts
from .ended_groups import forget_half_ended_groups, keep_ended_groups
from .gloo_waits import end_forgotten_waits
from .groups import Groups
from .models import rearm_models, remember_models, reset_sharded_models
from .replacing import replace_everywhere
from .sockets import shut_down_clients_of
from .streams import flush_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ..ranks import RankInfo
    from .groups import GroupRecord


AGENT_SERVES = "TORCHELASTIC_USE_AGENT_STORE"
CONNECT_TIME = timedelta(seconds=2)  # for one attempt to reach the store
ABORT_SECONDS = 5.0  # for what groups do on a GPU to be aborted, before the process ends and the rank is replaced
# Whose handler Python calls on the main thread once the groups of a GPU are to be aborted; it is never sent.
RELEASE_SIGNAL = signal.SIGRTMAX - 5


class RendezvousError(RuntimeError):
    """The process group could not be made."""


class Group:
    """The default process group of this session."""

    def __init__(self, info: RankInfo, timeout_s: float) -> None:
        self.info = info
        self.groups = Groups()
        self._destroy = keep_ended_groups()
        self.broken = False  # the groups were aborted, or failed, and were not made anew yet
        self._timeout = timedelta(seconds=timeout_s)
        self._store: Any = None
        self._port = 0
        self._ours: Any = None  # the group that the session made
        self.generation = 0  # of the group, counted in the whole session
        self.since_ns = 0  # since when it is there, or a cell's own, by the wall clock
        self._released = 0  # the generation that was released last
        self.lost_work = False  # what groups did on a GPU was aborted since the cell began
        self._abort: threading.Thread | None = None
        self._turns = threading.Lock()  # of the control thread, which releases, and the main thread, which forms
        self._old: dict[str, GroupRecord] = {}  # that were destroyed to be made anew
        self._cell = 0
        self._inits = 0  # of the cell that runs
        self._counts = Counts()
        self._own_tag = ""  # of a group that a cell made
        self._own_cell = 0  # that one's number
        self._hidden: Any = None  # the session's group, while a program runs that has made none
        self._init = self._wrap_init()
        remember_models()

    def open_store(self, address: str, port: int, generation: int) -> int:
        """Open a store on rank 0 and return its port; port 0 lets the kernel choose, which leaves no race.

        The socket is made here because the store by itself would listen on every interface. ``generation`` is that of
        the group which is to be formed.
        """
        self._enter(generation)
        self._store = self.make_store(address, port)
        self._port = self._store.port
        return self._port

    def make_store(self, address: str, port: int = 0) -> Any:
        """Return a new store that this process serves.

        Raises
        ------
        RendezvousError
            If it can't listen there.
        """
        from torch._C._distributed_c10d import TCPStore  # noqa: PLC0415

        try:
            family, *_, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(where[:2], family=family, backlog=2048)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            remedy = "leave the port out, and a free one is chosen" if taken else "choose another address with -a"
            what = f"port {port} is taken" if taken else f"cannot listen on {address}:{port} ({error.strerror})"
            raise RendezvousError(f"{what}; {remedy}") from error
        return TCPStore(
            address,
            listener.getsockname()[1],
            self.info.world_size,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def form(self, address: str, port: int, generation: int) -> list[str]:
        """Make the process group, and the subgroups that were aborted with it; prove it by a first all_reduce.

        What held an old group then holds the new one, models in DistributedDataParallel too. ``generation`` counts the
        groups of this session; all ranks name the same. Returns what could not be made anew: the lines that made it, or
        what it is.
        """
        import torch.distributed as dist  # noqa: PLC0415
        from torch._C._distributed_c10d import PrefixStore  # noqa: PLC0415
        from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

        self._enter(generation)
        if self._abort is not None:
            self._abort.join()  # it ends within ABORT_SECONDS, or the process does
        # An attempt that failed has destroyed them already, but they are still to be made anew.
        live = self.groups.of_cells
        old = self._old = live | self._old
        count = c10d._world.group_count  # noqa: SLF001
        if dist.is_initialized():
            # A collective that was begun and that nobody joins would keep the group from being destroyed.
            self._end_waits()
            self._abort_devices()
            self._destroy_all()
        forget_half_ended_groups()
        self._counts.begin_again()
        c10d._world.group_count = 0  # noqa: SLF001  (an init that failed has counted; names must be alike on all ranks)
        if self._port != port:
            self._store = self._connect(address, port)
            self._port = port
        store = PrefixStore(f"disttrain/{generation}", self._store)
        self._check_released()
        self._join(store)
        pairs: dict[Any, Any] = {}  # what is still held, and what takes its place
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
            reset_sharded_models()
            lost += rearm_models()
            gc.collect()  # errors hold themselves, and what held the old groups; with them go their threads and sockets
        return lost

    def _destroy_all(self) -> None:
        """Destroy all groups; one that was aborted may fail to shut down, and is forgotten then."""
        from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

        try:
            self._destroy()
        except RuntimeError as error:
            sys.stderr.write(f"an aborted process group was not shut down: {error}\n")
            c10d._update_default_pg(None)  # noqa: SLF001

    def _connect(self, address: str, port: int) -> Any:
        """Connect to the store of rank 0, which may have died meanwhile: torch would try until the time is over."""
        from torch._C._distributed_c10d import TCPStore  # noqa: PLC0415

        until = time.monotonic() + self._timeout.total_seconds()
        while True:
            self._check_released()
            try:
                store: Any = TCPStore(address, port, self.info.world_size, is_master=False, timeout=CONNECT_TIME)
            except RuntimeError:
                if time.monotonic() > until:
                    raise
            else:
                store.set_timeout(self._timeout)
                return store

    def _check_released(self) -> None:
        """Wait for nobody once the group that is to be formed was released."""
        if self._released >= self.generation:
            raise RendezvousError("a rank has died while the group was formed")

    def _enter(self, generation: int) -> None:
        """Have a release that was meant for an earlier group do nothing from here on."""
        with self._turns:
            self.generation = generation

    def _join(self, store: Any) -> None:
        import torch.distributed as dist  # noqa: PLC0415

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
        import torch  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415

        info = self.info
        expected = info.world_size * (info.world_size - 1) / 2
        for device in dict.fromkeys([info.device, "cpu"] if ":" in str(dist.get_backend()) else [info.device]):
            total = torch.full((1,), float(info.rank), device=torch.device(device))
            dist.all_reduce(total)
            found = total.item()
            self._check_released()  # an abort ends a collective on a GPU without an error, and with any value
            if found != expected:
                raise RendezvousError(
                    f"the first all_reduce over {info.backend} on {device} gave {found} instead of {expected}: "
                    "two ranks share an identity; %dist_reset starts them anew"
                )

    def _remake(self, old: Mapping[str, GroupRecord], store: Any, count: int, pairs: dict[Any, Any]) -> list[str]:
        """Make those subgroups anew that all their members still know; returns the lines that made the others."""
        from torch._C._distributed_c10d import PrefixStore  # noqa: PLC0415
        from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

        own = {name: list(record.ranks) for name, record in old.items()}
        told_store = PrefixStore("groups", store)
        told_store.set(str(self.info.rank), json.dumps({"groups": own, "count": count}))
        told = [json.loads(told_store.get(str(rank))) for rank in range(self.info.world_size)]
        # Names are counted: ranks that count differently would give one name to two groups.
        c10d._world.group_count = max(c10d._world.group_count, *(each["count"] for each in told))  # noqa: SLF001
        lost = []
        members = {name: ranks for each in told for name, ranks in each["groups"].items()}
        for name in sorted(members):  # all ranks in the same order, also those that are not in it, as in new_group
            record = old.get(name)
            if not all(told[member]["groups"].get(name) == members[name] for member in members[name]):
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

    def release(self, generation: int) -> None:
        """Have whoever waits in a collective, or for the store, get an error; called on the control thread.

        One that comes late, when the next ``generation`` is being formed, must not hit that. Collectives on a GPU end
        without an error once they are aborted, and leave any values: so the main thread is to raise before that.
        """
        with self._turns:
            if generation < self.generation:
                return
            self.broken = True
            self._released = generation
            if self._port:
                shut_down_clients_of(self._port)
            if self.groups.have_devices:
                self.lost_work = True
                _thread.interrupt_main(RELEASE_SIGNAL)  # type: ignore[arg-type]  # it takes any number
                if self._abort is None or not self._abort.is_alive():
                    self._abort = threading.Thread(target=self._abort_devices, name="disttrain release", daemon=True)
                    self._abort.start()  # this thread goes on answering
            self._end_waits()

    def _abort_devices(self) -> None:
        """Abort what groups do on GPUs; a process in which that does not come back ends, and its rank is replaced."""
        late = self.groups.abort_devices(ABORT_SECONDS)
        if not late:
            return
        what = f"group{'' if len(late) == 1 else 's'} {', '.join(late)}"
        sys.stderr.write(
            f"rank {self.info.rank} on {self.info.host} can't be released: the abort of process {what} has not come "
            f"back after {ABORT_SECONDS:g} s, so the GPU or its driver hangs; this process ends, and the rank is "
            "replaced\n"
        )
        flush_all(sys.stdout, sys.stderr)
        os._exit(os.EX_UNAVAILABLE)

    def _end_waits(self) -> None:
        self.groups.release()
        end_forgotten_waits()

    @property
    def tag(self) -> str:
        """What default group there is: ``"session/2"``, ``"own/7/1"`` if a cell made it, ``""`` without one.

        Ranks that are in one group have the same tag.
        """
        import torch.distributed as dist  # noqa: PLC0415

        if self.broken:
            return "broken"
        if not dist.is_initialized():
            return ""
        if dist.group.WORLD is self._ours:
            return f"session/{self.generation}"
        return self._own_tag

    def before_cell(self, cell: int) -> None:
        """Take the cell's number: it is the same on every rank, so it can name what the ranks do together."""
        self._cell, self._inits, self.lost_work = cell, 0, False

    @property
    def counts(self) -> dict[str, Any]:
        """How many collectives this rank has called in each group since that was made, and messages likewise."""
        if self.broken:
            return {"collectives": {}, "messages": None}
        return {"collectives": self._counts.totals(self.groups.of_cells), "messages": self._counts.messages}

    def _wrap_init(self) -> Callable[..., None]:
        """Let a script's own ``init_process_group`` work in a cell; returns torch's.

        The session's group gives way to the script's. Over ``env://`` the script meets in the session's store under
        keys that no earlier cell has used; under torchrun it would find a fresh store.
        """
        import torch.distributed as dist  # noqa: PLC0415
        from torch._C._distributed_c10d import PrefixStore  # noqa: PLC0415

        from .pasted import check_backend  # noqa: PLC0415  (it imports this)

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
            self._show_hidden()
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
            with _serves_itself(init_method):
                original(backend, init_method, timeout, world_size, rank, store, *rest, **options)
            self._own_cell = self._cell

        # Both are the names by which scripts and libraries reach it.
        dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
        return original

    def _give_way(self) -> None:
        """End the session's group, if it is still there, or the one that an earlier cell has made.

        What holds the session's, and subgroups of it, holds the next ones as soon as they are formed.
        """
        import torch.distributed as dist  # noqa: PLC0415

        ours, self._ours = self._ours, None
        world = dist.group.WORLD
        if world is not None and world is ours:
            self._old = self.groups.of_cells | self._old
        if world is not None and (world is ours or self._own_cell != self._cell):
            dist.destroy_process_group()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Hide the session's group from a program, which finds none when it begins; it is there again afterwards.

        A group that the program makes is ended with it.
        """
        from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

        failed = True
        self._hidden, c10d.GroupMember.WORLD = c10d.GroupMember.WORLD, None
        try:
            yield
            failed = False
        finally:
            if self._hidden is None:
                self._end_own(failed=failed)
            else:
                self._show_hidden()

    def _show_hidden(self) -> None:
        from torch.distributed import distributed_c10d as c10d  # noqa: PLC0415

        if self._hidden is not None:
            c10d.GroupMember.WORLD, self._hidden = self._hidden, None

    def _end_own(self, *, failed: bool) -> None:
        """End the group that a script has made and left, so that the session's takes its place.

        ``failed``: other ranks may still be in it, and a collective may have been begun.
        """
        import torch.distributed as dist  # noqa: PLC0415

        if dist.group.WORLD is None or dist.group.WORLD is self._ours:
            return
        if failed:
            self.broken = True  # it is ended, on all ranks, when the session's is formed anew
        else:
            dist.destroy_process_group()


@contextmanager
def _serves_itself(init_method: str | None) -> Iterator[None]:
    """Have rank 0 serve the store at an address that code names; torchrun's variable says that its agent does."""
    served = os.environ.pop(AGENT_SERVES, None) if (init_method or "").startswith("tcp://") else None
    try:
        yield
    finally:
        if served is not None:
            os.environ[AGENT_SERVES] = served
