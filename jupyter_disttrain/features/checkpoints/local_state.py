"""Save and load a rank's own part of a checkpoint: plain values, state dicts, states of random number generators.

Covers: a file for each variable.
Does not cover: models and optimizers, of which each rank may hold a part (``rank``).
"""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

from .reader import opened
from .versions import CheckpointError, disk_error, sync

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

RANDOM = ".random"  # a file name that no variable can have


def has_state_dict(value: Any) -> bool:
    """Whether an object is saved as its ``state_dict()``, e.g. a scheduler or a scaler."""
    return callable(getattr(value, "load_state_dict", None)) and callable(getattr(value, "state_dict", None))


def write_values(folder: Path, values: Mapping[str, Any]) -> None:
    """Write each variable and the states of random number generators into files of their own.

    Raises
    ------
    CheckpointError
        If one can't be pickled or written; the message names it.
    """
    try:
        folder.mkdir()
    except OSError as error:
        raise CheckpointError(f"the checkpoint can't be saved: {disk_error(error, folder)}") from None
    for name, value in values.items():
        _write(folder / f"{name}.pt", value.state_dict() if has_state_dict(value) else value, name)
    _write(folder / f"{RANDOM}.pt", _random_states(), "random numbers")


def _write(path: Path, value: Any, name: str) -> None:
    import cloudpickle  # noqa: PLC0415
    import torch  # noqa: PLC0415

    try:
        torch.save(value, path, pickle_module=cloudpickle)  # which also pickles functions and classes of cells
        sync(path)
    except Exception as error:  # noqa: BLE001  (the value's own code may raise anything; it is reported)
        why = disk_error(error, path.parent) or f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{name} can't be saved: {why}") from None


def read_value(folder: Path, name: str, *, trust_owner: bool) -> Any:
    """Return a variable's saved value; tensors that were on a GPU are loaded to this rank's GPU, if it has one.

    Raises
    ------
    CheckpointError
        If it can't be loaded, or the file belongs to another user who is not trusted; the message names it.
    """
    import torch  # noqa: PLC0415

    try:
        with opened(folder / f"{name}.pt", trust_owner=trust_owner) as file:
            return torch.load(file, map_location=_place, weights_only=False)
    except (OSError, CheckpointError):
        raise
    except Exception as error:  # noqa: BLE001  (the value's own code may raise anything; it is reported)
        raise CheckpointError(f"{name} can't be loaded: {type(error).__name__}: {error}") from None


def _place(storage: Any, where: str) -> Any:
    import torch  # noqa: PLC0415

    if where.startswith("cuda") and torch.cuda.is_available():
        return storage.cuda(torch.cuda.current_device())
    return storage


def _random_states() -> dict[str, Any]:
    """Return the states of the random number generators of Python, numpy and torch."""
    import torch  # noqa: PLC0415

    numpy = sys.modules.get("numpy")
    return {
        "python": random.getstate(),
        "numpy": None if numpy is None else numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
    }


def set_random_states(folder: Path, *, trust_owner: bool) -> None:
    """Restore the saved states of random number generators."""
    import torch  # noqa: PLC0415

    with opened(folder / f"{RANDOM}.pt", trust_owner=trust_owner) as file:
        states = torch.load(file, map_location="cpu", weights_only=False)
    random.setstate(states["python"])
    if states["numpy"] is not None:
        import numpy as np  # noqa: PLC0415

        np.random.set_state(states["numpy"])  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
