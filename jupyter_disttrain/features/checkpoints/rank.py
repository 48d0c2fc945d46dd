"""Save and load variables of the cells on this rank, for ``%dist_save`` and ``%dist_load``.

Covers: what is saved of each kind of variable, loading the same version on all ranks.
Does not cover: versions (``versions``), writing in the background (``background``).

``torch.distributed.checkpoint`` writes and reads everything. Models and optimizers are saved once for all ranks; other
variables and the state of random number generators are entries of each rank.
"""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import random
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ...private_files import open_own
from .background import Beside
from .planners import OWN, PickledOnceLoadPlanner, PickledOnceSavePlanner
from .versions import ABOUT, CheckpointError, begin, finish, latest, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

MODEL, OPTIMIZER, STATE, VALUE = "model", "optimizer", "state", "value"  # kinds of variables
RANDOM = ".random"  # a name that no variable can have
FLAT = states.StateDictOptions(flatten_optimizer_state_dict=True)


class Checkpoints:
    """Save and load variables of the cells, which ``namespace`` returns."""

    def __init__(self, namespace: Callable[[], dict[str, Any]]) -> None:
        self._namespace = namespace
        self._beside = Beside()
        self.wait = self._beside.wait

    def save(self, path: str, names: Sequence[str], *, beside: bool, keep: int | None, session: str) -> None:
        """Save variables as the next version of a session, on all ranks."""
        self.wait()
        began = time.monotonic()
        rank, there = dist.get_rank(), self._namespace()
        kinds = self._kinds(names)
        own = {name: _pickled(name, there[name], kind) for name, kind in kinds.items() if kind in (STATE, VALUE)}
        own[RANDOM] = _pickled(RANDOM, _random_states(), VALUE)
        state = {**self._states(kinds, self._models(kinds, names)), OWN: {str(rank): own}}
        folder = Path(_from_rank_0(lambda: begin(Path(path), session), Path(path)))
        if not folder.exists():
            raise CheckpointError(
                f"{path} is not shared by all hosts: rank {rank} can't see what rank 0 created there; "
                "name a folder on a shared file system"
            )
        about = {"names": kinds, "world_size": dist.get_world_size(), "saved_s": time.time()}

        def complete() -> Path:
            size = sum(each.stat().st_size for each in folder.iterdir())
            version = finish(folder, keep, about)
            print(f"saved {version} ({size / 2**20:.1f} MiB) in {time.monotonic() - began:.1f} s")  # noqa: T201
            return version

        if beside:
            self._beside.write(state, folder, complete if rank == 0 else lambda: None)
            return
        try:
            save(state, checkpoint_id=folder, planner=PickledOnceSavePlanner())
        except CheckpointException as error:
            raise CheckpointError(f"the checkpoint can't be saved: {reason_of(error, folder)}") from None
        _from_rank_0(complete, folder)

    def load(self, path: str, names: Sequence[str], *, trust_owner: bool = False) -> None:
        """Load variables from a version, or from the latest in a folder; called on all ranks.

        Models and optimizers are filled in place, on any number of ranks. Other values are those that this rank saved,
        or rank 0's if fewer ranks had saved. If all variables are loaded, the random number generators are restored on
        ranks that had saved.
        """
        self.wait()
        folder = Path(_from_rank_0(lambda: latest(Path(path))))
        about = json.loads((folder / ABOUT).read_text())
        kinds = {name: kind for name, kind in about["names"].items() if not names or name in names}
        unknown = [name for name in names if name not in kinds]
        if unknown:
            there = ", ".join(about["names"])
            raise CheckpointError(f"{folder} has no {', '.join(map(repr, unknown))}; it has {there}")
        missing = sorted({name for name, kind in kinds.items() if kind != VALUE} - self._namespace().keys())
        if missing:
            raise CheckpointError(
                f"the state of {' and '.join(map(repr, missing))} can only be loaded into existing objects; run the "
                "cells that create them first"
            )
        rank = dist.get_rank()
        has_saved = rank < about["world_size"]
        own = dict.fromkeys((name for name, kind in kinds.items() if kind in (STATE, VALUE)), b"")
        if has_saved and not names:
            own[RANDOM] = b""
        saved_by = str(rank if has_saved else 0)
        models = self._models(kinds, list(about["names"]))
        state: dict[str, Any] = {**self._states(kinds, models), OWN: {saved_by: own}}
        reader = FileSystemReader(folder)
        if not trust_owner:
            reader.fs = _OwnFiles()
        try:
            load(state, storage_reader=reader, planner=PickledOnceLoadPlanner())
        except CheckpointException as error:
            raise CheckpointError(f"the checkpoint can't be loaded: {reason_of(error, folder)}") from None
        self._put(kinds, models, state, state[OWN][saved_by])
        if rank == 0:
            print(f"loaded {folder}: {', '.join(kinds)}")  # noqa: T201

    def _kinds(self, names: Sequence[str]) -> dict[str, str]:
        there = self._namespace()
        missing = [name for name in names if name not in there]
        if missing:
            raise CheckpointError(
                f"this rank has no {', '.join(map(repr, missing))}; set it in a %%distributed cell first"
            )
        kinds = {}
        for name in names:
            value = there[name]
            if isinstance(value, torch.optim.Optimizer):
                # Before its first step an optimizer has only settings; torch would step it to create a state to save.
                shared = value.state and self._model_of(name, value, names) is not None
                kinds[name] = OPTIMIZER if shared else STATE
            elif isinstance(value, torch.nn.Module) and value.state_dict():
                kinds[name] = MODEL
            else:
                # An object is saved as its state_dict() if it has one, e.g. a scheduler or a scaler.
                methods = (getattr(value, method, None) for method in ("state_dict", "load_state_dict"))
                kinds[name] = STATE if all(map(callable, methods)) else VALUE
        return kinds

    def _model_of(self, name: str, optimizer: Any, names: Sequence[str]) -> Any:
        """Return the model among ``names`` whose parameters an optimizer steps.

        None if there is none and each rank holds every parameter completely.
        """
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        stepped = set(map(id, parameters))
        for model in map(self._namespace().get, names):
            if isinstance(model, torch.nn.Module) and stepped <= set(map(id, model.parameters())):
                return model
        if any(hasattr(each, "placements") for each in parameters):
            raise CheckpointError(
                f"no model that is saved has all the parameters that {name} steps, of which each rank holds a part; "
                "save the model with it, and create one optimizer for each model"
            )
        return None

    def _models(self, kinds: Mapping[str, str], names: Sequence[str]) -> dict[str, Any]:
        """Return for each optimizer that shares its state over ranks the model among ``names`` that it steps."""
        models = {}
        for name in (name for name, kind in kinds.items() if kind == OPTIMIZER):
            models[name] = self._model_of(name, self._namespace()[name], names)
            if models[name] is None:
                raise CheckpointError(
                    f"no variable of the checkpoint is the model whose parameters {name} steps; create both first"
                )
        return models

    def _states(self, kinds: Mapping[str, str], models: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state dicts of models and optimizers, which are saved or filled."""
        there = self._namespace()
        found: dict[str, Any] = {}
        for name, kind in kinds.items():
            if kind == MODEL:
                found[name] = states.get_model_state_dict(there[name])
            elif kind == OPTIMIZER:
                with _without_gradients(there[name]):
                    found[name] = states.get_optimizer_state_dict(models[name], there[name], options=FLAT)
        return found

    def _put(
        self, kinds: Mapping[str, str], models: Mapping[str, Any], state: Mapping[str, Any], own: Mapping[str, bytes]
    ) -> None:
        """Fill models, optimizers and other objects with a state dict, and set the other variables."""
        there = self._namespace()
        for name, kind in kinds.items():
            if kind == MODEL:
                states.set_model_state_dict(there[name], state[name])
            elif kind == OPTIMIZER:
                states.set_optimizer_state_dict(models[name], there[name], state[name], options=FLAT)
            elif kind == STATE:
                there[name].load_state_dict(_unpickled(name, own[name]))
            else:
                there[name] = _unpickled(name, own[name])
        if RANDOM in own:
            _set_random_states(*_unpickled(RANDOM, own[RANDOM]))


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


class _OwnFiles(FileSystem):
    """Opens files of this user only: they are pickles, and loading one runs its code."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        try:
            descriptor = open_own(path)
        except PermissionError as error:
            if error.errno != errno.EPERM:
                raise
            raise CheckpointError(
                f"{path}: {error.strerror}, and loading a checkpoint runs code that is in it; "
                "%dist_load --trust-owner loads it all the same"
            ) from None
        with os.fdopen(descriptor, mode) as file:
            yield file


def _pickled(name: str, value: Any, kind: str) -> bytes:
    file = io.BytesIO()
    try:
        # cloudpickle also pickles functions and classes of cells. torch's protocol 2 would encode bytes as text.
        content = value.state_dict() if kind == STATE else value
        torch.save(content, file, pickle_module=cloudpickle, pickle_protocol=pickle.DEFAULT_PROTOCOL)
    except Exception as error:  # noqa: BLE001  (the value's own code may raise anything; it is reported)
        raise CheckpointError(f"{name} can't be saved: {type(error).__name__}: {error}") from None
    return file.getvalue()  # which shares the memory of the file


def _unpickled(name: str, data: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(data), map_location=_place, weights_only=False)
    except Exception as error:  # noqa: BLE001  (the value's own code may raise anything; it is reported)
        raise CheckpointError(f"{name} can't be loaded: {type(error).__name__}: {error}") from None


def _place(storage: Any, where: str) -> Any:
    """Move what was on a GPU to this rank's GPU, if it has one."""
    if where.startswith("cuda") and torch.cuda.is_available():
        return storage.cuda(torch.cuda.current_device())
    return storage


def _random_states() -> tuple[Any, ...]:
    """Return the states of the random number generators of Python, numpy and torch."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda  # noqa: NPY002


def _set_random_states(python: Any, numpy: Any, of_torch: torch.Tensor, cuda: torch.Tensor | None) -> None:
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002
    torch.set_rng_state(of_torch)
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)


def _from_rank_0(call: Callable[[], Path], written: Path | None = None) -> str:
    """Return rank 0's path on all ranks; an error on rank 0 is raised on every rank.

    ``written`` is the folder to which rank 0 writes.
    """
    reply: list[Any] = ["", ""]
    if dist.get_rank() == 0:
        try:
            reply[0] = str(call())
        except (CheckpointError, OSError) as error:
            reply[1] = f"the checkpoint can't be saved: {reason_of(error, written)}" if written else str(error)
    dist.broadcast_object_list(reply, src=0)
    if reply[1]:
        raise CheckpointError(reply[1])
    return str(reply[0])
