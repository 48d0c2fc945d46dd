"""Check code that was written for a script and is pasted into a cell.

Covers: code that can't work in a cell, with the reason and the solution; backends that the ranks' devices can't have,
or that differ over ranks.
Does not cover: a cell's own process group (``rank.process_group.group``).
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from ...rank.libraries.import_hooks import on_import
from ...rank.output import user_code
from ...rank.process_group.store import RendezvousError

if TYPE_CHECKING:
    from ...protocol.ranks import RankInfo


class SpawnInCellError(RuntimeError):
    """A cell starts processes that can't import it."""

    # A process pool would show its place in this package as the cause.
    __cause__ = property(lambda _self: None, lambda _self, _cause: None)


LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")


def refuse_spawn() -> None:
    """Refuse in cells what starts processes to train on: ``mp.spawn``, and launchers for notebooks without ranks.

    Processes of ``mp.spawn`` could not import the cell's functions; forked ones would be ranks of ranks.
    """
    on_import("torch.distributed.launcher.api", _refuse_launches)
    import torch.multiprocessing as mp  # noqa: PLC0415

    inner = sys.modules["torch.multiprocessing.spawn"]  # the package has a function of this name
    for name in ("spawn", "start_processes"):
        refusing = _refusing(getattr(mp, name), name)
        setattr(mp, name, refusing)
        setattr(inner, name, refusing)


def _refusing(original: Any, name: str) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def spawn(*args: Any, **options: Any) -> Any:
        asked = signature.bind(*args, **options)
        asked.apply_defaults()
        fn = asked.arguments["fn"]
        if str(getattr(fn, "__module__", "")).split(".")[0] in LIGHTNING and not user_code.script_name():
            raise SpawnInCellError(
                "this strategy of Lightning starts its own processes, but the ranks are already such processes; use "
                "Trainer(strategy='ddp', devices=...) with the number of ranks"
            )
        of_cell = getattr(fn, "__module__", None) == "__main__" and not user_code.script_name()
        if of_cell and asked.arguments.get("start_method") != "fork":
            return _refuse(getattr(fn, "__name__", "fn"), name)
        return original(*args, **options)

    return spawn


def _refuse_launches(module: Any) -> None:
    """Refuse torchrun's launcher, by which ``accelerate.notebook_launcher`` starts processes, before it makes files."""
    original = module.LaunchConfig.__post_init__

    @functools.wraps(original)
    def prepare(self: Any) -> None:
        if not user_code.script_name():
            raise SpawnInCellError(
                "a launcher within a cell would start training processes, but the ranks are already such processes; "
                "call the launched function itself in the cell"
            )
        original(self)

    module.LaunchConfig.__post_init__ = prepare


def _refuse(function: str, name: str) -> NoReturn:
    raise SpawnInCellError(
        f"mp.{name} starts processes that import the function {function}, and a cell can't be imported; the ranks are "
        f"already such processes, so call {function}(rank, ...) in the cell, or run everything as a script: "
        "%dist_run --per-node train.py"
    )


def check_backend(backend: str | None, info: RankInfo, store: Any) -> None:
    """Refuse a backend that can't work before any rank waits for it; None lets torch choose.

    Raises ``RendezvousError`` if it needs GPUs and there are none, or if rank 0 has set another in ``store``.
    """
    wanted = (backend or "").lower()
    if "nccl" in wanted and not info.device.startswith("cuda"):
        raise RendezvousError(
            f"the backend {backend!r} needs a GPU, and rank {info.rank} on {info.host} has none; "
            "use init_process_group('gloo'), or leave the backend out"
        )
    if info.rank == 0:
        store.set("backend", wanted)
        return
    first = store.get("backend").decode()
    if first != wanted:
        raise RendezvousError(
            f"rank {info.rank} requests {_named(wanted)} and rank 0 {_named(first)}; use the same backend on all ranks"
        )


def _named(backend: str) -> str:
    return f"the backend {backend!r}" if backend else "the one that torch chooses"
