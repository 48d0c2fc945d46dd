"""Make models usable in the process group that replaces an aborted one.

Covers: DistributedDataParallel, whose reducer is bound to its group; FSDP2, whose parameters stay unsharded after a
step that was interrupted.
Does not cover: making the group (``group``), replacing references to the old one (``object_replacement``).
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .object_replacement import thaw

if TYPE_CHECKING:
    from collections.abc import Iterator


def is_step_cut_off() -> bool:
    """Whether an FSDP2 model is in the middle of a forward or backward pass."""
    return any(
        state._state_ctx.post_backward_final_callback_queued  # noqa: SLF001
        or any(group._training_state.name != "IDLE" for group in _groups_of(state))  # noqa: SLF001
        for root in _sharded_roots()
        for state in root._get_fsdp_state()._state_ctx.all_states  # noqa: SLF001
    )


def reset_sharded_models() -> None:
    """Reset each model made by ``fully_shard`` after a step that an error or an interrupt has ended early.

    Its parameters are sharded again and the step's gradients are lost. All ranks must do this or none: a rank that
    still holds parameters which the others gather again would call fewer collectives. Has no effect with torch before
    2.13, which has no ``FSDPModule.reset_iter_state``.
    """
    for root in _sharded_roots():
        if not hasattr(root, "reset_iter_state"):
            return
        for state in root._get_fsdp_state()._state_ctx.all_states:  # noqa: SLF001
            for group in _groups_of(state):
                if getattr(group._all_gather_result, "all_gather_work", None) is not None:  # noqa: SLF001
                    group._all_gather_result = None  # noqa: SLF001  (torch would wait for it, perhaps forever)
                for parameter in group.fsdp_params:
                    parameter.to_sharded()  # torch only checks the group's state
        root.reset_iter_state()


def _sharded_roots() -> list[Any]:
    """Return the outermost FSDP2 modules that have run at least once."""
    fully_shard = sys.modules.get("torch.distributed.fsdp._fully_shard._fully_shard")
    if fully_shard is None or not fully_shard.FSDPModule.__subclasses__():  # it makes a subclass per type of module
        return []
    thaw()
    models = [thing for thing in gc.get_objects() if issubclass(type(thing), fully_shard.FSDPModule)]
    return [model for model in models if model._get_fsdp_state()._is_root]  # noqa: SLF001  (None: it never ran)


def _groups_of(state: Any) -> list[Any]:
    """Return a module's parameter groups; before torch 2.11 a module had only one."""
    one = getattr(state, "_fsdp_param_group", None)
    return list(getattr(state, "_fsdp_param_groups", [one] if one is not None else []))


# The parameters of each DistributedDataParallel that required gradients when it was made.
_made_with: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def remember_models() -> None:
    """Patch DistributedDataParallel to record the parameters with which each one is made."""
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    original = DistributedDataParallel._ddp_init_helper  # noqa: SLF001

    @functools.wraps(original)
    def helper(model: Any, parameters: Any, *args: Any, **options: Any) -> Any:
        _made_with.setdefault(model, list(parameters))
        return original(model, parameters, *args, **options)  # type: ignore[no-untyped-call]

    DistributedDataParallel._ddp_init_helper = helper  # type: ignore[method-assign,assignment]  # noqa: SLF001


def rearm_models() -> list[str]:
    """Give each DistributedDataParallel a new reducer; return descriptions of those for which this failed.

    The old reducer belongs to the old group, and after an interrupted iteration it still waits for the iteration's end.
    The steps are those of DistributedDataParallel itself when it is unpickled.
    """
    failed = []
    for model in list(_made_with):
        # The constructor sets the second of them at its end: a model without it was never completed, and the error's
        # traceback may still hold it.
        if not {"reducer", "_lazy_init_ran"} <= vars(model).keys():
            continue
        try:
            _rearm(model)
        except Exception as error:  # noqa: BLE001  (e.g. out of memory: one model must not end the session)
            name = type(model.module).__name__
            failed.append(f"DistributedDataParallel of {name} ({type(error).__name__}: {error}); create it again")
    return failed


def _rearm(model: Any) -> None:
    del model.reducer  # free its memory for the new one
    with _as_made(model):
        parameters, expects_sparse = model._build_params_for_reducer()  # noqa: SLF001
        names = model._build_debug_param_to_name_mapping(parameters)  # noqa: SLF001
        model._ddp_init_helper(parameters, expects_sparse, names, model.static_graph)  # noqa: SLF001
    if model.static_graph:
        model.reducer._set_static_graph()  # noqa: SLF001
        model.logger._set_static_graph()  # noqa: SLF001
    hooks, model._comm_hooks = model._comm_hooks, []  # noqa: SLF001
    for hook, state in hooks:
        model.register_comm_hook(state, hook)


@contextmanager
def _as_made(model: Any) -> Iterator[None]:
    """Set ``requires_grad`` as when the model was made: a parameter frozen since may be unfrozen later."""
    made_with = {id(parameter) for parameter in _made_with[model]}
    changed = [each for each in model.module.parameters() if each.requires_grad != (id(each) in made_with)]
    for parameter in changed:
        parameter.requires_grad_(not parameter.requires_grad)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)
