"""Find out what the text at the cursor of a cell is.

Covers: names, attributes, keys, arguments of calls, imports, paths, magics; which names the cell itself defines.
Does not cover: the objects that are meant (``expressions``).

A cell at whose end the user types is rarely valid Python. So the text before the cursor is scanned backwards, with the
contents of strings and comments masked; only what the cell defines is found by parsing it without the cursor's line.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field, replace
from typing import Literal

Kind = Literal["name", "attribute", "key", "path", "import", "magic", "nothing"]

_TOKEN = re.compile(
    r"(?P<comment>\#[^\n]*)|(?P<prefix>\b[rbfuRBFU]{1,2})?(?P<quote>'''|\"\"\"|'|\")|(?P<other>[^'\"\#]+?(?=[rbfuRBFU]{0,2}['\"]|\#|\Z))"
)
_PAIRS = {")": "(", "]": "[", "}": "{"}
_IMPORT = re.compile(r"\s*(?:import|from)\s+(?:[\w.]+(?:\s+as\s+\w+)?\s*,\s*)*(?P<part>[\w.]*)$")
_IMPORT_FROM = re.compile(
    r"\s*from\s+(?P<of>[\w.]+)\s+import\s+(?:\(\s*)?(?:\w+(?:\s+as\s+\w+)?\s*,\s*)*(?P<part>\w*)$"
)
_MAGIC = re.compile(r"^\s*(?P<text>%{0,2}[\w.]*)\Z")
_MAGIC_OF_CODE = re.compile(r"\s*%(?:time|timeit|prun)\s+(?:-\S+\s+)*")
_NAME = re.compile(r"\w*\Z")
_ARGUMENT = re.compile(r"[(,]\s*$")
_BLANKED = re.compile(r"[^\n]")
_BARE_PATH = re.compile(r"[^\s=\"']*$")


@dataclass(frozen=True, slots=True)
class Place:
    """What is at the cursor.

    ``start`` is where the text to complete begins, ``prefix`` is that text. ``base`` is the expression before it: whose
    attribute or key it is, or the module from which it is imported. ``callee`` is the function whose argument it may
    name; empty if it can't be one.
    """

    kind: Kind
    start: int
    prefix: str = ""
    base: str = ""
    callee: str = ""
    quote: str = ""  # of a key that is being typed


@dataclass(slots=True)
class Definitions:
    """What a cell defines by itself, without having run."""

    kinds: dict[str, str] = field(default_factory=dict)  # by name: see ``attributes.kind_of``
    values: dict[str, ast.expr] = field(default_factory=dict)  # by name: the expression of its last assignment
    modules: dict[str, str] = field(default_factory=dict)  # by name: what it is imported from, with dots
    classes: list[ast.ClassDef] = field(default_factory=list)


def place_at(code: str, cursor: int) -> Place:
    """Return what is to be completed at a position of a cell."""
    before = code[:cursor]
    masked, string, is_comment = mask(before)
    line_start = before.rfind("\n") + 1
    line = before[line_start:]
    if is_comment:
        return Place("nothing", cursor)
    if string is not None:
        return _in_string(before, masked, string)
    if line.lstrip().startswith(("!", "%")):
        return _in_magic(line, line_start, cursor)
    return _in_import(line, cursor) or _in_expression(before, masked)


def _in_import(line: str, cursor: int) -> Place | None:
    if imported := _IMPORT_FROM.match(line):
        part = imported["part"]
        return Place("import", cursor - len(part), part, imported["of"], callee="from")
    if imported := _IMPORT.match(line):
        base, _, prefix = imported["part"].rpartition(".")
        return Place("import", cursor - len(prefix), prefix, base)
    return None


def _in_expression(before: str, masked: str) -> Place:
    name = _NAME.search(before)
    assert name is not None  # it also matches the empty string
    start, prefix = name.start(), name[0]
    is_attribute = masked[:start].endswith(".")
    # A chain of calls may go on in the next line.
    base = expression_before(before, masked, len(masked[: start - 1].rstrip())) if is_attribute else ""
    if prefix[:1].isdigit() or (is_attribute and not base):
        return Place("nothing", len(before))
    if is_attribute:
        return Place("attribute", start, prefix, base)
    opening = opening_before(masked, start)
    callee = ""
    if opening is not None and masked[opening] == "[" and not before[opening + 1 :].strip():
        base = expression_before(before, masked, opening)
    elif opening is not None and masked[opening] == "(" and _ARGUMENT.search(masked[:start]):
        callee = expression_before(before, masked, opening)
    return Place("key" if base else "name", start, prefix, base, callee)


def inspected_at(code: str, cursor: int) -> list[str]:
    """Return the expressions that may be meant at a position: first what it touches, then the call around it."""
    end = cursor
    while end < len(code) and (code[end].isalnum() or code[end] == "_"):
        end += 1
    before = code[:end]
    masked, string, is_comment = mask(before)
    if is_comment:
        return []
    found = []
    line = before[before.rfind("\n") + 1 :].strip()
    if re.fullmatch(r"%{1,2}\w+", line):
        return [line]
    if string is None and before[-1:].isidentifier() | before[-1:].isdigit():
        found.append(expression_before(before, masked, end))
    elif string is None and before[-1:] in {")", "]", "("}:
        found.append(expression_before(before, masked, end - (before[-1:] == "(")))
    opening = opening_before(masked, string if string is not None else len(masked))
    while opening is not None:
        if masked[opening] == "(":
            found.append(expression_before(before, masked, opening))
            break
        opening = opening_before(masked, opening)
    return [each for each in dict.fromkeys(found) if each]


def mask(text: str) -> tuple[str, int | None, bool]:
    """Replace the contents of strings and comments by spaces.

    Returns the text, where a string begins that is not closed, and whether the end is in a comment.
    """
    parts, position = [], 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        assert token is not None  # one of its branches always matches
        if token["comment"] is not None:
            parts.append(" " * len(token[0]))
            position = token.end()
            if position == len(text):
                return "".join(parts), None, True
            continue
        if token["quote"] is None:
            parts.append(token[0])
            position = token.end()
            continue
        quote, begin = token["quote"], token.end()
        end = _end_of_string(text, begin, quote)
        if end is None:
            return "".join(parts) + _BLANKED.sub(" ", text[position:]), position, False
        if end < 0:  # not closed in its line
            end = -end
            parts.append(" " * (end - position))
        else:
            parts.append(f'"{_BLANKED.sub(" ", text[position + 1 : end - 1])}"')
        position = end
    return "".join(parts), None, False


def _end_of_string(text: str, begin: int, quote: str) -> int | None:
    """Return where a string ends; None if it is open at the text's end, negative if its line ends before."""
    position = begin
    while position < len(text):
        if text[position] == "\\":
            position += 2
        elif text.startswith(quote, position):
            return position + len(quote)
        elif text[position] == "\n" and len(quote) == 1:
            return -position
        else:
            position += 1
    return None


def expression_before(text: str, masked: str, end: int) -> str:
    """Return the expression of names, attributes, calls and subscripts that ends at a position; empty without one."""
    position = end
    while position > 0:
        char = masked[position - 1]
        if char in _PAIRS:
            opening = opening_before(masked, position - 1)
            if opening is None or masked[opening] != _PAIRS[char]:
                return ""
            position = opening
            if position and (masked[position - 1].isalnum() or masked[position - 1] in "_)]"):
                continue
            break
        if char == '"' and position == end:
            opening = masked.rfind('"', 0, position - 1)
            return text[opening:end] if opening >= 0 else ""
        if not (char.isalnum() or char == "_"):
            break
        while position > 0 and (masked[position - 1].isalnum() or masked[position - 1] == "_"):
            position -= 1
        if position > 0 and masked[position - 1] == ".":
            position -= 1
            continue
        break
    found = text[position:end]
    return "" if not found or found[0] in ".0123456789" else found


def opening_before(masked: str, end: int) -> int | None:
    """Return where the innermost bracket is that is open at a position; None if there is none."""
    closed = 0
    for position in range(end - 1, -1, -1):
        char = masked[position]
        if char in ")]}":
            closed += 1
        elif char in "([{":
            if not closed:
                return position
            closed -= 1
    return None


def _in_string(before: str, masked: str, string: int) -> Place:
    opened = re.match(r"[a-zA-Z]*(?:'''|\"\"\"|'|\")", before[string:])
    assert opened is not None
    start = string + opened.end()
    content = before[start:]
    brace = content.replace("{{", "  ").rfind("{")
    if "f" in opened[0].lower() and brace > content.rfind("}"):  # an expression of an f-string
        place = place_at(content[brace + 1 :], len(content) - brace - 1)
        return replace(place, start=place.start + start + brace + 1)
    opening = opening_before(masked, string)
    if opening is not None and masked[opening] == "[" and not before[opening + 1 : string].strip():
        base = expression_before(before, masked, opening)
        if base:
            return Place("key", start, content, base, quote=opened[0])
    begin = content.rfind("/") + 1
    return Place("path", start + begin, content[begin:], content[:begin])


def _in_magic(line: str, line_start: int, cursor: int) -> Place:
    if of_code := _MAGIC_OF_CODE.match(line):
        place = place_at(line[of_code.end() :], len(line) - of_code.end())
        return replace(place, start=place.start + line_start + of_code.end())
    magic = _MAGIC.match(line)
    if magic is not None:
        return Place("magic", line_start + magic.start("text"), magic["text"])
    path = _BARE_PATH.search(line)
    assert path is not None
    begin = path[0].rfind("/") + 1
    return Place("path", cursor - len(path[0]) + begin, path[0][begin:], path[0][:begin])


def definitions(code: str, cursor: int) -> Definitions:
    """Return what a cell defines, as far as it can be parsed without the text at the cursor."""
    found = Definitions()
    line = code.count("\n", 0, cursor) + 1
    for node in ast.walk(_tree_without_line(code, cursor)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.kinds.setdefault(node.name, "function")
            arguments = node.args
            for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                found.kinds.setdefault(each.arg, "param")
        elif isinstance(node, ast.ClassDef):
            found.kinds.setdefault(node.name, "class")
            found.classes.append(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            _add_imports(found, node)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.kinds.setdefault(node.id, "instance")
        elif isinstance(node, ast.Assign) and node.lineno < line and isinstance(node.targets[0], ast.Name):
            found.values[node.targets[0].id] = node.value
    return found


def _add_imports(found: Definitions, node: ast.Import | ast.ImportFrom) -> None:
    if isinstance(node, ast.Import):
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            found.kinds.setdefault(name, "module")
            found.modules[name] = alias.name if alias.asname else name
    elif not node.level and node.module:
        for alias in node.names:
            found.kinds.setdefault(alias.asname or alias.name, "instance")
            found.modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"


def _tree_without_line(code: str, cursor: int) -> ast.Module:
    """Parse a cell without the text at the cursor; of one that is invalid elsewhere, a valid part.

    ``pass`` takes the place of the lines from that of the outermost bracket that is open at the cursor to that where it
    is closed. Strings are empty: their escapes are of no interest, and the compiler would warn about invalid ones.
    """
    masked = mask(code)[0]
    lines = [re.sub(r"^(\s*)[%!].*$", r"\1pass", line) for line in masked.split("\n")]
    first = last = masked.count("\n", 0, cursor)
    opening = opening_before(masked, cursor)
    while opening is not None:
        first = masked.count("\n", 0, opening)
        last = max(last, masked.count("\n", 0, _closing_after(masked, opening)))
        opening = opening_before(masked, opening)
    indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    for end in dict.fromkeys((last, masked.count("\n", 0, cursor), first)):
        kept = [*lines[:first], f"{indent}pass", *([""] * (end - first)), *lines[end + 1 :]]
        for count in (len(kept), first + 1, first):
            try:
                return ast.parse("\n".join(kept[:count]))
            except (SyntaxError, ValueError):
                continue
    return ast.Module([], [])


def _closing_after(masked: str, opening: int) -> int:
    """Return where a bracket is closed, or the end of the text."""
    depth = 0
    for position in range(opening, len(masked)):
        depth += (masked[position] in "([{") - (masked[position] in ")]}")
        if not depth:
            return position
    return len(masked)


def class_around(found: Definitions, code: str, cursor: int) -> ast.ClassDef | None:
    """Return the class of a cell in which a position is; None if it is in none."""
    line = code.count("\n", 0, cursor) + 1
    around = [each for each in found.classes if each.lineno <= line <= (each.end_lineno or each.lineno)]
    return max(around, key=lambda each: each.lineno, default=None)


def set_on_self(cls: ast.ClassDef) -> dict[str, ast.expr | None]:
    """Return what the methods of a class set on ``self``, and what the class itself defines.

    By name, with the expression if there is one.
    """
    found: dict[str, ast.expr | None] = {}
    for node in ast.walk(cls):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == "self"
                ):
                    found[target.attr] = node.value
    for node in cls.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.setdefault(node.name, None)
        elif isinstance(node, ast.Assign):
            found |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
    return found
