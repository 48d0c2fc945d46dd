"""Being told who this rank is, and the client's other requests.

Covers: environment variables, device, threads, names in the namespace; push and pull.
Does not cover: deciding the identity (``cluster.rank_table``), running cells (``kernel``).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..errors import StageError, UnserializableValueError
from ..ranks import RankInfo
from ..shelf import fetch, is_shared, lend
from ..values import check_whole, dump_value, dump_values, load_value
from .checkpoints import Checkpoints
from .compiled_parts import watch_builds
from .connection import SAMPLE
from .frameworks import check_tensorflow
from .groups import leave_defaults_open
from .hooks import counts
from .horovod_world import Horovod, HorovodWorld
from .interface_variables import wrong_interfaces
from .library_defaults import set_defaults
from .library_states import note_imports
from .local_modules import LocalModules, note_files
from .meeting_place import MeetingPlace
from .metrics import MetricsLog
from .mpi_world import MpiWorld
from .pasted import refuse_spawn
from .process_group import Group, RendezvousError
from .progress import Progress
from .replacing import replace_everywhere
from .sampler import Sampler
from .script_modules import note_modules
from .scripts import Scripts
from .spawned import refuse_cells
from .staging import Staging
from .torch_state import note_switches
from .where import where
from .wire import IDENTITY, SAMPLES, RankEnd

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_client.session import Session

    from .hellos import Hellos
    from .shell import RankShell

Reply = tuple[dict[str, Any], list[Any]]

_MISSING = object()


class Bootstrap:
    """Serve the client's requests to one rank."""

    def __init__(
        self,
        rank_end: RankEnd,
        session: Session,
        engine: str,
        cell: Callable[[], dict[str, Any] | None],
        hellos: Hellos,
    ) -> None:
        self._rank_end = rank_end
        self._session = session
        self._engine = engine
        self._cell = cell
        self._hellos = hellos
        self._shell: RankShell | None = None
        self.group: Group | None = None
        self.mpi = MpiWorld()
        self.horovod = HorovodWorld(self.mpi)
        self.shelf: str | None = None
        self.progress = Progress()
        self.scripts = Scripts()
        self.staging = Staging()
        self.metrics = MetricsLog(cell, lambda data: rank_end.send(SAMPLES, [data]), self._start_sampler)
        self._sampler: Sampler | None = None

    def bind(self, shell: RankShell) -> None:
        """Take the shell whose namespace is filled."""
        self._shell = shell
        shell.scripts = self.scripts
        shell.staging = self.staging
        shell.local_modules = self._local_modules = LocalModules()
        shell.checkpoints = Checkpoints(lambda: shell.user_ns)

    def serve(self, request: dict[str, Any], buffers: list[Any]) -> Reply:
        """Do what is asked; whatever it raises becomes the reply."""
        return getattr(self, f"_do_{request['do']}")(request, buffers)  # type: ignore[no-any-return]

    # Identity

    def _do_identify(self, request: dict[str, Any], _buffers: list[Any]) -> Reply:
        """Become a rank."""
        self._hellos.is_known = True
        info = RankInfo(**request["info"])
        self.mpi.enter(info)
        self.metrics.share(info.world_size)
        told = {"engine": self._engine, "log_path": request["log_path"]}
        os.environ.update({name: str(value) for name, value in request["environment"].items()})
        set_defaults(request["defaults"])
        uuid = _choose_device(info)
        told |= {"local_rank": info.local_rank, "device": info.device, "gpu_uuid": uuid}
        self._rank_end.send(IDENTITY, [self._session.pack(told)])
        self._info = info
        if request["uses_tensorflow"]:
            check_tensorflow()
        self._place = MeetingPlace(request["address"])
        self._fill_namespace(info, request["address"])
        self.shelf = request["shelf"] if is_shared(request["shelf"], request["shelf_token"]) else None
        sees_shelf = self.shelf is not None
        if info.backend != "none":
            self.group = Group(info, request["timeout_s"])
            refuse_spawn()
            watch_builds()
            leave_defaults_open()
            self.horovod.enter()
            self.progress.count_steps()
        refuse_cells()
        if os.environ.get(SAMPLE):
            self._start_sampler()
        environment = request["environment"] | {"MASTER_ADDR": request["address"]}
        self.scripts.enter(info, environment, self.group, self.horovod)
        note_modules()
        note_files()
        note_switches()
        note_imports()
        return {"status": "ok", "sees_shelf": sees_shelf, "place": self._place.name}, []

    def _do_open_store(self, request: dict[str, Any], _buffers: list[Any]) -> Reply:
        """Open the store on rank 0 and reply its port."""
        if self.group is None:
            return {"status": "ok", "port": request["port"]}, []
        return {
            "status": "ok",
            "port": self.group.open_store(request["address"], request["port"], request["generation"]),
        }, []

    def _do_form(self, request: dict[str, Any], _buffers: list[Any]) -> Reply:
        """Form the process group together with all other ranks; reply what of the earlier groups is gone."""
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = request["address"], str(request["port"])
        self.scripts.know(request["address"], request["places"], request["tf_roles"])
        mpi_lost = self.mpi.settle(request["generation"], request["mpi_lost"], revoked=request["mpi_revoked"])
        lost = self._show(self.mpi.take_new())
        if self.group is not None:
            try:
                lost += self.group.form(request["address"], request["port"], request["generation"])
            except RuntimeError as error:
                if wrong := wrong_interfaces():
                    raise RendezvousError(f"{wrong} %dist_init") from error
                raise
        lost += self.horovod.settle(request["generation"])
        return {"status": "ok", "lost": lost, "mpi_lost": mpi_lost} | counts(self.group, self.horovod.calls), []

    def _do_open_port(self, request: dict[str, Any], _buffers: list[Any]) -> Reply:
        """Reply a port at which the programs of one ``%dist_run`` meet, if this is rank 0, and this rank's own."""
        told: dict[str, Any] = {"status": "ok", "place": self.scripts.open_place()}
        if self._info.rank == 0:
            told |= {"port": self.scripts.open_port(served=request["served"]), "horovod": self.scripts.open_horovod()}
        return told, []

    def _do_get_ready_to_stage(self, request: dict[str, Any], _buffers: list[Any]) -> Reply:
        """Reply where the node before this one can send it a data set."""
        mark = f"{request['mark']}-{self._info.rank}"
        try:
            told = self.staging.get_ready(request["source"], request["to"], mark, self._info, self.scripts.master)
        except StageError as error:
            return {"status": "ok", "trouble": str(error)}, []
        return {"status": "ok", **told}, []

    def _do_let_go_of_staging(self, _request: dict[str, Any], _buffers: list[Any]) -> Reply:
        """Forget that it was to be copied."""
        self.staging.let_go()
        return {"status": "ok"}, []

    # A person's own modules

    def _do_list_code(self, _request: dict[str, Any], _buffers: list[Any]) -> Reply:
        """Reply which there are, and which were edited."""
        return {"status": "ok", **self._local_modules.tell()}, []

    def _do_compare_code(self, request: dict[str, Any], _buffers: list[Any]) -> Reply:
        """Reply which files are other than in the notebook's folder."""
        return {"status": "ok", "names": self._local_modules.compare(request["folder"], request["hashes"])}, []

    def _do_write_code(self, request: dict[str, Any], buffers: list[Any]) -> Reply:
        """Write files of the notebook's folder."""
        self._local_modules.write(request["folder"], request["names"], buffers)
        return {"status": "ok"}, []

    def _do_remove_code(self, request: dict[str, Any], _buffers: list[Any]) -> Reply:
        """Remove files that are no more in the notebook's folder."""
        return {"status": "ok", "names": self._local_modules.remove(request["folder"], request["hashes"])}, []

    def _show(self, change: tuple[Any, Any] | None) -> list[str]:
        """Put MPI's new world where the old one was held; returns what would not be changed."""
        if change is None:
            return []
        if change[0] is None:
            self._push({"comm": change[1]})
            return []
        pairs = [change]
        del change  # whoever goes on holding the old one is searched for
        return replace_everywhere(pairs)

    def _start_sampler(self) -> None:
        if self._sampler is None:
            self._sampler = Sampler(self._cell, lambda: self.group, self.progress, self.metrics, self._rank_end.beat)

    # Beside a cell, on the control thread

    def serve_beside(self, request: dict[str, Any], cell: dict[str, Any] | None) -> dict[str, Any]:
        """Do what can't wait for the cell that runs; returns what the reply says."""
        told: dict[str, Any] = {}
        match request["do"]:
            case "where":
                told = where(self.group, self.horovod.calls, cell, request.get("about", ()))
                told["program"] = self.scripts.programs.doing
            case "release":
                self._release(request["generation"], forced=request["forced"], mpi=request["mpi"])
            case "heard":
                self._hellos.was_heard()
            case "respawn":
                self.mpi.respawn(request["command"], request["host"])
            case "staging":
                told = self.staging.tell()
            case "end_staging":
                self.staging.release(request["because"])
            case "mpi_failure":
                told = {"failure": self.mpi.failure}
            case other:
                raise ValueError(f"a rank knows no {other!r} beside a cell")
        return {"status": "ok", **told}

    def _release(self, generation: int, *, forced: bool, mpi: str) -> None:
        """Have whatever waits for other ranks end with an error; ``mpi``: see ``cluster.guardian.Guardian.release``."""
        if self.group is not None:
            self.group.release(generation)
        self.mpi.release(generation, forced=forced, others=mpi)
        self.horovod.release(generation)
        self.scripts.programs.release(generation)
        self.staging.release()

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

    def _do_push(self, request: dict[str, Any], buffers: list[Any]) -> Reply:
        """Set variables."""
        values = load_value(buffers[0], fetch(self.shelf, request.get("shelf"), buffers[1:]))
        assert self._shell is not None
        self._shell.push(values)  # type: ignore[no-untyped-call]
        return {"status": "ok"}, []

    def _do_pull(self, request: dict[str, Any], _buffers: list[Any]) -> Reply:
        """Send variables; a name that isn't there or can't travel is named in the reply."""
        assert self._shell is not None
        namespace = self._shell.user_ns
        missing = [name for name in request["names"] if name not in namespace]
        if missing:
            return {"status": "missing", "names": missing}, []
        try:
            values = {name: namespace[name] for name in request["names"]}
            if request.get("whole"):
                check_whole(values)
            pickled, out = dump_values(values)
        except UnserializableValueError as error:
            return {"status": "unserializable", "reasons": [str(error)]}, []
        note, frames = lend(self.shelf, out)
        return {"status": "ok", "shelf": note}, [pickled, *frames]

    def _do_digest(self, request: dict[str, Any], _buffers: list[Any]) -> Reply:
        """Tell what a variable holds, in short."""
        from .digests import digests  # noqa: PLC0415  (numpy would make the nanny larger, which is forked off first)

        value = self._variable(request["name"])
        return {"status": "missing"} if value is _MISSING else {"status": "ok", "parts": digests(value)}, []

    def _do_numbers(self, request: dict[str, Any], _buffers: list[Any]) -> Reply:
        """Send one part of a variable as numbers."""
        from .digests import numbers  # noqa: PLC0415

        # Everywhere: to take some models apart is a collective.
        array = numbers(self._variable(request["name"]), request["path"])
        if self._info.rank not in request["ranks"]:
            return {"status": "ok", "shelf": None}, []
        pickled, out = dump_value(array)
        note, frames = lend(self.shelf, out)
        return {"status": "ok", "shelf": note}, [pickled, *frames]

    def _variable(self, name: str) -> Any:
        assert self._shell is not None
        return self._shell.user_ns.get(name, _MISSING)


def _choose_device(info: RankInfo) -> str:
    """Choose the rank's GPU; returns its UUID, as NVML knows it, where this torch tells it."""
    if info.backend == "none" or not info.device.startswith("cuda"):
        return ""
    import torch  # noqa: PLC0415

    device = torch.device(info.device)
    torch.cuda.set_device(device)
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", "")
    return f"GPU-{uuid}" if uuid else ""
