"""Describe values without running any code of theirs.

Covers: type, size, shape, data type, device, sharding, parameters of models, the text of plain values; all variables of
a rank.
Does not cover: documentation and source (``inspection``).
"""

from __future__ import annotations

import sys
from typing import Any

from ...protocol.ranks import size_text
from . import attributes
from .attributes import InstanceOf

_SHOWN = 200  # characters of a plain value's text
_BITS = 4096  # of a number whose text is made: the time for it grows with the square
_HOLD_NOTHING = frozenset({bool, int, float, complex, type(None), str, bytes})
_PLAIN = (bool, float, complex, type(None))
_PLACEMENTS = "torch.distributed.tensor.placement_types"  # the module of a DTensor's placements
_CONTAINERS = (list, tuple, dict, set, frozenset, str, bytes, bytearray)


def type_name(cls: type) -> str:
    """Return the name of a class with its module, except for Python's own."""
    own = attributes.class_dict(cls)
    module, name = own.get("__module__"), type.__dict__["__qualname__"].__get__(cls)
    return f"{module}.{name}" if type(module) is str and module != "builtins" else str(name)


def summarize(value: Any) -> dict[str, str]:
    """Return what is known of a value, by the name of each property, with the bytes of its tensors."""
    size_bytes = size_of(value)
    return describe(value) if size_bytes is None else describe(value) | {"Size": size_text(size_bytes)}


def describe(value: Any) -> dict[str, str]:
    """Return the same without the bytes, for which all that the value holds has to be read."""
    if type(value) is InstanceOf:
        return {"Type": type_name(value.cls)}
    found = {"Type": type_name(type(value))}
    text = plain_text(value)
    if text is not None:
        found["Value"] = text
    if attributes.is_one_of(type(value), _CONTAINERS):
        found["Length"] = str(len(value))
    return found | _of_array(value) | _of_dtensor(value) | _of_model(value)


def plain_text(value: Any) -> str | None:
    """Return the text of a plain value, shortened; None for other values, whose classes would have to make it."""
    kind = type(value)
    if attributes.is_one_of(kind, _PLAIN) or (kind is int and value.bit_length() <= _BITS):
        return repr(value)
    if kind is str or kind is bytes:
        return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}..."
    return None


def variables(shell: Any) -> dict[str, Any]:
    """Return the user's variables, and the bytes of all their tensors and arrays.

    Modules, functions, classes and the names that every rank has are left out.
    """
    given = shell.given()
    found: list[dict[str, Any]] = []
    all_arrays: dict[int, Any] = {}
    for name in list(shell.user_ns):
        value = shell.user_ns.get(name)
        is_hidden = name.startswith("_") or name in shell.user_ns_hidden or (name in given and given[name] is value)
        if not is_hidden and attributes.kind_of(value) == "instance":
            arrays = _arrays_in(value)
            size = {"Size": size_text(_total(arrays))} if arrays else {}
            size_bytes = _total(arrays) if arrays else None
            found.append({"name": name, "properties": describe(value) | size, "size_bytes": size_bytes})
            all_arrays |= arrays
    return {"variables": found, "tensor_bytes": _total(all_arrays)}


def size_of(value: Any) -> int | None:
    """Return the bytes of the tensors and arrays that a value holds; None if it is known to hold none, or not known.

    Counted are tensors and arrays of numpy, those in Python's own containers, parameters and buffers of models, and
    states of optimizers; each once, and of views only their own elements.
    """
    arrays = _arrays_in(value)
    return _total(arrays) if arrays else None


def _total(arrays: dict[int, Any]) -> int:
    return sum(map(_bytes, arrays.values()))


def _arrays_in(value: Any) -> dict[int, Any]:
    """Return the tensors and arrays that a value holds, by their ids."""
    arrays: dict[int, Any] = {}
    waiting, seen = [value], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if _is_array(each):
            arrays[id(each)] = each
        else:
            waiting += [held for held in _held(each) if type(held) not in _HOLD_NOTHING]
    return arrays


def _held(value: Any) -> list[Any]:
    """Return what a container, a model, an optimizer or a DTensor holds."""
    kind = type(value)
    if attributes.is_one_of(kind, (list, tuple, set, frozenset)):
        return list(value)
    if attributes.is_one_of(kind, attributes.DICTS):
        return list(dict.values(value))
    own = attributes.own_dict(value)
    if attributes.is_module_of_torch(value):
        return [own.get(name) for name in ("_parameters", "_buffers", "_modules")]
    if attributes.is_a(value, attributes.torch_class("Optimizer", "torch.optim.optimizer")):
        return [own.get("state")]
    return [attributes.attribute(value, "_local_tensor")] if _is_dtensor(value) else []


def _is_dtensor(value: Any) -> bool:
    return attributes.is_a(value, attributes.torch_class("DTensor", "torch.distributed.tensor"))


def _is_tensor(value: Any) -> bool:
    """Whether a value is a tensor of no subclass: the properties of subclasses may be computed."""
    found = attributes.torch_class("Tensor"), attributes.torch_class("Parameter", "torch.nn")
    return attributes.is_one_of(type(value), found)


def _is_array(value: Any) -> bool:
    """Whether a value is such a tensor with a shape, or an array of numpy."""
    if _is_tensor(value):
        return not value.is_nested
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is attributes.own_dict(numpy).get("ndarray")


def _bytes(value: Any) -> int:
    if not _is_tensor(value):
        return int(value.nbytes)
    is_dense = value.layout is sys.modules["torch"].strided
    return int(value.numel() * value.element_size()) if is_dense else 0


def _of_array(value: Any) -> dict[str, str]:
    """Return shape, data type and device of a tensor, or of an array of numpy."""
    if not _is_array(value):
        return {}
    found = {"Shape": str(tuple(value.shape)), "Dtype": str(value.dtype).removeprefix("torch.")}
    if not _is_tensor(value):
        return found
    found |= {"Device": str(value.device)} | ({"Requires grad": "True"} if value.requires_grad else {})
    is_dense = value.layout is sys.modules["torch"].strided
    return found if is_dense else found | {"Layout": str(value.layout)}


def _of_dtensor(value: Any) -> dict[str, str]:
    """Return the shape, the placements and the local part of a DTensor, from its attributes."""
    if not _is_dtensor(value):
        return {}
    spec = attributes.attribute(value, "_spec")
    shape = attributes.attribute(attributes.attribute(spec, "tensor_meta"), "shape")
    placements = attributes.attribute(spec, "placements")
    local = _of_array(attributes.attribute(value, "_local_tensor"))
    found = {"Shape": str(tuple(shape))} if attributes.is_a(shape, tuple) else {}
    if type(placements) is tuple:
        found["Placements"] = f"({', '.join(map(_placement, placements))})"
    return found | {f"Local {name.lower()}": text for name, text in local.items()}


def _placement(value: Any) -> str:
    """Return a placement as torch writes it; that of torch's own classes is read in C."""
    name = type_name(type(value))
    dim = getattr(value, "dim", None) if name.startswith(f"{_PLACEMENTS}.") else None
    return f"{name.rpartition('.')[2]}({dim if type(dim) is int else ''})"


def _of_model(value: Any) -> dict[str, str]:
    """Return the number of parameters of a module of torch."""
    if not attributes.is_module_of_torch(value):
        return {}
    counts: dict[int, int] = {}
    waiting, seen = [value], set()
    while waiting:
        own = attributes.own_dict(waiting.pop())
        for each in list(own.get("_parameters", {}).values()):
            if _is_tensor(each):
                counts[id(each)] = each.numel()
        for each in list(own.get("_modules", {}).values()):
            if id(each) not in seen:
                seen.add(id(each))
                waiting.append(each)
    return {"Parameters": f"{sum(counts.values()):,}"} if counts else {}
