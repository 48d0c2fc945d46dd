"""Read objects without running any code of theirs.

Covers: attributes, items, names and kinds of objects, as far as they can be read without properties, ``__getattr__``,
``__dir__``, ``__class__`` or other code of their classes.
Does not cover: which object is asked for (``expressions``).

Attributes are found as by ``inspect.getattr_static``. The reader runs on another thread than the user's code, which may
be in the middle of a collective or hold a lock; so nothing is evaluated, and an attribute that would have to be is not
known. Of a property its return annotation is used.
"""

from __future__ import annotations

import builtins
import collections
import functools
import sys
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

UNKNOWN = object()  # in place of a value that can't be read

_FUNCTIONS = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType),
    *(types.WrapperDescriptorType, types.MethodWrapperType, types.ClassMethodDescriptorType),
)
_FIELDS = (types.MemberDescriptorType, types.GetSetDescriptorType)  # of classes written in C, and slots
_MRO = type.__dict__["__mro__"]
_CLASS_DICT = type.__dict__["__dict__"]
_MODULE_DICTS = ("_parameters", "_buffers", "_modules")  # where torch.nn.Module keeps attributes
# Attributes of tensors, which are properties written in C, by the name of their class in torch.
_OF_TENSORS = dict.fromkeys(("T", "H", "mT", "mH", "data", "grad", "real", "imag"), "Tensor")
_OF_TENSORS |= {"shape": "Size", "dtype": "dtype", "device": "device", "layout": "layout"}


@dataclass(frozen=True, slots=True)
class InstanceOf:
    """A value of which only the class is known, e.g. the result of a call."""

    cls: type


def mro(cls: type) -> tuple[type, ...]:
    """Return a class and its base classes, in the order in which attributes are looked up."""
    return _MRO.__get__(cls)  # type: ignore[no-any-return]


def class_of(value: Any) -> type:
    """Return the class of a value, as the interpreter knows it."""
    return value.cls if type(value) is InstanceOf else type(value)


def is_a(value: Any, cls: type) -> bool:
    """Whether a value is an instance of a class; unlike ``isinstance``, this never asks the value."""
    return cls in mro(class_of(value))


def is_class(value: Any) -> bool:
    """Whether a value is a class."""
    return is_a(value, type)


def class_dict(cls: type) -> Mapping[str, Any]:
    """Return what a class itself defines."""
    return _CLASS_DICT.__get__(cls)  # type: ignore[no-any-return]


def own_dict(value: Any) -> dict[str, Any]:
    """Return the attributes that a value itself has; empty if it has none, or its class computes them."""
    if type(value) is InstanceOf:
        return {}
    for cls in mro(type(value)):
        descriptor = class_dict(cls).get("__dict__")
        if descriptor is not None:
            if type(descriptor) not in _FIELDS:
                return {}
            try:
                found = descriptor.__get__(value)
            except AttributeError:
                return {}
            return found if type(found) is dict else dict(found) if type(found) is types.MappingProxyType else {}
    return {}


def in_class(cls: type, name: str) -> Any:
    """Return what a class or one of its base classes defines, as it is stored there."""
    for each in mro(cls):
        found = class_dict(each).get(name, UNKNOWN)
        if found is not UNKNOWN:
            return found
    return UNKNOWN


def attribute(value: Any, name: str) -> Any:
    """Return the value of an attribute; UNKNOWN if there is none, or code would have to run."""
    if is_class(value):
        return _attribute_of_class(value, name)
    if is_a(value, types.ModuleType):
        return _attribute_of_module(value, name)
    cls = class_of(value)
    found = in_class(cls, name)
    own = own_dict(value)
    if name in own and not _is_data_descriptor(found):
        return own[name]
    if found is not UNKNOWN:
        return _bound(found, value, cls, name)
    for each in _module_dicts(value):
        if name in each:
            return each[name]
    return UNKNOWN


def _attribute_of_class(cls: type, name: str) -> Any:
    members = in_class(cls, "_member_map_")  # of an Enum
    if type(members) is dict and name in members:
        return members[name]
    found = in_class(cls, name)
    if type(found) is staticmethod:
        return found.__func__
    if type(found) is classmethod:
        return types.MethodType(found.__func__, cls)
    return found


def _attribute_of_module(module: Any, name: str) -> Any:
    own = own_dict(module)
    if name in own:
        return own[name]
    return sys.modules.get(f"{own.get('__name__')}.{name}", UNKNOWN)


def _is_data_descriptor(found: Any) -> bool:
    return found is not UNKNOWN and in_class(type(found), "__set__") is not UNKNOWN


def _bound(found: Any, value: Any, cls: type, name: str) -> Any:
    """Return what a class attribute is for an instance."""
    kind = type(found)
    if kind in _BINDERS:
        return _BINDERS[kind](found, value, cls)
    if kind is types.GetSetDescriptorType:
        return _of_tensor(cls, name)
    is_plain = kind in _FUNCTIONS or in_class(kind, "__get__") is UNKNOWN
    return found if is_plain else UNKNOWN


def _slot(found: Any, value: Any, _cls: type) -> Any:
    """Return the value of a slot, which is read in C."""
    try:
        return UNKNOWN if type(value) is InstanceOf else found.__get__(value)
    except AttributeError:
        return UNKNOWN


_BINDERS: dict[type, Callable[[Any, Any, type], Any]] = {
    types.FunctionType: lambda found, value, _cls: types.MethodType(found, value),
    staticmethod: lambda found, _value, _cls: found.__func__,
    classmethod: lambda found, _value, cls: types.MethodType(found.__func__, cls),
    property: lambda found, _value, _cls: returned(found.fget),
    functools.cached_property: lambda found, _value, _cls: returned(found.func),
    types.MemberDescriptorType: _slot,
}


def _of_tensor(cls: type, name: str) -> Any:
    if torch_class("Tensor") not in mro(cls) or name not in _OF_TENSORS:
        return UNKNOWN
    found = torch_class(_OF_TENSORS[name])
    return UNKNOWN if found is None else InstanceOf(found)


def torch_class(name: str, module: str = "torch") -> type | None:
    """Return a class of torch; None if it is not imported, or not completely."""
    found = sys.modules.get(module)
    return None if found is None else own_dict(found).get(name)


def is_module_of_torch(value: Any) -> bool:
    """Whether a value is a ``torch.nn.Module``."""
    return torch_class("Module", "torch.nn") in mro(class_of(value))


def _module_dicts(value: Any) -> list[dict[str, Any]]:
    """Return the parameters, buffers and submodules of a module of torch."""
    if not is_module_of_torch(value):
        return []
    own = own_dict(value)
    return [own[name] for name in _MODULE_DICTS if type(own.get(name)) in (dict, collections.OrderedDict)]


def returned(function: Any) -> Any:
    """Return what a call returns, as far as the annotation of a function states it by a class."""
    function = function.__func__ if type(function) is types.MethodType else function
    if type(function) is not types.FunctionType:
        return UNKNOWN
    annotation: Any = function.__annotations__.get("return", UNKNOWN) if sys.version_info < (3, 14) else UNKNOWN
    if type(annotation) is str:
        first, *rest = annotation.split(".")
        annotation = function.__globals__.get(first, vars(builtins).get(first, UNKNOWN))
        for part in rest:
            annotation = UNKNOWN if annotation is UNKNOWN else attribute(annotation, part)
    if annotation is Any or annotation is object or not is_class(annotation):
        return UNKNOWN
    return InstanceOf(annotation)


def called(value: Any) -> Any:
    """Return what a call of a value returns, as far as that is known: an instance of a class."""
    return InstanceOf(value) if is_class(value) else returned(value)


def item(value: Any, key: Any) -> Any:
    """Return ``value[key]`` of Python's own containers and torch's; UNKNOWN for others.

    ``key`` is a string or a number.
    """
    kind = type(value)
    for modules in (each for each in _module_dicts(value)[-1:] if type(key) in (int, str)):
        names = list(modules)
        return (
            modules[names[key]] if type(key) is int and -len(names) <= key < len(names) else modules.get(key, UNKNOWN)
        )
    if kind in (dict, collections.OrderedDict, collections.defaultdict):
        return dict.get(value, key, UNKNOWN)
    if kind in (list, tuple) and type(key) is int and -len(value) <= key < len(value):
        return value[key]
    return UNKNOWN


def keys(value: Any) -> list[Any]:
    """Return the keys of Python's own dictionaries and torch's, as far as they are strings or numbers."""
    found: list[Any] = []
    if type(value) in (dict, collections.OrderedDict, collections.defaultdict):
        found = list(value)
    elif dicts := _module_dicts(value):
        found = list(dicts[-1])
    return [key for key in found if type(key) in (str, int)]


def names(value: Any) -> Iterator[tuple[str, str]]:
    """Yield the attributes of a value, each with its kind: see :func:`kind_of`. A name may occur several times."""
    if type(value) is not InstanceOf:
        for name, each in list(own_dict(value).items()):
            yield name, kind_of(each)
    if is_a(value, types.ModuleType):
        return
    for cls in mro(value if is_class(value) else class_of(value)):
        for name, each in list(class_dict(cls).items()):
            yield name, kind_of(each)
    for each_dict in _module_dicts(value):
        for name in list(each_dict):
            yield name, "instance"


def kind_of(value: Any) -> str:
    """Return the kind of a value, in the terms of Jupyter's completions."""
    kind = type(value)
    if kind in _FUNCTIONS or kind in (staticmethod, classmethod):
        return "function"
    if kind in (property, functools.cached_property, *_FIELDS):
        return "property"
    if is_class(value):
        return "class"
    return "module" if is_a(value, types.ModuleType) else "instance"
