"""Serve the client's requests to a rank, e.g. to take its identity, to form the process group, push and pull.

Covers: environment variables, device, threads, names in the namespace; push and pull.
Does not cover: deciding the identity (``client.startup.rank_table``), running cells (``kernel``).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ...config.frameworks import HOST_ID
from ...errors import StageError, UnserializableValueError
from ...features.horovod.world import Horovod, HorovodWorld
from ...features.reloading.rank import LocalModules, note_files
from ...features.scripts.library_states import note_imports
from ...features.scripts.modules import note_modules
from ...features.scripts.rank import Scripts
from ...features.scripts.torch_state import note_switches
from ...features.staging.rank import Staging
from ...features.telemetry.rank.log_metrics import MetricsLog
from ...features.telemetry.rank.progress import Progress
from ...features.telemetry.rank.sampler import Sampler
from ...features.telemetry.rank.stacks import where
from ...protocol.environment import LAUNCH_RANK, SAMPLE_SECONDS
from ...protocol.ranks import RankInfo
from ...protocol.requests import (
    AcknowledgeRankHello,
    CompareFiles,
    Digest,
    EndStaging,
    Form,
    Handlers,
    Identify,
    ListModules,
    MpiFailure,
    Numbers,
    OpenPort,
    OpenStore,
    PrepareStaging,
    Pull,
    Push,
    Release,
    RepeatReply,
    RepeatReplyInOrder,
    Respawn,
    StagingState,
    Where,
    WriteFiles,
)
from ...protocol.serialization import check_whole, dump_value, dump_values, load_value
from ...protocol.shared_memory import fetch, is_shared, lend
from ..libraries.defaults import set_defaults
from ..libraries.extension_builds import watch_builds
from ..libraries.framework_checks import check_tensorflow
from ..libraries.reserved_ports import ReservedPort
from ..libraries.spawn_guard import refuse_cells, refuse_spawn
from ..mpi.world import MpiWorld
from ..nanny.ipc import IDENTITY, SAMPLES, RankEnd
from ..process_group.errors import RendezvousError
from ..process_group.object_replacement import replace_everywhere
from ..startup.interface_variables import wrong_interfaces
from .cell_hooks import counts

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_client.session import Session

    from ..cell_started import CellStarts
    from ..process_group.group import Group
    from ..startup.announce import Hellos
    from .shell import RankShell

Reply = tuple[dict[str, Any], list[Any]]

_MISSING = object()

serves = Handlers()  # requests between two cells
serves_beside = Handlers()  # requests while a cell may run


class RequestHandler:
    """Serve the client's requests to one rank."""

    def __init__(
        self,
        rank_end: RankEnd,
        session: Session,
        engine: str,
        cell: Callable[[], dict[str, Any] | None],
        hellos: Hellos,
        cell_starts: CellStarts,
    ) -> None:
        self._rank_end = rank_end
        self._session = session
        self._engine = engine
        self._cell = cell
        self._hellos = hellos
        self._cell_starts = cell_starts
        self._shell: RankShell | None = None
        self.repeat_reply: Callable[[str], Reply] = _no_reply  # takes the message id of a cell
        self.begin_session: Callable[[], list[str]] = list  # returns what failed in the user's profile
        self.group: Group | None = None
        self.mpi = MpiWorld()
        self.horovod = HorovodWorld(self.mpi)
        self.shelf: str | None = None
        self.progress = Progress()
        self.scripts = Scripts()
        self.staging = Staging()
        self.metrics = MetricsLog(cell, lambda data: rank_end.send(SAMPLES, [data]), self._start_sampler)
        self._sampler: Sampler | None = None
        cell_starts.subscribe(self.progress.reset, self.mpi.allow_release)

    def bind(self, shell: RankShell) -> None:
        """Set the shell whose namespace is filled."""
        self._shell = shell
        shell.scripts = self.scripts
        shell.staging = self.staging
        shell.local_modules = self._local_modules = LocalModules()

    def serve(self, content: dict[str, Any], buffers: list[Any]) -> Reply:
        """Serve a request between two cells; an exception becomes the reply."""
        return serves.serve(self, content, buffers)  # type: ignore[no-any-return]

    def serve_beside(self, content: dict[str, Any], cell: dict[str, Any] | None) -> Reply:
        """Serve a request on the control thread, also while a cell runs."""
        return serves_beside.serve(self, content, cell)  # type: ignore[no-any-return]

    # Identity

    @serves(Identify)
    def _identify(self, request: Identify, _buffers: list[Any]) -> Reply:
        """Take the identity that the client assigns, and prepare environment, device and namespace for it."""
        self._hellos.is_known = True
        info = RankInfo(**request.info)
        self.mpi.enter(info)
        self.metrics.share(info.world_size)
        identity: dict[str, Any] = {"engine": self._engine, "log_path": request.log_path}
        own = request.environment | _host_id(info.rank)
        os.environ.update(own)
        set_defaults(request.defaults)
        uuid = _choose_device(info)
        identity |= {
            "world_size": info.world_size,
            "local_rank": info.local_rank,
            "device": info.device,
            "gpu_uuid": uuid,
        }
        self._rank_end.send(IDENTITY, [self._session.pack(identity)])
        self._info = info
        if request.uses_tensorflow:
            check_tensorflow()
        self._place = ReservedPort(request.address)
        self._fill_namespace(info, request.address)
        self.shelf = request.shelf if is_shared(request.shelf, request.shelf_token) else None
        sees_shelf = self.shelf is not None
        if info.backend != "none":
            from ..process_group.group import Group  # noqa: PLC0415  (imports torch)

            self.group = Group(info, request.timeout_s)
            self._cell_starts.subscribe(self.group.take_number)
            refuse_spawn()
            watch_builds()
            self.horovod.enter()
            self.progress.count_steps()
        refuse_cells()
        if os.environ.get(SAMPLE_SECONDS):
            self._start_sampler()
        self.scripts.enter(info, own | {"MASTER_ADDR": request.address}, self.group, self.horovod)
        note_modules()
        note_files()
        note_switches()
        note_imports()
        assert self._shell is not None
        troubles = self.begin_session()
        self._shell.give_names()  # a startup file may have set one of them
        return {"status": "ok", "sees_shelf": sees_shelf, "place": self._place.name, "troubles": troubles}, []

    @serves(OpenStore)
    def _open_store(self, request: OpenStore, _buffers: list[Any]) -> Reply:
        """Open the store on rank 0; reply with its port."""
        if self.group is None:
            return {"status": "ok", "port": request.port}, []
        return {
            "status": "ok",
            "port": self.group.open_store(request.address, request.port, request.generation),
        }, []

    @serves(Form)
    def _form(self, request: Form, _buffers: list[Any]) -> Reply:
        """Form the process group together with all other ranks; reply with what of the earlier groups was lost."""
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = request.address, str(request.port)
        self.scripts.know(request.address, request.places, request.tf_roles)
        mpi_lost = self.mpi.settle(request.generation, request.mpi_lost, revoked=request.mpi_revoked)
        lost = self._show(self.mpi.take_new())
        if self.group is not None:
            try:
                lost += self.group.form(request.address, request.port, request.generation)
            except RendezvousError:
                raise  # has its own cause, e.g. the death of a rank
            except RuntimeError as error:
                if wrong := wrong_interfaces():
                    start = "the job starts" if os.environ.get(LAUNCH_RANK) else "%dist_init"
                    raise RendezvousError(f"{wrong} {start}") from error
                raise
        lost += self.horovod.settle(request.generation)
        return {"status": "ok", "lost": lost, "mpi_lost": mpi_lost} | counts(self.group, self.horovod.calls), []

    @serves(OpenPort)
    def _open_port(self, request: OpenPort, _buffers: list[Any]) -> Reply:
        """Reply with this rank's port for one ``%dist_run``; on rank 0 also with the programs' rendezvous port."""
        reply: dict[str, Any] = {"status": "ok", "place": self.scripts.open_place()}
        if self._info.rank == 0:
            reply |= {"port": self.scripts.open_port(served=request.served), "horovod": self.scripts.open_horovod()}
        return reply, []

    @serves(PrepareStaging)
    def _get_ready_to_stage(self, request: PrepareStaging, _buffers: list[Any]) -> Reply:
        """Listen for a data set from the previous node; reply with the address."""
        try:
            prepared = self.staging.get_ready(request, self._info, self.scripts.master)
        except StageError as error:
            return {"status": "ok", "trouble": str(error)}, []
        return {"status": "ok", **prepared}, []

    # The user's own modules

    @serves(ListModules)
    def _list_code(self, _request: ListModules, _buffers: list[Any]) -> Reply:
        """Reply with the user's modules and which of them were edited."""
        return {"status": "ok", **self._local_modules.state()}, []

    @serves(CompareFiles)
    def _compare_code(self, request: CompareFiles, _buffers: list[Any]) -> Reply:
        """Remove files that are no longer in the notebook's folder; reply with those that differ."""
        removed = self._local_modules.remove(request.folder, request.gone.get(self._info.host, {}))
        return {
            "status": "ok",
            "names": self._local_modules.compare(request.folder, request.hashes),
            "removed": removed,
        }, []

    @serves(WriteFiles)
    def _write_code(self, request: WriteFiles, buffers: list[Any]) -> Reply:
        """Write files of the notebook's folder."""
        self._local_modules.write(request.folder, request.names, buffers)
        return {"status": "ok"}, []

    def _show(self, change: tuple[Any, Any] | None) -> list[str]:
        """Replace MPI's old world with the new one wherever it is held; return what could not be changed."""
        if change is None:
            return []
        if change[0] is None:
            self._push({"comm": change[1]})
            return []
        pairs = [change]
        del change  # any remaining reference to the old world counts as a place to replace
        return replace_everywhere(pairs)

    def _start_sampler(self) -> None:
        if self._sampler is None:
            self._sampler = Sampler(self._cell, lambda: self.group, self.progress, self.metrics, self._rank_end.beat)

    # While a cell may run, on the control thread

    @serves_beside(Where)
    def _where(self, request: Where, cell: dict[str, Any] | None) -> Reply:
        found = where(self.group, self.horovod.calls, cell, request.about)
        found["program"] = self.scripts.programs.doing
        return {"status": "ok"} | found, []

    @serves_beside(AcknowledgeRankHello)
    def _acknowledge_hello(self, _request: AcknowledgeRankHello, _cell: dict[str, Any] | None) -> Reply:
        self._hellos.delay()
        return {"status": "ok"}, []

    @serves_beside(Respawn)
    def _respawn(self, request: Respawn, _cell: dict[str, Any] | None) -> Reply:
        self.mpi.respawn(request.command, request.host)
        return {"status": "ok"}, []

    @serves_beside(MpiFailure)
    def _mpi_failure(self, _request: MpiFailure, _cell: dict[str, Any] | None) -> Reply:
        return {"status": "ok", "failure": self.mpi.failure}, []

    @serves_beside(StagingState)
    def _staging_state(self, _request: StagingState, _cell: dict[str, Any] | None) -> Reply:
        return {"status": "ok"} | self.staging.progress(), []

    @serves_beside(EndStaging)
    def _end_staging(self, request: EndStaging, _cell: dict[str, Any] | None) -> Reply:
        self.staging.release(request.because, request.mark)
        return {"status": "ok"}, []

    @serves(RepeatReplyInOrder)
    @serves_beside(RepeatReply)
    def _repeat_reply(self, request: RepeatReply | RepeatReplyInOrder, _: Any) -> Reply:
        return self.repeat_reply(request.cell)

    @serves_beside(Release)
    def _release(self, request: Release, _cell: dict[str, Any] | None) -> Reply:
        """Make every call fail that waits for other ranks."""
        generation = request.generation
        if self.group is not None:
            self.group.release(generation)
        self.mpi.release(generation, forced=request.forced, others=request.mpi)
        self.horovod.release(generation)
        self.scripts.programs.release(generation)
        self.staging.release()
        return {"status": "ok"}, []

    def _fill_namespace(self, info: RankInfo, address: str) -> None:
        os.environ["MASTER_ADDR"] = address
        names: dict[str, Any] = {
            "rank": info.rank,
            "world_size": info.world_size,
            "local_rank": info.local_rank,
            "local_world_size": info.local_world_size,
            "node_rank": info.node_rank,
            "log_metrics": self.metrics.log_metrics,
            "gpu_id": None,
            "device": info.device,
        }
        if info.backend != "none":
            import torch  # noqa: PLC0415
            import torch.distributed as dist  # noqa: PLC0415

            device = torch.device(info.device)
            names |= {"torch": torch, "dist": dist, "device": device, "gpu_id": device.index, "hvd": Horovod()}
        assert self._shell is not None
        self._shell.given = lambda: names | {"comm": self.mpi.shown}
        self._shell.give_names()

    def _push(self, names: dict[str, Any]) -> None:
        assert self._shell is not None
        self._shell.push(names, interactive=False)  # type: ignore[no-untyped-call]

    # Values

    @serves(Push)
    def _push_values(self, request: Push, buffers: list[Any]) -> Reply:
        """Set variables."""
        values = load_value(buffers[0], fetch(self.shelf, request.shelf, buffers[1:]))
        assert self._shell is not None
        self._shell.push(values)  # type: ignore[no-untyped-call]
        return {"status": "ok"}, []

    @serves(Pull)
    def _pull(self, request: Pull, _buffers: list[Any]) -> Reply:
        """Send variables; the reply lists missing names, or states what cannot be serialized."""
        assert self._shell is not None
        namespace = self._shell.user_ns
        missing = [name for name in request.names if name not in namespace]
        if missing:
            return {"status": "missing", "names": missing}, []
        try:
            values = {name: namespace[name] for name in request.names}
            if request.whole:
                check_whole(values)
            pickled, out = dump_values(values)
        except UnserializableValueError as error:
            return {"status": "unserializable", "reasons": [str(error)]}, []
        note, frames = lend(self.shelf, out)
        return {"status": "ok", "shelf": note}, [pickled, *frames]

    @serves(Digest)
    def _digest(self, request: Digest, _buffers: list[Any]) -> Reply:
        """Send digests of a variable's parts."""
        from .digests import digests  # noqa: PLC0415  (imports numpy, which would enlarge the nanny before the fork)

        value = self._variable(request.name)
        return {"status": "missing"} if value is _MISSING else {"status": "ok", "parts": digests(value)}, []

    @serves(Numbers)
    def _numbers(self, request: Numbers, _buffers: list[Any]) -> Reply:
        """Send one part of a variable as numbers."""
        from .digests import numbers  # noqa: PLC0415

        # On all ranks: taking apart some models is a collective.
        array = numbers(self._variable(request.name), request.path)
        if self._info.rank not in request.ranks:
            return {"status": "ok", "shelf": None}, []
        pickled, out = dump_value(array)
        note, frames = lend(self.shelf, out)
        return {"status": "ok", "shelf": note}, [pickled, *frames]

    def _variable(self, name: str) -> Any:
        assert self._shell is not None
        return self._shell.user_ns.get(name, _MISSING)


def _no_reply(_cell: str) -> Reply:
    raise RuntimeError("this rank has no kernel yet")


def _host_id(rank: int) -> dict[str, str]:
    """Return NCCL_HOSTID for a rank if it contains ``{rank}``: ranks with different host ids may share a GPU."""
    chosen = os.environ.get(HOST_ID, "")
    return {HOST_ID: chosen.replace("{rank}", str(rank))} if "{rank}" in chosen else {}


def _choose_device(info: RankInfo) -> str:
    """Choose the rank's GPU; return its UUID as in NVML, or "" without a GPU or if this torch does not expose it."""
    if info.backend == "none" or not info.device.startswith("cuda"):
        return ""
    import torch  # noqa: PLC0415

    device = torch.device(info.device)
    torch.cuda.set_device(device)
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", "")
    return f"GPU-{uuid}" if uuid else ""
