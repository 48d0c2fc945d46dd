"""Document the object at the cursor of a cell, on a rank.

Covers: signature, summary, documentation, file, source; magics.
Does not cover: which text is meant (``cell_text``), values (``summaries``), how other ranks differ (``client``).
"""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any

from ...rank.own_process import has_standard_files
from . import static_values
from .cell_text import inspected_at
from .expressions import Scope, function_of
from .static_values import UNKNOWN
from .summaries import plain_text, summarize, type_name

_MOST_LINES = 400  # of a source
_WIDTH = 100  # of a signature in one line
_STARS: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def inspect_at(shell: Any, code: str, cursor: int, *, with_source: bool) -> dict[str, Any]:
    """Return the ``sections`` that document what is at the cursor, as titles and texts; empty if it is not known."""
    scope = Scope(shell.user_ns, code, cursor)
    for expression in inspected_at(code, cursor):
        if expression.startswith("%"):
            value = shell.find_magic(expression.lstrip("%"), "cell" if expression.startswith("%%") else "line")
            value = UNKNOWN if value is None else value
        else:
            value = scope.value_of(expression)
        if value is not UNKNOWN:
            return {"name": expression, "sections": _sections(expression, value, with_source=with_source)}
    return {"name": "", "sections": []}


def _sections(name: str, value: Any, *, with_source: bool) -> list[list[str]]:
    found: dict[str, str] = {}
    function = function_of(value)
    is_callable = function is not None and (_is_function(value) or static_values.is_class(value))
    if function is not None:
        found["Signature" if is_callable else "Call signature"] = _signature(name, *function)
    if not is_callable:
        found |= summarize(value)
    else:
        found["Type"] = type_name(static_values.class_of(value))
    defined = value if static_values.is_class(value) else function[0] if function and is_callable else None
    source = _source(defined) if with_source and defined is not None else ""
    if source:
        found["Source"] = source
    elif doc := _doc(value):
        found["Docstring"] = doc
    if static_values.is_class(value) and function is not None and (doc := _text(function[0].__doc__)) and not source:
        found["Init docstring"] = doc
    if isinstance(defined, types.FunctionType):
        found["File"] = defined.__code__.co_filename
    elif defined is not None and (module := _module_file(defined)):
        found["File"] = module
    return [[title, text] for title, text in found.items()]


def _is_function(value: Any) -> bool:
    return static_values.kind_of(value) == "function"


def _signature(name: str, function: types.FunctionType, is_first_given: bool) -> str:
    """Return how a function is called; a default whose text its class would have to make is shown by its type."""
    try:
        signature = inspect.Signature.from_callable(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return f"{name}(...)"
    parameters = list(signature.parameters.values())[int(is_first_given) :]
    shown = [_parameter(each) for each in parameters]
    for index, each in enumerate(parameters):
        if each.kind is each.KEYWORD_ONLY and (
            index == 0 or parameters[index - 1].kind not in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        ):
            shown[index] = f"*, {shown[index]}"
        if each.kind is each.POSITIONAL_ONLY and (
            index + 1 == len(parameters) or parameters[index + 1].kind is not each.POSITIONAL_ONLY
        ):
            shown[index] = f"{shown[index]}, /"
    line = f"{name}({', '.join(shown)})"
    if len(line) <= _WIDTH:
        return line
    return f"{name}(\n    " + ",\n    ".join(shown) + ",\n)"


def _parameter(parameter: inspect.Parameter) -> str:
    text = f"{_STARS.get(parameter.kind, '')}{parameter.name}"
    annotation = parameter.annotation
    if annotation is not parameter.empty:
        of = annotation if type(annotation) is str else _annotation(annotation)
        text += f": {of}" if of else ""
    if parameter.default is not parameter.empty:
        default = plain_text(parameter.default)
        if default is None and type(parameter.default) is tuple:
            parts = [plain_text(each) or "..." for each in parameter.default]
            default = f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
        default = default or f"<{type_name(type(parameter.default))}>"
        text += f" = {default}" if annotation is not parameter.empty else f"={default}"
    return text


def _annotation(annotation: Any) -> str:
    """Return the text of an annotation that is a class, or of Python's ``typing``; empty for others."""
    if static_values.is_class(annotation):
        return type_name(annotation)
    if type(annotation).__module__ in ("typing", "types"):  # their texts contain only names of classes
        return repr(annotation).replace("typing.", "")
    return ""


def _doc(value: Any) -> str:
    if type(value) is static_values.InstanceOf:
        value = value.cls
    if static_values.is_class(value):
        for each in static_values.mro(value)[:1]:
            return _text(static_values.class_dict(each).get("__doc__"))
    if _is_function(value):
        return _text(value.__doc__)  # of Python's own types
    if static_values.is_a(value, types.ModuleType):
        return _text(static_values.own_dict(value).get("__doc__"))
    return ""


def _text(doc: Any) -> str:
    return inspect.cleandoc(doc) if type(doc) is str else ""


def _source(value: Any) -> str:
    if not has_standard_files():  # a cell has closed one; it is restored at the cell's end
        return ""
    try:
        lines, _ = inspect.getsourcelines(value)
    except (OSError, TypeError, SyntaxError):
        return ""
    more = [f"... ({len(lines) - _MOST_LINES} more lines)\n"] if len(lines) > _MOST_LINES else []
    return "".join([*lines[:_MOST_LINES], *more]).rstrip()


def _module_file(cls: type) -> str:
    module = sys.modules.get(static_values.class_dict(cls).get("__module__", ""))
    found = static_values.own_dict(module).get("__file__") if module is not None else None
    return found if type(found) is str else ""
