"""Serialize values for transport between a rank and the notebook.

Covers: pickling with tensors and arrays as separate buffers, both directions.
Does not cover: sending the buffers (``client.transport.link``), which names are sent (``client.cells.push_pull``).

A tensor's memory is passed as it is: no copy is made while pickling a contiguous CPU tensor, and none while unpickling.
CUDA tensors are copied to the CPU first. This module never imports torch by itself: the sender has imported it already,
and the receiver imports it only when a tensor arrives.
"""

from __future__ import annotations

import io
import pickle
import sys
from typing import TYPE_CHECKING, Any

import cloudpickle

from ..errors import UnserializableValueError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch


def dump_value(value: Any) -> tuple[bytes, list[memoryview]]:
    """Pickle a value, with large memory as separate buffers.

    Returns the pickle, and the memory that :func:`load_value` needs beside it, in order, each as plain bytes. Raises an
    UnserializableValueError if a part of the value can't be pickled; the message names the type and the reason.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    try:
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
        return stream.getvalue(), [buffer.raw() for buffer in buffers]
    except UnserializableValueError:
        raise
    except Exception as error:
        # A user's __reduce__ may raise anything; every error means that this value can't be sent.
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise UnserializableValueError(f"a {kind} can't be sent: {type(error).__name__}: {error}") from error


def dump_values(values: Mapping[str, Any]) -> tuple[bytes, list[memoryview]]:
    """Pickle named values as one dict, so that objects they share stay shared.

    Raises an UnserializableValueError if a value can't be pickled; the message names each such value.
    """
    try:
        return dump_value(dict(values))
    except UnserializableValueError:
        reasons = list(_refusals(values))
        if not reasons:
            raise
        raise UnserializableValueError("; ".join(reasons)) from None


def check_whole(values: Mapping[str, Any]) -> None:
    """Refuse an optimizer without its parameters: the received one would step copies that no model uses.

    Raises an UnserializableValueError if an optimizer or a scheduler is to be sent without its parameters or its
    optimizer; the message names it.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    parts = list(_parts(values))
    modules = [part for part in parts if isinstance(part, torch.nn.Module)]
    there = {id(part) for part in (*parts, *(each for module in modules for each in module.parameters()))}
    for name, value in values.items():
        needed: list[Any] = []
        if isinstance(value, torch.optim.Optimizer):
            needed, what = [each for group in value.param_groups for each in group["params"]], "the model"
        elif isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            needed, what = [value.optimizer], "the optimizer"
        if any(id(each) not in there for each in needed):
            raise UnserializableValueError(
                f"{name}: it belongs to {what} that it was created with; name that too, or copy a variable that holds "
                f"{name}.state_dict()"
            )


def _parts(value: Any) -> Iterator[Any]:
    """Yield the values in nested containers."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _parts(each)
    else:
        yield value


def _refusals(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        try:
            dump_value(value)
        except UnserializableValueError as error:
            yield f"{name}: {error}"


def load_value(pickled: bytes | memoryview, buffers: Iterable[Any]) -> Any:
    """Undo :func:`dump_value`; arrays and tensors use the memory of ``buffers``."""
    return pickle.loads(pickled, buffers=buffers)  # noqa: S301  (the channel is signed; a rank runs any code anyway)


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, with tensors as buffers."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.nn.parallel.DistributedDataParallel):
            raise UnserializableValueError(
                "a DistributedDataParallel belongs to its process group; give its state a name and send that: "
                "state = model.module.state_dict()"
            )
        if torch is not None and isinstance(obj, torch.Tensor) and (reduced := _reduce_tensor(obj, torch)) is not None:
            return reduced
        return super().reducer_override(obj)


def _reduce_tensor(tensor: torch.Tensor, torch: Any) -> Any:
    if type(tensor).__name__ == "DTensor":
        raise UnserializableValueError(
            "a DTensor is sharded over the ranks; send x.full_tensor() (called on all its ranks) or x.to_local()"
        )
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not plain or tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return None  # torch's own reduction
    data = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    memory: Any = data.flatten().view(torch.uint8).numpy() if data.numel() else b""
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    name = str(tensor.dtype).removeprefix("torch.")
    return _rebuild_tensor, (pickle.PickleBuffer(memory), name, tuple(tensor.shape), tensor.requires_grad, is_parameter)


def _rebuild_tensor(memory: Any, dtype: str, shape: tuple[int, ...], requires_grad: bool, is_parameter: bool) -> Any:
    import torch  # noqa: PLC0415  (only a process that receives a tensor pays for it)

    kind = getattr(torch, dtype)
    view = memoryview(memory)
    if view.nbytes:
        tensor = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=kind).reshape(shape)
    else:
        tensor = torch.empty(shape, dtype=kind)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def load_from(rank: int, buffers: Sequence[Any]) -> Any:
    """Unpickle what a rank sent.

    Raises an UnserializableValueError if the notebook can't unpickle it, e.g. because its module is installed for the
    ranks only.
    """
    try:
        return load_value(buffers[0], buffers[1:])
    except Exception as error:
        # Unpickling runs the value's own code, which may raise anything.
        raise UnserializableValueError(
            f"the value of rank {rank} can't be read in the notebook: {type(error).__name__}: {error}"
        ) from error
