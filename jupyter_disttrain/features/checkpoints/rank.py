"""Save and load variables of the cells on this rank, for ``%dist_save`` and ``%dist_load``.

Covers: models and optimizers through ``torch.distributed.checkpoint``, also on another number of ranks; loading the
same version on all ranks.
Does not cover: other values (``local_state``), versions (``versions``), writing in the background
(``background``).
"""

from __future__ import annotations

import json
import re
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .background import Beside, reason_of
from .local_state import has_state_dict, read_value, set_random_states, write_values
from .reader import check_version, reader_of
from .versions import ABOUT, CheckpointError, begin, disk_error, finish, latest, size_of, sync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

MODEL, OPTIMIZER, STATE, VALUE = "model", "optimizer", "state", "value"  # kinds of variables
KEPT_BY_IPYTHON = re.compile(r"_{1,3}|_\d+|_i{1,3}|_i\d+")  # results and inputs of cells, missing in another session
MARK = ".saved"  # a name that no variable can have


class Checkpoints:
    """Save and load variables of the cells.

    Parameters
    ----------
    namespace
        Returns the variables of the cells.
    """

    def __init__(self, namespace: Callable[[], dict[str, Any]]) -> None:
        self._namespace = namespace
        self._beside = Beside()

    def save(self, path: str, names: Sequence[str], *, beside: bool, keep: int | None, session: str, tag: str) -> None:
        """Save variables as the next version; called on all ranks.

        Parameters
        ----------
        path
            The checkpoint's folder, on a file system that all ranks share.
        names
            Variables to save.
        beside
            Return once the values are copied, and write them while cells run.
        keep
            Number of versions to keep; None keeps all.
        session, tag
            Identify this save.

        Raises
        ------
        CheckpointError
            If a variable is missing or can't be saved, or the previous save has failed.
        """
        import torch.distributed as dist  # noqa: PLC0415
        from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415
        from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415

        self.wait()
        began = time.monotonic()
        kinds = self._kinds(names)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        folder = Path(_from_rank_0(lambda: str(begin(Path(path), session, tag)), Path(path)))
        if not folder.exists():
            raise CheckpointError(
                f"{path} is not shared by all hosts: rank {rank} can't see what rank 0 created there; "
                "name a folder on a shared file system"
            )
        there = self._namespace()
        own = {name: there[name] for name, kind in kinds.items() if kind in (STATE, VALUE)}
        write_values(folder / f"rank{rank}", own)
        if rank == 0:
            _write_about(folder, {"names": kinds, "world_size": world_size, "saved_s": time.time()})
        state = self._states(kinds)
        dist.barrier()
        if beside:
            self._beside.write(
                state | {MARK: True}, folder, lambda: _finish(folder, keep, began) if rank == 0 else None
            )
            return
        if state:
            try:
                save(state, checkpoint_id=folder)
            except CheckpointException as error:
                raise CheckpointError(f"the checkpoint can't be saved: {reason_of(error, folder)}") from None
        dist.barrier()
        _from_rank_0(lambda: _finish(folder, keep, began), folder)

    def wait(self) -> None:
        """Wait until the last version that is written in the background is complete; called on all ranks.

        Raises
        ------
        CheckpointError
            If it could not be written on any rank.
        """
        self._beside.wait()

    def load(self, path: str, names: Sequence[str], *, trust_owner: bool = False) -> None:
        """Load variables from a version, or from the latest in a folder; called on all ranks.

        Models and optimizers are filled in place, on any number of ranks. Other values are those that this rank saved,
        or rank 0's if fewer ranks had saved. If all variables are loaded, the random number generators are restored on
        ranks that had saved.

        Parameters
        ----------
        path
            The folder, or a version in it.
        names
            Variables to load; empty loads all that were saved.
        trust_owner
            Load files of another user, which may run any code.

        Raises
        ------
        CheckpointError
            If there is no version, it lacks a variable, a model or optimizer was not made yet, or another user wrote
            it.
        """
        import torch.distributed as dist  # noqa: PLC0415
        from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415
        from torch.distributed.checkpoint.state_dict_loader import load  # noqa: PLC0415

        self.wait()
        folder = Path(_from_rank_0(lambda: str(_version(Path(path), trust_owner=trust_owner))))
        about = json.loads((folder / ABOUT).read_text())
        unknown = [name for name in names if name not in about["names"]]
        if unknown:
            there = ", ".join(about["names"])
            raise CheckpointError(f"{folder} has no {', '.join(map(repr, unknown))}; it has {there}")
        kinds = {name: kind for name, kind in about["names"].items() if not names or name in names}
        self._check_made(kinds)
        state = self._states(kinds)
        if state:
            try:
                load(state, storage_reader=reader_of(folder, trust_owner=trust_owner))
            except CheckpointException as error:
                raise CheckpointError(f"the checkpoint can't be loaded: {reason_of(error, folder)}") from None
            self._put(kinds, state)
        rank, saved_by = dist.get_rank(), about["world_size"]
        own = folder / f"rank{rank if rank < saved_by else 0}"
        self._take(own, kinds, trust_owner=trust_owner)
        if not names and rank < saved_by:
            set_random_states(own, trust_owner=trust_owner)
        if rank == 0:
            print(f"loaded {folder}: {', '.join(kinds)}")  # noqa: T201

    # Kinds of variables

    def _kinds(self, names: Sequence[str]) -> dict[str, Any]:
        import torch  # noqa: PLC0415

        there = self._namespace()
        missing = [name for name in names if name not in there]
        if missing:
            raise CheckpointError(
                f"this rank has no {', '.join(map(repr, missing))}; set it in a %%distributed cell first"
            )
        kinds: dict[str, Any] = {}
        for name in names:
            value = there[name]
            if isinstance(value, torch.optim.Optimizer):
                # Before its first step an optimizer has only settings; torch would step it to create a state to save.
                model = self._model_of(name, value, names) if value.state else ""
                kinds[name] = [OPTIMIZER, model] if model else STATE
            elif isinstance(value, torch.nn.Module) and value.state_dict():
                kinds[name] = MODEL
            else:
                kinds[name] = STATE if has_state_dict(value) else VALUE
        return kinds

    def _model_of(self, name: str, optimizer: Any, names: Sequence[str]) -> str:
        """Return the name of the model whose parameters an optimizer steps; prefer one that is saved.

        Empty if there is none and each rank holds every parameter completely.
        """
        import torch  # noqa: PLC0415

        there = self._namespace()
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        stepped = set(map(id, parameters))
        for candidate in (*names, *(each for each in there if not KEPT_BY_IPYTHON.fullmatch(each))):
            model = there.get(candidate)
            if isinstance(model, torch.nn.Module) and stepped <= {id(each) for each in model.parameters()}:
                return candidate
        if any(hasattr(each, "placements") for each in parameters):
            raise CheckpointError(
                f"no model has all the parameters that {name} steps, of which each rank holds a part; create one "
                "optimizer per model"
            )
        return ""

    def _check_made(self, kinds: Mapping[str, Any]) -> None:
        there = self._namespace()
        needed = {name for name, kind in kinds.items() if kind != VALUE} | {
            kind[1] for kind in kinds.values() if isinstance(kind, list)
        }
        missing = sorted(needed - there.keys())
        if missing:
            raise CheckpointError(
                f"{', '.join(map(repr, missing))} has to exist before its state can be loaded; run the cells that "
                "create it first"
            )

    # Models and optimizers

    def _states(self, kinds: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state dicts that ``torch.distributed.checkpoint`` saves or fills."""
        from torch.distributed.checkpoint import state_dict as states  # noqa: PLC0415

        there = self._namespace()
        found: dict[str, Any] = {}
        for name, kind in kinds.items():
            if kind == MODEL:
                found[name] = states.get_model_state_dict(there[name])
            elif isinstance(kind, list):
                with _without_gradients(there[name]):
                    found[name] = states.get_optimizer_state_dict(there[kind[1]], there[name], options=_flat())
        return found

    def _put(self, kinds: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        from torch.distributed.checkpoint import state_dict as states  # noqa: PLC0415

        there = self._namespace()
        for name, kind in kinds.items():
            if kind == MODEL:
                states.set_model_state_dict(there[name], state[name])
            elif isinstance(kind, list):
                with _without_gradients(there[name]):
                    states.set_optimizer_state_dict(there[kind[1]], there[name], state[name], options=_flat())

    def _take(self, folder: Path, kinds: Mapping[str, Any], *, trust_owner: bool) -> None:
        """Set plain values, and load the state of objects that are saved as a state dict."""
        there = self._namespace()
        for name, kind in kinds.items():
            if kind == VALUE:
                there[name] = read_value(folder, name, trust_owner=trust_owner)
            elif kind == STATE:
                there[name].load_state_dict(read_value(folder, name, trust_owner=trust_owner))


@contextmanager
def _without_gradients(optimizer: Any) -> Iterator[None]:
    """Remove gradients temporarily: if there are any, torch assumes that an optimizer's state is complete."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    gradients = [each.grad for each in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _write_about(folder: Path, fields: Mapping[str, Any]) -> None:
    about = folder / ABOUT
    try:
        about.write_text(json.dumps(fields, indent=1))
        sync(about)
    except OSError as error:
        raise CheckpointError(f"the checkpoint can't be saved: {disk_error(error, folder)}") from None


def _from_rank_0(ask: Callable[[], str], written: Path | None = None) -> str:
    """Return rank 0's result on all ranks; an error on rank 0 is raised on every rank.

    ``written`` is the folder to which rank 0 writes.
    """
    import torch.distributed as dist  # noqa: PLC0415

    reply: list[Any] = ["", ""]
    if dist.get_rank() == 0:
        try:
            reply[0] = ask()
        except CheckpointError as error:
            reply[1] = str(error)
        except OSError as error:
            reply[1] = f"the checkpoint can't be saved: {disk_error(error, written)}" if written else str(error)
    dist.broadcast_object_list(reply, src=0)
    if reply[1]:
        raise CheckpointError(reply[1])
    return str(reply[0])


def _version(path: Path, *, trust_owner: bool) -> Path:
    version = latest(path)
    return version if trust_owner else check_version(version)


def _finish(folder: Path, keep: int | None, began: float) -> str:
    version = finish(folder, keep)
    seconds = time.monotonic() - began
    print(f"saved {version} ({size_of(version) / 2**20:.1f} MiB) in {seconds:.1f} s")  # noqa: T201
    return str(version)


def _flat() -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions  # noqa: PLC0415

    return StateDictOptions(flatten_optimizer_state_dict=True)
