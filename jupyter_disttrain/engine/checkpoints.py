"""Checkpoints of a rank's variables.

Covers: models and optimizers through ``torch.distributed.checkpoint``, other values and random states by rank; a
version that stands in its folder only when it is whole; saving while the next cell runs.
Does not cover: which variables (``cluster.checkpoints``).

A checkpoint folder holds versions, ``000001`` and on. One that is being saved has another name and gets its own by a
rename, so whoever dies meanwhile leaves the latest version as it was.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SAVING = ".saving-"
ABOUT = "disttrain.json"
MODEL, OPTIMIZER, STATE, VALUE = "model", "optimizer", "state", "value"  # what a variable is


class CheckpointError(Exception):
    """A checkpoint can't be saved or loaded."""

    def _render_traceback_(self) -> list[str]:
        """Return one line: no code of the person's is at fault."""
        return [f"{type(self).__name__}: {self}"]


class Checkpoints:
    """Save and load what cells have made.

    Parameters
    ----------
    namespace
        Returns the variables of the cells.
    """

    def __init__(self, namespace: Callable[[], dict[str, Any]]) -> None:
        self._namespace = namespace
        self._group: Any = None  # for what goes on beside the cells
        self._pending: Any = None  # the last that was begun

    def save(self, path: str, names: Sequence[str], *, beside: bool, keep: int | None, tag: str) -> None:
        """Save variables as the next version; called on all ranks.

        Parameters
        ----------
        path
            The checkpoint folder, which all ranks see.
        names
            Variables.
        beside
            Return once the values are copied, and write them while cells run.
        keep
            How many versions stay; None: all.
        tag
            Tells this save from every other.

        Raises
        ------
        CheckpointError
            If a variable is missing, or an optimizer's model is not known.
        """
        import torch.distributed as dist  # noqa: PLC0415
        from torch.distributed.checkpoint.state_dict_saver import async_save, save  # noqa: PLC0415

        self.wait()
        began = time.monotonic()
        kinds = self._kinds(names)
        folder = Path(path) / f"{SAVING}{tag}"
        rank, world_size = dist.get_rank(), dist.get_world_size()
        folder.mkdir(parents=True, exist_ok=True)
        self._write_values(folder / f"rank{rank}.pt", [name for name, kind in kinds.items() if kind in (STATE, VALUE)])
        if rank == 0:
            about = {"names": kinds, "world_size": world_size, "saved_s": time.time()}
            (folder / ABOUT).write_text(json.dumps(about, indent=1))
        state = self._states(kinds)
        dist.barrier()
        missing = [each for each in range(world_size) if not (folder / f"rank{each}.pt").exists()]
        if missing:
            raise CheckpointError(
                f"{path} is not one folder for all hosts: what rank {missing[0]} wrote is not seen on rank {rank}'s; "
                "give a folder on a shared disk"
            )
        if not beside:
            if state:
                save(state, checkpoint_id=folder)
            dist.barrier()
            if rank == 0:
                _finish(folder, keep, began)
            dist.barrier()
            return
        if self._group is None or self._group not in dist.distributed_c10d._world.pg_map:  # noqa: SLF001
            self._group = dist.new_group(backend="gloo")
        state["about"] = {"saved": True}  # something to save, in any case
        self._pending = async_save(state, checkpoint_id=folder, process_group=self._group)
        self._pending.add_done_callback(lambda done: _on_saved(done, folder, keep, began, rank))

    def wait(self) -> None:
        """Wait until the last checkpoint is written that was begun beside the cells.

        Raises
        ------
        CheckpointError
            If it could not be.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        failure = pending.exception()
        if failure is not None:
            raise CheckpointError(f"the checkpoint before was not saved: {type(failure).__name__}: {failure}")

    def load(self, path: str, names: Sequence[str]) -> None:
        """Load variables from a version, or the latest in a folder; called on all ranks.

        Models and optimizers are filled in place, on as many ranks as there are now; other values are this rank's own,
        or rank 0's where fewer ranks had saved.

        Raises
        ------
        CheckpointError
            If there is none, or it has no such variable, or a model or optimizer was not made yet.
        """
        import torch.distributed as dist  # noqa: PLC0415
        from torch.distributed.checkpoint.state_dict_loader import load  # noqa: PLC0415

        self.wait()
        folder = latest(Path(path))
        about = json.loads((folder / ABOUT).read_text())
        unknown = [name for name in names if name not in about["names"]]
        if unknown:
            there = ", ".join(about["names"])
            raise CheckpointError(f"{folder} has no {', '.join(map(repr, unknown))}; there is {there}")
        kinds = {name: kind for name, kind in about["names"].items() if not names or name in names}
        self._check_made(kinds)
        state = self._states(kinds)
        if state:
            load(state, checkpoint_id=folder)
            self._put(kinds, state)
        rank = dist.get_rank()
        self._read_values(folder / f"rank{rank if rank < about['world_size'] else 0}.pt", kinds, about["world_size"])

    # What variables are

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
            if isinstance(value, torch.nn.Module):
                kinds[name] = MODEL
            elif isinstance(value, torch.optim.Optimizer):
                kinds[name] = [OPTIMIZER, self._model_of(name, value, names)]
            else:
                kinds[name] = STATE if _tells_its_state(value) else VALUE
        return kinds

    def _model_of(self, name: str, optimizer: Any, names: Sequence[str]) -> str:
        """Return the name of the model whose parameters an optimizer steps; one that is saved comes first."""
        import torch  # noqa: PLC0415

        there = self._namespace()
        stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for candidate in (*names, *there):
            model = there.get(candidate)
            if isinstance(model, torch.nn.Module) and stepped <= {id(each) for each in model.parameters()}:
                return candidate
        raise CheckpointError(f"no model has all the parameters that {name} steps; give the model a name of its own")

    def _check_made(self, kinds: Mapping[str, Any]) -> None:
        there = self._namespace()
        needed = {name for name, kind in kinds.items() if kind != VALUE} | {
            kind[1] for kind in kinds.values() if isinstance(kind, list)
        }
        missing = sorted(needed - there.keys())
        if missing:
            raise CheckpointError(
                f"{', '.join(map(repr, missing))} has to be made before it can be filled; run the cells that make it"
            )

    # Models and optimizers

    def _states(self, kinds: Mapping[str, Any]) -> dict[str, Any]:
        """Return what ``torch.distributed.checkpoint`` saves, or fills."""
        from torch.distributed.checkpoint import state_dict as states  # noqa: PLC0415

        there = self._namespace()
        found: dict[str, Any] = {}
        for name, kind in kinds.items():
            if kind == MODEL:
                found[name] = states.get_model_state_dict(there[name])
            elif isinstance(kind, list):
                found[name] = states.get_optimizer_state_dict(there[kind[1]], there[name], options=_flat())
        return found

    def _put(self, kinds: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        from torch.distributed.checkpoint import state_dict as states  # noqa: PLC0415

        there = self._namespace()
        for name, kind in kinds.items():
            if kind == MODEL:
                states.set_model_state_dict(there[name], state[name])
            elif isinstance(kind, list):
                states.set_optimizer_state_dict(there[kind[1]], there[name], state[name], options=_flat())

    # Values

    def _write_values(self, path: Path, names: Sequence[str]) -> None:
        import torch  # noqa: PLC0415

        there = self._namespace()
        states = {name: there[name].state_dict() for name in names if _tells_its_state(there[name])}
        values = {name: there[name] for name in names if name not in states}
        torch.save({"values": values, "states": states, "random": _random_states()}, path)

    def _read_values(self, path: Path, kinds: Mapping[str, Any], saved_by: int) -> None:
        import torch  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415

        told = torch.load(path, map_location="cpu", weights_only=False)
        there = self._namespace()
        there.update({name: value for name, value in told["values"].items() if name in kinds})
        for name, state in told["states"].items():
            if name in kinds:
                there[name].load_state_dict(state)
        if dist.get_rank() < saved_by:
            _set_random_states(told["random"])


def latest(path: Path) -> Path:
    """Return the newest version in a checkpoint folder; a version itself stands for itself.

    Raises
    ------
    CheckpointError
        If there is none.
    """
    if (path / ABOUT).exists():
        return path
    versions = _versions(path)
    if not versions:
        raise CheckpointError(f"there is no checkpoint in {path.absolute()}; %dist_save {path} NAME... makes one")
    return versions[-1]


def _versions(path: Path) -> list[Path]:
    """Return the whole versions in a folder, the newest last."""
    found = [each for each in path.iterdir() if each.name.isdigit()] if path.is_dir() else []
    return sorted(found, key=lambda each: int(each.name))


def _finish(folder: Path, keep: int | None, began: float) -> None:
    """Give a checkpoint that is whole its name, and remove what is not wanted any more."""
    root = folder.parent
    versions = _versions(root)
    number = int(versions[-1].name) + 1 if versions else 1
    version = root / f"{number:06}"
    folder.rename(version)
    size = sum(each.stat().st_size for each in version.iterdir())
    print(f"saved {version} ({size / 2**20:.1f} MiB) in {time.monotonic() - began:.1f} s")  # noqa: T201
    for left in root.glob(f"{SAVING}*"):  # of who died while saving
        shutil.rmtree(left, ignore_errors=True)
    if keep is not None:
        for old in [*versions, version][:-keep]:
            shutil.rmtree(old, ignore_errors=True)


def _on_saved(done: Any, folder: Path, keep: int | None, began: float, rank: int) -> None:
    failure = done.exception()
    if rank == 0 and failure is None:
        try:
            _finish(folder, keep, began)
        except OSError as error:
            failure = error
    if failure is not None:
        sys.stderr.write(f"the checkpoint was not saved: {type(failure).__name__}: {failure}\n")


def _flat() -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions  # noqa: PLC0415

    return StateDictOptions(flatten_optimizer_state_dict=True)


def _tells_its_state(value: Any) -> bool:
    """Whether an object is saved as its ``state_dict()``, e.g. a scheduler or a scaler."""
    return callable(getattr(value, "load_state_dict", None)) and callable(getattr(value, "state_dict", None))


def _random_states() -> dict[str, Any]:
    """Return where the random numbers of Python, numpy and torch stand."""
    import torch  # noqa: PLC0415

    numpy = sys.modules.get("numpy")
    return {
        "python": random.getstate(),
        "numpy": None if numpy is None else numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
    }


def _set_random_states(states: Mapping[str, Any]) -> None:
    import torch  # noqa: PLC0415

    random.setstate(states["python"])
    if states["numpy"] is not None:
        import numpy as np  # noqa: PLC0415

        np.random.set_state(states["numpy"])  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
