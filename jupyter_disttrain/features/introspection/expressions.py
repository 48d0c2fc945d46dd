"""Find the objects that expressions in a cell mean, without evaluating them.

Covers: names of the namespace and of the cell, attributes, items, what calls return.
Does not cover: reading attributes (``attributes``), which expression is meant (``cell_text``).
"""

from __future__ import annotations

import ast
import builtins
import sys
import types
from typing import TYPE_CHECKING, Any

from . import attributes
from .attributes import UNKNOWN, InstanceOf
from .cell_text import class_around, definitions, set_on_self

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_STEPS = 50  # of one expression, whose names may be defined by each other
_LITERALS: dict[type[ast.expr], type] = {ast.List: list, ast.Dict: dict, ast.Set: set, ast.Tuple: tuple}
_LITERALS |= {ast.ListComp: list, ast.DictComp: dict, ast.SetComp: set, ast.JoinedStr: str}


class Scope:
    """The names that code at the cursor of a cell can use: those of the namespace, and those that the cell defines."""

    def __init__(self, namespace: dict[str, Any], code: str, cursor: int) -> None:
        self._namespace = namespace
        self.definitions = definitions(code, cursor)
        self.cls = class_around(self.definitions, code, cursor)
        self._on_self = {} if self.cls is None else set_on_self(self.cls)
        self._steps = 0

    def value_of(self, expression: str) -> Any:
        """Return the object that an expression means; UNKNOWN if code would have to run to find it."""
        try:
            node = ast.parse(expression.strip(), mode="eval").body
        except (SyntaxError, ValueError):
            return UNKNOWN
        self._steps = 0
        return self._value(node)

    def _value(self, node: ast.expr) -> Any:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            return UNKNOWN
        if isinstance(node, ast.Name):
            return self._named(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            return self._of(attributes.called, self._value(node.func))
        if isinstance(node, ast.Subscript):
            return self._item(node)
        cls = type(node.value) if isinstance(node, ast.Constant) else _LITERALS.get(type(node))
        return UNKNOWN if cls is None else InstanceOf(cls)

    def _item(self, node: ast.Subscript) -> Any:
        try:
            key = ast.literal_eval(node.slice)
        except ValueError:
            return UNKNOWN
        return self._of(attributes.item, self._value(node.value), key) if type(key) in (str, int) else UNKNOWN

    @staticmethod
    def _of(step: Any, value: Any, *args: Any) -> Any:
        return UNKNOWN if value is UNKNOWN else step(value, *args)

    def _named(self, name: str) -> Any:
        """Return what a name means: what the cell assigns to it above the cursor, else the namespace's value."""
        found = self._namespace.get(name, UNKNOWN)
        assigned: Any = UNKNOWN
        if name in self.definitions.values:
            assigned = self._value(self.definitions.values[name])
        elif name in self.definitions.modules:
            assigned = self._imported(self.definitions.modules[name])
        if found is UNKNOWN:
            return vars(builtins).get(name, UNKNOWN) if assigned is UNKNOWN else assigned
        # The value of an earlier run has the attributes of its own, e.g. the layers of a model.
        is_of_class = attributes.class_of(assigned) is attributes.class_of(found)
        return found if assigned is UNKNOWN or is_of_class else assigned

    def _imported(self, dotted: str) -> Any:
        """Return what an import in the cell will bind, if its module is imported already."""
        first, *rest = dotted.split(".")
        value = sys.modules.get(first, UNKNOWN)
        for part in rest:
            value = self._of(attributes.attribute, value, part)
        return value

    def _attribute(self, node: ast.Attribute) -> Any:
        if self._is_self(node.value):
            expression = self._on_self.get(node.attr, UNKNOWN)
            if isinstance(expression, ast.expr):
                return self._value(expression)
            value = UNKNOWN
            for base in self._bases():
                value = attributes.attribute(InstanceOf(base), node.attr)
                if value is not UNKNOWN:
                    break
            return value
        return self._of(attributes.attribute, self._value(node.value), node.attr)

    def _is_self(self, node: ast.expr) -> bool:
        return self.cls is not None and isinstance(node, ast.Name) and node.id == "self"

    def _bases(self) -> list[type]:
        assert self.cls is not None
        found = [self._value(each) for each in self.cls.bases]
        return [each for each in found if attributes.is_class(each)]

    def attributes(self, expression: str, prefix: str) -> Iterator[tuple[str, str]]:
        """Yield the attributes of what an expression means: see ``attributes.names``."""
        if expression == "self" and self.cls is not None:
            for name, value in self._on_self.items():
                yield name, "function" if value is None else "instance"
            for base in self._bases():
                yield from attributes.names(InstanceOf(base), prefix)
            return
        value = self.value_of(expression)
        if value is not UNKNOWN:
            yield from attributes.names(value, prefix)

    def names(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Yield the names that code can use and that begin with a prefix: see ``attributes.names``."""
        yield from attributes.kinds(self._namespace, prefix)
        yield from self.definitions.kinds.items()
        yield from attributes.kinds(vars(builtins), prefix)


def function_of(value: Any) -> tuple[types.FunctionType, bool] | None:
    """Return the Python function that a call of a value runs, and whether its first parameter is given by the value.

    None if there is no such function, or it is not known.
    """
    if attributes.is_class(value):
        for name in ("__init__", "__new__"):
            found = attributes.in_class(value, name)
            found = found.__func__ if type(found) is staticmethod else found
            if type(found) is types.FunctionType:
                return _unwrapped(found), True
        return None
    if type(value) is types.MethodType:
        inner = value.__func__
        return (_unwrapped(inner), True) if type(inner) is types.FunctionType else None
    if type(value) is types.FunctionType:
        return _unwrapped(value), False
    name = "forward" if attributes.is_module_of_torch(value) else "__call__"
    found = attributes.in_class(attributes.class_of(value), name)
    return (_unwrapped(found), True) if type(found) is types.FunctionType else None


def _unwrapped(function: types.FunctionType) -> types.FunctionType:
    """Return the function that a decorator has wrapped."""
    for _ in range(_MOST_STEPS):
        inner = function.__dict__.get("__wrapped__")
        if type(inner) is not types.FunctionType:
            break
        function = inner
    return function
