"""Hand what held an aborted process group the group that took its place.

Covers: variables, attributes, containers and closures; DistributedDataParallel, whose reducer is bound to its group.
Does not cover: making the group (``process_group``).
"""

from __future__ import annotations

import gc
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def replace_everywhere(pairs: Mapping[Any, Any]) -> None:
    """Put each new object where the old one is held: ``pairs`` is new by old, compared by identity."""
    by_id = {id(old): new for old, new in pairs.items()}
    ours = {id(pairs), id(by_id)}
    for holder in gc.get_referrers(*pairs):
        if id(holder) in ours:
            continue
        if isinstance(holder, dict):
            _replace_in_dict(holder, by_id)
        elif isinstance(holder, list):
            holder[:] = [by_id.get(id(value), value) for value in holder]
        elif isinstance(holder, types.CellType):
            holder.cell_contents = by_id.get(id(holder.cell_contents), holder.cell_contents)
        elif isinstance(getattr(holder, "__dict__", None), dict):
            # Since Python 3.11 an object may hold its attributes itself.
            _replace_in_dict(vars(holder), by_id)


def _replace_in_dict(holder: dict[Any, Any], by_id: Mapping[int, Any]) -> None:
    for key, value in list(holder.items()):
        if id(value) in by_id:
            holder[key] = by_id[id(value)]


def rearm_models() -> int:
    """Give each DistributedDataParallel a new reducer; returns how many there were.

    The old one belongs to the old group, and an iteration that was cut off leaves it waiting for its end. The steps are
    those that DistributedDataParallel takes itself when it is unpickled.
    """
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    # By type: asking a proxy for its class may make it do what it stands for.
    models = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
    models = [model for model in models if "reducer" in vars(model)]  # the others never came so far
    for model in models:
        _rearm(model)
    return len(models)


def _rearm(model: Any) -> None:
    parameters, expects_sparse = model._build_params_for_reducer()  # noqa: SLF001
    names = model._build_debug_param_to_name_mapping(parameters)  # noqa: SLF001
    model._ddp_init_helper(parameters, expects_sparse, names, model.static_graph)  # noqa: SLF001
    if model.static_graph:
        model.reducer._set_static_graph()  # noqa: SLF001
        model.logger._set_static_graph()  # noqa: SLF001
    hooks, model._comm_hooks = model._comm_hooks, []  # noqa: SLF001
    for hook, state in hooks:
        model.register_comm_hook(state, hook)
