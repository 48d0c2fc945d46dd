"""Read objects without running any code of theirs.

Covers: attributes, items, names and kinds of objects, as far as they can be read without properties, ``__getattr__``,
``__dir__``, ``__class__``, ``__eq__`` or other code of their classes and metaclasses.
Does not cover: which object is asked for (``expressions``).

Attributes are found as by ``inspect.getattr_static``. The reader runs on another thread than the user's code, which may
be in the middle of a collective or hold a lock; so nothing is evaluated, and an attribute that would have to be is not
known. Of a property its return annotation is used. Classes are compared by identity: a metaclass may define ``==``.
"""

from __future__ import annotations

import builtins
import collections
import functools
import inspect
import sys
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

UNKNOWN = object()  # in place of a value that can't be read
DICTS = (dict, collections.OrderedDict, collections.defaultdict)

_FUNCTIONS = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType),
    *(types.WrapperDescriptorType, types.MethodWrapperType, types.ClassMethodDescriptorType),
)
_FIELDS = (types.MemberDescriptorType, types.GetSetDescriptorType)  # of classes written in C, and slots
_PROPERTIES = (property, functools.cached_property)
_OF_NAMED_TUPLE = type(collections.namedtuple("_One", "one").one)  # type: ignore[attr-defined]  # noqa: PYI024
_MRO = type.__dict__["__mro__"]
_CLASS_DICT = type.__dict__["__dict__"]
_MOST_ITEMS = 10_000  # of a dictionary in which a key is looked for
_NOT_RETURNED = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
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


def is_one_of(cls: Any, classes: Iterable[Any]) -> bool:
    """Whether a class is one of these."""
    return any(each is cls for each in classes)


def is_a(value: Any, cls: type | None) -> bool:
    """Whether a value is an instance of a class; unlike ``isinstance``, this never asks the value."""
    return is_one_of(cls, mro(class_of(value)))


def is_class(value: Any) -> bool:
    """Whether a value is a class."""
    return type(value) is not InstanceOf and is_a(value, type)


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
            if not is_one_of(type(descriptor), _FIELDS):
                return {}
            try:
                found = descriptor.__get__(value)
            except (AttributeError, TypeError):  # not set, or the descriptor of another class
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
    kind = type(found)
    if kind is staticmethod or kind is classmethod:
        return _BINDERS[id(kind)](found, UNKNOWN, cls)
    is_shown = is_one_of(kind, (*_FUNCTIONS, *_FIELDS, *_PROPERTIES)) or in_class(kind, "__get__") is UNKNOWN
    return found if is_shown else UNKNOWN


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
    if id(kind) in _BINDERS:
        return _BINDERS[id(kind)](found, value, cls)
    if kind is types.GetSetDescriptorType:
        return _of_tensor(cls, name)
    is_plain = is_one_of(kind, _FUNCTIONS) or in_class(kind, "__get__") is UNKNOWN
    return found if is_plain else UNKNOWN


def _field(found: Any, value: Any, cls: type) -> Any:
    """Return the value of a slot, or of a field of a named tuple, which is read in C."""
    try:
        return UNKNOWN if type(value) is InstanceOf else found.__get__(value, cls)
    except (AttributeError, TypeError):  # not set, or the descriptor of another class
        return UNKNOWN


def _method(function: Any, of: Any) -> Any:
    return types.MethodType(function, of) if type(function) is types.FunctionType else UNKNOWN


# By the ID of their classes: what the attributes of a class are for an instance.
_BINDERS: dict[int, Callable[[Any, Any, type], Any]] = {
    id(types.FunctionType): lambda found, value, _cls: _method(found, value),
    id(staticmethod): lambda found, _value, _cls: found.__func__,
    id(classmethod): lambda found, _value, cls: _method(found.__func__, cls),
    id(property): lambda found, _value, _cls: returned(found.fget),
    id(functools.cached_property): lambda found, _value, _cls: returned(found.func),
    id(types.MemberDescriptorType): _field,
    id(_OF_NAMED_TUPLE): _field,
}


def _of_tensor(cls: type, name: str) -> Any:
    if name not in _OF_TENSORS or not is_one_of(torch_class("Tensor"), mro(cls)):
        return UNKNOWN
    found = torch_class(_OF_TENSORS[name])
    return UNKNOWN if found is None else InstanceOf(found)


def torch_class(name: str, module: str = "torch") -> type | None:
    """Return a class of torch; None if it is not imported, or not completely."""
    found = sys.modules.get(module)
    return None if found is None else own_dict(found).get(name)


def is_module_of_torch(value: Any) -> bool:
    """Whether a value is a ``torch.nn.Module``."""
    return is_a(value, torch_class("Module", "torch.nn"))


def _module_dicts(value: Any) -> list[dict[str, Any]]:
    """Return the parameters, buffers and submodules of a module of torch."""
    if not is_module_of_torch(value):
        return []
    own = own_dict(value)
    return [own[name] for name in _MODULE_DICTS if is_one_of(type(own.get(name)), DICTS)]


def returned(function: Any) -> Any:
    """Return what a call returns, as far as the annotation of a function states it by a class."""
    function = function.__func__ if type(function) is types.MethodType else function
    if type(function) is not types.FunctionType or function.__code__.co_flags & _NOT_RETURNED:
        return UNKNOWN
    # Since 3.14 reading the annotations runs code.
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
    modules = _module_dicts(value)[-1:]
    if modules and type(key) is int:
        return item(list(modules[0].values()), key)
    if modules:
        return modules[0].get(key, UNKNOWN)
    kind = type(value)
    if is_one_of(kind, DICTS):
        held = list(dict.items(value)) if len(value) <= _MOST_ITEMS else ()
        return next((each for name, each in held if type(name) is type(key) and name == key), UNKNOWN)
    if (kind is list or kind is tuple) and type(key) is int and -len(value) <= key < len(value):
        return value[key]
    return UNKNOWN


def keys(value: Any) -> list[Any]:
    """Return the keys of Python's own dictionaries and torch's, as far as they are strings or numbers."""
    dicts = [value] if is_one_of(type(value), DICTS) else _module_dicts(value)[-1:]
    found = list(dict.keys(dicts[0])) if dicts else []
    return [key for key in found if type(key) is str or type(key) is int]


def names(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the attributes of a value that begin with a prefix, whatever the case, each with its kind.

    A name may occur several times: the first one counts. For kinds see :func:`kind_of`.
    """
    yield from kinds(own_dict(value), prefix)
    if is_a(value, types.ModuleType):
        return
    for cls in mro(value if is_class(value) else class_of(value)):
        yield from kinds(class_dict(cls), prefix)
    for each in _module_dicts(value):
        yield from kinds(each, prefix)


def kinds(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the names that begin with a prefix, whatever the case, each with the kind of its value."""
    lowered = prefix.lower()
    for name in [each for each in list(values) if type(each) is str and each.lower().startswith(lowered)]:
        yield name, kind_of(values.get(name))


def kind_of(value: Any) -> str:
    """Return the kind of a value, in the terms of Jupyter's completions."""
    kind = type(value)
    if is_one_of(kind, (*_FUNCTIONS, staticmethod, classmethod)):
        return "function"
    if is_one_of(kind, (*_PROPERTIES, *_FIELDS, _OF_NAMED_TUPLE)):
        return "property"
    if is_class(value):
        return "class"
    return "module" if is_a(value, types.ModuleType) else "instance"
