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
from ...features.introspection.completion import complete, names_of
from ...features.introspection.inspection import inspect_at
from ...features.introspection.summaries import variables
from ...features.reloading.rank import LocalModules, note_files, note_modules
from ...features.scripts.rank import Scripts
from ...features.staging.rank import Staging
from ...features.telemetry.rank.log_metrics import MetricsLog
from ...features.telemetry.rank.progress import Progress
from ...features.telemetry.rank.sampler import Sampler
from ...features.telemetry.rank.stacks import where
from ...protocol import requests
from ...protocol.environment import LAUNCH_RANK, SAMPLE_SECONDS
from ...protocol.ranks import RankInfo
from ...protocol.requests import Handlers, Reply
from ...protocol.serialization import check_whole, dump_value, dump_values, load_value
from ...protocol.shared_memory import fetch, is_shared, lend
from ..libraries.defaults import set_defaults
from ..libraries.extension_builds import give_back_files, watch_builds
from ..libraries.framework_checks import check_tensorflow
from ..libraries.reserved_ports import ReservedPort
from ..libraries.spawn_guard import refuse_cells, refuse_spawn
from ..mpi.world import MpiWorld
from ..nanny.ipc import SAMPLES, RankEnd
from ..process_group.errors import RendezvousError, is_of_group
from ..process_group.model_rebuild import is_step_cut_off
from ..process_group.object_replacement import replace_everywhere
from ..startup.startup_args import wrong_interfaces

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...protocol.messages import RankVitals
    from ..cell_started import Subscribers
    from ..process_group.group import Group
    from ..startup.connection import Hellos
    from .shell import RankShell

_MISSING = object()

serves = Handlers()  # requests between two cells, each with its buffers
serves_beside = Handlers()  # requests while a cell may run, on the control thread, each with the kernel's record of it


class RequestHandler:
    """Serve the client's requests to one rank.

    ``cell`` returns the kernel's record of the running cell; None while it is idle. ``repeat_reply`` returns the reply
    to a cell again; it takes the message id of its request. ``begin_session`` runs the user's profile once the rank has
    its identity; it returns what failed.
    """

    def __init__(
        self,
        shell: RankShell,
        rank_end: RankEnd,
        hellos: Hellos,
        cell_starts: Subscribers,
        *,
        cell: Callable[[], dict[str, Any] | None],
        repeat_reply: Callable[[str], Reply],
        begin_session: Callable[[], list[str]],
    ) -> None:
        self._shell, self._rank_end, self._hellos, self._cell_starts = shell, rank_end, hellos, cell_starts
        self._cell, self._repeats, self._begin_session = cell, repeat_reply, begin_session
        self.group: Group | None = None
        self.mpi = MpiWorld()
        self.horovod = HorovodWorld(self.mpi)
        self.shelf: str | None = None
        self.progress = Progress()
        self.scripts = shell.scripts = Scripts(rank_end, shell, cell)
        self.staging = shell.staging = Staging()
        self._local_modules = shell.local_modules = LocalModules()
        self.metrics = MetricsLog(cell, lambda data: rank_end.send(SAMPLES, [data]), self._start_sampler)
        self._sampler: Sampler | None = None
        cell_starts += [self.progress.reset, self.mpi.allow_release]

    def counts(self) -> dict[str, Any]:
        """Return this rank's counts of collectives in each process group since it was made, and of messages."""
        if self.group is None:
            return {"collectives": {}, "messages": None}
        found = self.group.counts
        return found | {"collectives": found["collectives"] | self.horovod.calls.counted}

    def after_cell(self, error: BaseException | None) -> tuple[str, dict[str, Any]]:
        """Return the rank's process group after a cell, and the entries about groups for the cell's reply.

        The first is ``Group.tag``, or ``"none"`` on a rank without torch. The entries state whether the error comes
        from a group, how many collectives the rank has called in each, and whether a step of an FSDP2 model was
        interrupted. Lock files that an interrupted cell has left are removed.
        """
        give_back_files()
        of_group = error is not None and is_of_group(error)
        if self.group is None:
            return "none", {"group_error": of_group}
        self.group.broken = self.group.broken or of_group
        cut_off = error is not None and is_step_cut_off()
        return self.group.tag, {"group_error": of_group, "step_cut_off": cut_off} | self.counts()

    # Identity

    @serves(requests.Identify)
    def _identify(self, request: requests.Identify, _buffers: list[Any]) -> dict[str, Any]:
        """Take the identity that the client assigns, and prepare environment, device and namespace for it."""
        self._hellos.is_known = True
        self._info = info = RankInfo(**request.info)
        self.mpi.enter(info)
        self.metrics.share(info.world_size)
        own = request.environment | _host_id(info.rank)
        os.environ.update(own)
        set_defaults(request.defaults)
        identity = {name: getattr(info, name) for name in ("world_size", "local_rank", "device")}
        self._rank_end.send_identity(identity | {"log_path": request.log_path, "gpu_uuid": _choose_device(info)})
        if request.uses_tensorflow:
            check_tensorflow()
        self._place = ReservedPort(request.address)
        self._fill_namespace(info, request.address)
        self.shelf = request.shelf if is_shared(request.shelf, request.shelf_token) else None
        if info.backend != "none":
            from ..process_group.group import Group  # noqa: PLC0415  (imports torch)

            self.group = Group(info, request.timeout_s)
            self._cell_starts.append(self.group.take_number)
            refuse_spawn()
            watch_builds()
            self.horovod.enter()
        self.progress.count()
        refuse_cells()
        if os.environ.get(SAMPLE_SECONDS):
            self._start_sampler()
        self.scripts.enter(info, own | {"MASTER_ADDR": request.address}, self.group)
        note_modules()
        note_files()
        troubles = self._begin_session()
        self._shell.give_names()  # a startup file may have set one of them
        return {"sees_shelf": self.shelf is not None, "place": self._place.name, "troubles": troubles}

    @serves(requests.OpenStore)
    def _open_store(self, request: requests.OpenStore, _buffers: list[Any]) -> dict[str, Any]:
        if self.group is None:
            return {"port": request.port}
        return {"port": self.group.open_store(request.address, request.port, request.generation)}

    @serves(requests.Form)
    def _form(self, request: requests.Form, _buffers: list[Any]) -> dict[str, Any]:
        """Form the process group together with all other ranks; reply with what of the earlier groups was lost."""
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = request.address, str(request.port)
        self._shell.let_go()  # an error's frames hold the earlier groups, and models that would be rebuilt
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
        return {"lost": lost, "mpi_lost": mpi_lost} | self.counts()

    @serves(requests.OpenPort)
    def _open_port(self, request: requests.OpenPort, _buffers: list[Any]) -> dict[str, Any]:
        reply: dict[str, Any] = {"place": self.scripts.open_place()}
        if self._info.rank == 0:
            reply |= {"port": self.scripts.open_port(served=request.served)}
        return reply | ({"socket": self.scripts.open_mpi()} if request.mpi else {})

    @serves(requests.PrepareStaging)
    def _prepare_staging(self, request: requests.PrepareStaging, _buffers: list[Any]) -> dict[str, Any]:
        try:
            return self.staging.get_ready(request, self._info, self.scripts.master)
        except StageError as error:
            return {"trouble": str(error)}

    # The user's own modules

    @serves(requests.ListModules)
    def _list_modules(self, _request: requests.ListModules, _buffers: list[Any]) -> dict[str, Any]:
        return self._local_modules.state()

    @serves(requests.CompareFiles)
    def _compare_files(self, request: requests.CompareFiles, _buffers: list[Any]) -> dict[str, Any]:
        removed = self._local_modules.remove(request.folder, request.gone.get(self._info.host, {}))
        return {"names": self._local_modules.compare(request.folder, request.hashes), "removed": removed}

    @serves(requests.WriteFiles)
    def _write_files(self, request: requests.WriteFiles, buffers: list[Any]) -> None:
        self._local_modules.write(request.folder, request.names, buffers)

    def _show(self, change: tuple[Any, Any, int] | None) -> list[str]:
        """Replace MPI's old world with the new one wherever it is held; return what could not be changed."""
        if change is None:
            return []
        if change[0] is None:
            self._shell.push({"comm": change[1]}, interactive=False)  # type: ignore[no-untyped-call]
            return []
        pairs, held_in_c = [change[:2]], change[2]
        del change  # any remaining reference to the old world counts as a place to replace
        return replace_everywhere(pairs, held_in_c)

    def _start_sampler(self) -> None:
        if self._sampler is None:
            self._sampler = Sampler(self._cell, lambda: self.group, self.progress, self.metrics, self._beat)

    def _beat(self, vitals: RankVitals) -> None:
        if not self.scripts.programs.reports:  # else the program writes its own activity
            self._rank_end.beat(vitals)

    # While a cell may run, on the control thread

    @serves_beside(requests.Where)
    def _where(self, request: requests.Where, cell: dict[str, Any] | None) -> dict[str, Any]:
        found = self.scripts.programs.where(request.about)
        if found is None:
            about = [each for *each, run_id in request.about if not run_id]
            found = where(self.group, self.horovod.calls, cell, about)
            if self._shell.questions.asks:  # it waits for no other rank, even if the GPU has collectives to do
                found |= {"asks": self._shell.questions.asks, "call": None, "collective": None}
        return found | {"cell": cell, "program": self.scripts.programs.doing}

    @serves_beside(requests.AnswerQuestion)
    def _answer_question(self, request: requests.AnswerQuestion, _cell: dict[str, Any] | None) -> None:
        self._shell.questions.answer(request)

    @serves_beside(requests.Debug)
    def _debug(self, request: requests.Debug, _cell: dict[str, Any] | None) -> None:
        self._shell.rank_debugger.take(request.message)

    @serves_beside(requests.Complete)
    def _complete(self, request: requests.Complete, _cell: dict[str, Any] | None) -> dict[str, Any]:
        return complete(self._shell, request.code, request.cursor)

    @serves_beside(requests.ListNames)
    def _list_names(self, request: requests.ListNames, _cell: dict[str, Any] | None) -> dict[str, Any]:
        return {"names": names_of(self._shell, request.prefix)}

    @serves_beside(requests.ListVariables)
    def _list_variables(self, _request: requests.ListVariables, _cell: dict[str, Any] | None) -> dict[str, Any]:
        return variables(self._shell)

    @serves_beside(requests.Inspect)
    def _inspect(self, request: requests.Inspect, _cell: dict[str, Any] | None) -> dict[str, Any]:
        return inspect_at(self._shell, request.code, request.cursor, with_source=request.with_source)

    @serves_beside(requests.AcknowledgeRankHello)
    def _acknowledge_hello(self, _request: requests.AcknowledgeRankHello, _cell: dict[str, Any] | None) -> None:
        self._hellos.delay()

    @serves_beside(requests.Respawn)
    def _respawn(self, request: requests.Respawn, _cell: dict[str, Any] | None) -> None:
        self.mpi.respawn(request.command, request.host)

    @serves_beside(requests.MpiFailure)
    def _mpi_failure(self, _request: requests.MpiFailure, _cell: dict[str, Any] | None) -> dict[str, Any]:
        return {"failure": self.mpi.failure}

    @serves_beside(requests.EndProgram)
    def _end_program(self, request: requests.EndProgram, _cell: dict[str, Any] | None) -> None:
        self.scripts.programs.end(request.cell, request.because)

    @serves_beside(requests.StagingState)
    def _staging_state(self, _request: requests.StagingState, _cell: dict[str, Any] | None) -> dict[str, Any]:
        return self.staging.progress()

    @serves_beside(requests.EndStaging)
    def _end_staging(self, request: requests.EndStaging, _cell: dict[str, Any] | None) -> None:
        self.staging.release(request.because, request.mark)

    @serves(requests.RepeatReplyInOrder)
    @serves_beside(requests.RepeatReply)
    def _repeat_reply(self, request: requests.RepeatReply | requests.RepeatReplyInOrder, _: Any) -> Reply:
        return self._repeats(request.cell)

    @serves_beside(requests.Release)
    def _release(self, request: requests.Release, _cell: dict[str, Any] | None) -> None:
        """Make every call fail that waits for other ranks."""
        generation = request.generation
        if self.group is not None:
            self.group.release(generation, raises=not self.scripts.programs.runs)
        self.mpi.release(generation, forced=request.forced, others=request.mpi)
        self.horovod.release(generation)
        self.staging.release()

    def _fill_namespace(self, info: RankInfo, address: str) -> None:
        os.environ["MASTER_ADDR"] = address
        of_info = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "device")
        names = {name: getattr(info, name) for name in of_info}
        names |= {"log_metrics": self.metrics.log_metrics, "gpu_id": None}
        if info.backend != "none":
            import torch  # noqa: PLC0415
            import torch.distributed as dist  # noqa: PLC0415

            device = torch.device(info.device)
            names |= {"torch": torch, "dist": dist, "device": device, "gpu_id": device.index, "hvd": Horovod()}
        self._shell.given = lambda: names | {"comm": self.mpi.shown}
        self._shell.give_names()

    # Values

    @serves(requests.Push)
    def _push(self, request: requests.Push, buffers: list[Any]) -> None:
        self._shell.push(load_value(buffers[0], fetch(self.shelf, request.shelf, buffers[1:])))  # type: ignore[no-untyped-call]

    @serves(requests.Pull)
    def _pull(self, request: requests.Pull, _buffers: list[Any]) -> dict[str, Any] | Reply:
        """Send variables; the reply lists missing names, or states what cannot be serialized."""
        namespace = self._shell.user_ns
        if missing := [name for name in request.names if name not in namespace]:
            return {"status": "missing", "names": missing}
        try:
            values = {name: namespace[name] for name in request.names}
            if request.whole:
                check_whole(values)
            return self.lend(*dump_values(values))
        except UnserializableValueError as error:
            return {"status": "unserializable", "reasons": [str(error)]}

    @serves(requests.Digest)
    def _digest(self, request: requests.Digest, _buffers: list[Any]) -> dict[str, Any]:
        """Send digests of a variable's parts."""
        from .digests import digests  # noqa: PLC0415  (imports numpy, which would enlarge the nanny before the fork)

        value = self._shell.user_ns.get(request.name, _MISSING)
        return {"status": "missing"} if value is _MISSING else {"parts": digests(value)}

    @serves(requests.Numbers)
    def _numbers(self, request: requests.Numbers, _buffers: list[Any]) -> dict[str, Any] | Reply:
        """Send one part of a variable as numbers."""
        from .digests import numbers  # noqa: PLC0415

        # On all ranks: taking apart some models is a collective.
        array = numbers(self._shell.user_ns.get(request.name, _MISSING), request.path)
        return self.lend(*dump_value(array)) if self._info.rank in request.ranks else {"shelf": None}

    def lend(self, pickled: bytes, buffers: list[Any]) -> Reply:
        """Return a pickled value as content and buffers of a reply, with large memory on the shelf."""
        note, frames = lend(self.shelf, buffers)
        return {"shelf": note}, [pickled, *frames]


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
