"""Describe values without running any code of theirs.

Covers: type, size, shape, data type, device, sharding, parameters of models, the text of plain values.
Does not cover: documentation and source (``inspection``).
"""

from __future__ import annotations

import sys
from typing import Any

from . import static_values
from .static_values import UNKNOWN, InstanceOf

_SHOWN = 200  # characters of a plain value's text
_BITS = 4096  # of a number whose text is made: the time for it grows with the square
_PLAIN = (bool, float, complex, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset, str, bytes, bytearray)


def type_name(cls: type) -> str:
    """Return the name of a class with its module, except for Python's own."""
    own = static_values.class_dict(cls)
    module, name = own.get("__module__"), type.__dict__["__qualname__"].__get__(cls)
    return f"{module}.{name}" if type(module) is str and module != "builtins" else str(name)


def summarize(value: Any) -> dict[str, str]:
    """Return what is known of a value, by the name of each property."""
    if type(value) is InstanceOf:
        return {"Type": type_name(value.cls)}
    found = {"Type": type_name(type(value))}
    text = plain_text(value)
    if text is not None:
        found["Value"] = text
    if type(value) in _CONTAINERS:
        found["Length"] = str(len(value))
    return found | _of_array(value) | _of_dtensor(value) | _of_model(value)


def plain_text(value: Any) -> str | None:
    """Return the text of a plain value, shortened; None for other values, whose classes would have to make it."""
    kind = type(value)
    if kind in _PLAIN or (kind is int and value.bit_length() <= _BITS):
        return repr(value)
    if kind in (str, bytes):
        return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}..."
    return None


def _of_array(value: Any) -> dict[str, str]:
    """Return shape, data type, device and size of a tensor, or of an array of numpy."""
    if type(value) in _tensor_types():  # not subclasses: theirs may be computed
        found = {"Shape": str(tuple(value.shape)), "Dtype": str(value.dtype), "Device": str(value.device)}
        if value.layout is not sys.modules["torch"].strided:
            return found | {"Layout": str(value.layout)}
        size = value.numel() * value.element_size()
        return found | {"Bytes": f"{size:,}"} | ({"Requires grad": "True"} if value.requires_grad else {})
    numpy = sys.modules.get("numpy")
    if numpy is not None and type(value) is numpy.ndarray:
        return {"Shape": str(value.shape), "Dtype": str(value.dtype), "Bytes": f"{value.nbytes:,}"}
    return {}


def _tensor_types() -> tuple[type, ...]:
    found = static_values.torch_class("Tensor"), static_values.torch_class("Parameter", "torch.nn")
    return tuple(each for each in found if each is not None)


def _of_dtensor(value: Any) -> dict[str, str]:
    """Return the shapes and placements of a DTensor, from its attributes."""
    own = static_values.own_dict(value)
    spec = own.get("_spec", UNKNOWN)
    if type(value).__name__ != "DTensor" or spec is UNKNOWN:
        return {}
    fields = static_values.own_dict(spec)
    meta = static_values.own_dict(fields.get("tensor_meta")) or {}
    shape = meta.get("shape") if meta else static_values.attribute(fields.get("tensor_meta"), "shape")
    local = _of_array(own.get("_local_tensor"))
    placements = fields.get("placements")
    texts = [_placement(each) for each in placements] if type(placements) is tuple else []
    found = {"Shape": str(tuple(shape))} if isinstance(shape, tuple) else {}
    found |= {"Placements": f"({', '.join(texts)})"} if texts else {}
    return found | {f"Local {name.lower()}": text for name, text in local.items()}


def _placement(value: Any) -> str:
    dim = static_values.attribute(value, "dim")
    return f"{type(value).__name__}({dim if type(dim) is int else ''})"


def _of_model(value: Any) -> dict[str, str]:
    """Return the number and the size of the parameters of a module of torch."""
    if not static_values.is_module_of_torch(value):
        return {}
    seen: dict[int, Any] = {}
    waiting, done = [value], set()
    while waiting:
        module = waiting.pop()
        if id(module) in done or not static_values.is_module_of_torch(module):
            continue
        done.add(id(module))
        own = static_values.own_dict(module)
        for each in list(own.get("_parameters", {}).values()):
            if type(each) in _tensor_types():
                seen[id(each)] = each
        waiting += list(own.get("_modules", {}).values())
    count = sum(each.numel() for each in seen.values())
    size = sum(each.numel() * each.element_size() for each in seen.values())
    return {"Parameters": f"{count:,} ({size:,} bytes)"} if seen else {}
