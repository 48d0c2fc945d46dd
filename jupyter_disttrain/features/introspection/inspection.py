"""Document the object at the cursor of a cell, on a rank.

Covers: signature, summary, documentation, file, source; magics.
Does not cover: which text is meant (``cell_text``), values (``summaries``), how other ranks differ (``client``).
"""

from __future__ import annotations

import inspect
import linecache
import re
import sys
import tokenize
import types
from typing import TYPE_CHECKING, Any

from . import attributes
from .attributes import UNKNOWN
from .cell_text import inspected_at
from .expressions import Scope, function_of
from .file_access import within_time
from .summaries import plain_text, summarize, type_name

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST_LINES = 400  # of a source
_WIDTH = 100  # of a signature in one line


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
    is_callable = function is not None and (_is_function(value) or attributes.is_class(value))
    if function is not None:
        found["Signature" if is_callable else "Call signature"] = _signature(name, *function)
    if not is_callable:
        found |= summarize(value)
    else:
        found["Type"] = type_name(attributes.class_of(value))
    defined = value if attributes.is_class(value) else function[0] if function and is_callable else None
    source = _source(defined) if with_source and defined is not None else ""
    if source:
        found["Source"] = source
    elif doc := _doc(value):
        found["Docstring"] = doc
    if attributes.is_class(value) and function is not None and (doc := _text(function[0].__doc__)) and not source:
        found["Init docstring"] = doc
    if isinstance(defined, types.FunctionType):
        found["File"] = defined.__code__.co_filename
    elif defined is not None and (module := _module_file(defined)):
        found["File"] = module
    return [[title, text] for title, text in found.items()]


def _is_function(value: Any) -> bool:
    return attributes.kind_of(value) == "function"


def _signature(name: str, function: types.FunctionType, is_first_given: bool) -> str:
    """Return how a function is called; a default whose text its class would have to make is shown by its type."""
    code = function.__code__
    count, keywords = code.co_argcount, code.co_kwonlyargcount
    named = list(code.co_varnames)
    # Since 3.14 reading the annotations runs code.
    annotations = function.__annotations__ if sys.version_info < (3, 14) else {}
    defaults = dict(zip(named[:count][::-1], (function.__defaults__ or ())[::-1], strict=False))
    defaults |= function.__kwdefaults__ or {}
    shown = [_parameter(each, annotations, defaults) for each in named[: count + keywords]]
    after = named[count + keywords :]
    positional, keyword_only = shown[:count], shown[count:]
    if code.co_posonlyargcount:
        positional.insert(code.co_posonlyargcount, "/")
    if code.co_flags & inspect.CO_VARARGS:
        positional.append(f"*{_parameter(after.pop(0), annotations, {})}")
    elif keyword_only:
        positional.append("*")
    if code.co_flags & inspect.CO_VARKEYWORDS:
        keyword_only.append(f"**{_parameter(after.pop(0), annotations, {})}")
    parameters = [*positional, *keyword_only]
    if is_first_given and count:
        parameters.pop(0)
    line = f"{name}({', '.join(parameters)})"
    return line if len(line) <= _WIDTH else f"{name}(\n    " + ",\n    ".join(parameters) + ",\n)"


def _parameter(name: str, annotations: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    annotation = annotations.get(name, UNKNOWN)
    of = annotation if type(annotation) is str else _annotation_text(annotation)
    text = f"{name}: {of}" if of else name
    if name not in defaults:
        return text
    value = defaults[name]
    default = plain_text(value)
    if default is None and type(value) is tuple:
        parts = [plain_text(each) or "..." for each in value]
        default = f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    default = default or f"<{type_name(type(value))}>"
    return f"{text} = {default}" if of else f"{text}={default}"


def _annotation_text(annotation: Any) -> str:
    """Return the text of an annotation of plain classes, as ``list[int] | None``; empty for others."""
    if attributes.is_class(annotation):
        return type_name(annotation)
    return repr(annotation).replace("typing.", "") if _is_of_plain_classes(annotation) else ""


def _is_of_plain_classes(annotation: Any) -> bool:
    if annotation is None or annotation is ... or type(annotation) is type:
        return True
    kind = type(annotation)
    if kind is types.GenericAlias or kind is types.UnionType:
        parts = annotation.__args__
    else:
        is_of_typing = attributes.class_dict(kind).get("__module__") == "typing"
        parts = attributes.own_dict(annotation).get("__args__") if is_of_typing else None
    return type(parts) is tuple and all(map(_is_of_plain_classes, parts))


def _doc(value: Any) -> str:
    if type(value) is attributes.InstanceOf:
        value = value.cls
    if attributes.is_class(value):
        for each in attributes.mro(value)[:1]:
            return _text(attributes.class_dict(each).get("__doc__"))
    if _is_function(value):
        return _text(value.__doc__)  # of Python's own types
    if attributes.is_a(value, types.ModuleType):
        return _text(attributes.own_dict(value).get("__doc__"))
    return ""


def _text(doc: Any) -> str:
    return inspect.cleandoc(doc) if type(doc) is str else ""


def _source(value: Any) -> str:
    """Return the source of a function or a class; empty if it is not found in time."""
    lines = within_time(lambda: _source_lines(value))
    more = [f"... ({len(lines) - _MOST_LINES} more lines)\n"] if len(lines) > _MOST_LINES else []
    return "".join([*lines[:_MOST_LINES], *more]).rstrip()


def _source_lines(value: Any) -> list[str]:
    if type(value) is types.FunctionType:
        lines = linecache.getlines(value.__code__.co_filename)
        first = value.__code__.co_firstlineno - 1
    else:
        lines = linecache.getlines(_module_file(value))
        begin = re.compile(rf"\s*class\s+{type_name(value).rpartition('.')[2]}\b")
        first = next((number for number, line in enumerate(lines) if begin.match(line)), len(lines))
    try:
        return inspect.getblock(lines[first:])
    except (SyntaxError, tokenize.TokenError):  # the file was changed
        return []


def _module_file(cls: type) -> str:
    module = sys.modules.get(attributes.class_dict(cls).get("__module__", ""))
    found = attributes.own_dict(module).get("__file__") if module is not None else None
    return found if type(found) is str else ""
