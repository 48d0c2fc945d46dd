"""Replace the old class of a reloaded module with the new one: in objects, subclasses and all references.

Covers: classes with and without slots, nested ones, enums and their members, functions of classes that are held.
Does not cover: frames that still run, weak references, annotations of functions, classes that the module does not name.

A class that is only patched, as IPython's reloader does, stays a different class than its module's: its objects are not
instances of the module's class, can't be pickled and don't equal new ones; descriptors of slots and members of enums
can't be patched.
"""

from __future__ import annotations

import functools
import gc
import operator
from enum import Enum, Flag
from types import FrameType, FunctionType, MemberDescriptorType
from typing import TYPE_CHECKING, Any

from ...rank.process_group.object_replacement import Protected, replace_everywhere, thaw

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import CellType, ModuleType

_COLLECTED = 1 << 14  # Py_TPFLAGS_HAVE_GC: Python's collector tracks the objects of such a class


def pair(module: ModuleType, found: list[tuple[type, type]]) -> list[tuple[type, type]]:
    """Return each old class with the new one that replaces it, nested ones as well.

    Empties ``found``: pairs of an old class, of any earlier reload, and the module's current object under that name.
    """
    pairs: dict[int, tuple[type, type]] = {}
    for old, offered in found:
        new = _at(module, old.__qualname__)
        # Another name for a class may be another class's by now, which does not make the two one.
        if new is None and offered.__qualname__ == old.__qualname__:
            new = offered
        if new is not None:
            _add_with_nested(old, new, pairs)
    found.clear()
    return list(pairs.values())


def _at(module: ModuleType, name: str) -> type | None:
    try:
        found = operator.attrgetter(name)(module)
    except AttributeError:
        return None
    return found if isinstance(found, type) else None


def _add_with_nested(old: type, new: type, pairs: dict[int, tuple[type, type]]) -> None:
    if old is new or id(old) in pairs:
        return
    pairs[id(old)] = (old, new)
    for name, each in list(vars(old).items()):
        other = vars(new).get(name)
        if isinstance(each, type) and isinstance(other, type) and each.__qualname__ == f"{old.__qualname__}.{name}":
            _add_with_nested(each, other, pairs)


def give_new_classes(pairs: list[tuple[type, type]]) -> list[str]:
    """Replace each old class with the new one; call it while IPython's reloader has the rules for functions.

    Empties ``pairs``, which holds the old ones.

    Returns
    -------
    list of str
        Classes of which something keeps the old code, each with the reason.
    """
    if not pairs:
        return []
    thaw()
    new_of = {id(old): new for old, new in pairs}
    objects = _objects_of([old for old, _ in pairs if not issubclass(old, Enum)])
    members: list[tuple[Any, Any]] = []
    methods: list[tuple[Any, Any]] = []
    cells: list[tuple[CellType, Protected]] = []
    kept: list[str] = []
    pairs.sort(key=lambda pair: issubclass(pair[0], Enum))  # last: by then old functions hold no members as defaults
    for old, new in pairs:
        own_cells = list(_own_cells(old))
        failed = _pair_members(old, new, members) if issubclass(old, Enum) else _move(objects.pop(id(old), ()), new)
        unmoved = _move_subclasses(old, new_of)
        kept += [*(f"{_name(old)} ({reason})" for reason in failed), *unmoved]
        if failed or unmoved:
            cells += [(cell, Protected(old)) for cell in own_cells]
        if not failed:
            _update(old, new, is_left=bool(unmoved))
            if not unmoved:
                methods += _methods(old, new)
    module = new.__module__
    pairs += [*members, *methods]
    members.clear()
    methods.clear()
    kept += [f"{module} ({failure})" for failure in replace_everywhere(pairs, of_python=True)]
    for cell, protected in cells:
        cell.cell_contents = protected.held  # ``super()`` in the old code needs the class of the objects that have it
    return kept


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _objects_of(classes: Sequence[type]) -> dict[int, list[Any]]:
    """Return the objects of each class, by its id; without those of subclasses."""
    ids = {id(each) for each in classes}
    found: dict[int, dict[int, Any]] = {}
    for each in gc.get_referrers(*classes) if classes else ():
        if id(type(each)) in ids:
            found.setdefault(id(type(each)), {})[id(each)] = each
    if not all(each.__flags__ & _COLLECTED for each in classes):  # empty slots: found only through holders
        for holder in gc.get_objects():
            for each in gc.get_referents(holder):
                if id(type(each)) in ids:
                    found.setdefault(id(type(each)), {})[id(each)] = each
    return {kind: list(some.values()) for kind, some in found.items()}


def _move(objects: Sequence[Any], new: type) -> list[str]:
    """Change the objects' class to the new one; returns why some can't be changed."""
    if objects and issubclass(new, Enum):
        return ["it is an enum now"]
    reasons: dict[str, None] = {}
    for each in objects:
        setter = type.__setattr__ if isinstance(each, type) else object.__setattr__
        try:
            setter(each, "__class__", new)
        except TypeError as error:
            reasons[str(error)] = None
    return list(reasons)


def _move_subclasses(old: type, new_of: dict[int, type]) -> list[str]:
    """Derive subclasses of the old class from the new one; returns which can't be, and why."""
    kept = []
    subclasses: list[type] = type.__subclasses__(old)
    for each in subclasses:
        if id(each) in new_of:
            continue
        try:
            each.__bases__ = tuple(new_of.get(id(base), base) for base in each.__bases__)
        except TypeError as error:
            kept.append(f"{_name(each)} ({error})")
    return kept


def _pair_members(old: type[Enum], new: type, members: list[tuple[Any, Any]]) -> list[str]:
    """Pair each member of an enum with the new one of its name; returns held members that have no new one."""
    gone: dict[str, None] = {}
    inner = gc.get_referents(vars(old))
    inside = {id(each) for each in (*inner, *vars(old).values())}
    for value in list(_values(old)):
        member = _values(old)[value]
        if type(member) is not old:
            continue  # an earlier reload has put it here
        other = _counterpart(member, new) if issubclass(new, Enum) else None
        if other is not None:
            members.append((member, other))
        elif any(id(each) not in inside and type(each) is not FrameType for each in gc.get_referrers(member)):
            gone[str(member._name_ or member._value_)] = None
    return [f"{', '.join(gone)} was removed"] if gone else []


def _values(kind: type[Enum]) -> dict[Any, Any]:
    """Return the members by name; those of flags by value, with the composed ones."""
    return kind._value2member_map_ if issubclass(kind, Flag) else kind._member_map_


def _counterpart(member: Any, new: type[Enum]) -> Any:
    names = new.__members__
    if member._name_ in names:
        return names[member._name_]
    if not (isinstance(member, Flag) and issubclass(new, Flag)):
        return None
    value = member._value_
    parts = [part for part in type(member) if part._value_ and part._value_ & value == part._value_]
    whole = functools.reduce(operator.or_, (part._value_ for part in parts), 0)
    if whole != value or any(part._name_ not in names for part in parts):
        return None
    return functools.reduce(operator.or_, (names[str(part._name_)] for part in parts), new(0))


def _update(old: type, new: type, *, is_left: bool) -> None:
    """Update functions of the old class that are held, and the whole class where subclasses keep it."""
    from IPython.extensions import autoreload  # noqa: PLC0415

    if not (_is_fixed(old) or _is_fixed(new)):
        autoreload.update_class(old, new)
    elif not is_left:
        for name, value in list(vars(old).items()):
            autoreload.update_generic(value, vars(new).get(name))


def _methods(old: type, new: type) -> Iterator[tuple[FunctionType, FunctionType]]:
    """Yield each function of the old class with the new one: bound methods may hold it after the class is freed."""
    for name, value in vars(old).items():
        before, after = (getattr(each, "__func__", each) for each in (value, vars(new).get(name)))
        if type(before) is FunctionType and type(after) is FunctionType and before.__module__ == old.__module__:
            yield before, after


def _is_fixed(kind: type) -> bool:
    """Whether a class's attributes are bound to it, so that another can't have them."""
    return issubclass(kind, Enum) or any(type(value) is MemberDescriptorType for value in vars(kind).values())


def _own_cells(kind: type) -> Iterator[CellType]:
    """Yield the closures' cells in which the functions of a class find it, for ``super()``."""
    for value in vars(kind).values():
        for name in ("__self__", "__func__", "fget", "fset", "fdel"):
            function = value if name == "__self__" else getattr(value, name, None)
            if type(function) is FunctionType:
                for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                    if variable == "__class__":
                        yield cell
