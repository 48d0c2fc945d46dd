"""Replace an object with another wherever it is referenced.

Covers: variables, attributes, slots, classes, closures, dicts, lists, sets, tuples, default arguments, partials, bound
methods.
Does not cover: references from C++, frames that still run; further steps (``model_rebuild``).

A single remaining reference keeps an old process group, with its store, its threads and its sockets, and code that uses
the reference uses that group.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_DEEPEST = 5  # nesting of tuples
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType, classmethod, staticmethod, property)


_frozen = [0]  # number of objects that :func:`freeze` has hidden from the collector


def freeze() -> None:
    """Hide all objects from the collector before a fork: they stay hidden, and their memory stays shared.

    Garbage is hidden too; it is not collected before.
    """
    gc.freeze()
    _frozen[0] = gc.get_freeze_count()  # once, as counting takes 20 ms, which each rank would spend


def unfreeze() -> None:
    """Show all objects to the collector again."""
    gc.unfreeze()
    _frozen[0] = 0


def thaw() -> None:
    """Unhide objects that a cell has hidden from the collector by ``gc.freeze()``, as some training loops do."""
    if gc.get_freeze_count() > _frozen[0]:
        gc.unfreeze()


class Protected:
    """Holds a value in which nothing is replaced."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


def replace_everywhere(pairs: list[tuple[Any, Any]], held_in_c: int = 0, depth: int = 0) -> list[str]:
    """Replace each old object with its new one wherever it is referenced; pairs are compared by identity.

    Empties ``pairs``, because any remaining reference to an old object counts as one still to be found: Python's
    collector shows most of them, and those that it does not track are searched for only while there are more than the
    ``held_in_c`` references to an old object that an extension module keeps. Returns messages about objects that could
    not be changed.
    """
    if not pairs:
        return []
    thaw()
    replacing = _Replacing(pairs, held_in_c)
    for search in (replacing.referrers, replacing.functions, replacing.untracked, replacing.frozen):
        for holder in search():
            replacing.put(holder)
        rebuilt, replacing.rebuilt = replacing.rebuilt, []
        if rebuilt and depth < _DEEPEST:
            replacing.failed += replace_everywhere(rebuilt, depth=depth + 1)
        if not replacing.hidden:
            break
    return replacing.failed


def hidden_references(things: Sequence[Any]) -> list[int]:
    """Return for each object in a list or tuple how many references to it the collector does not show.

    Besides the list's own reference, the caller must hold none in a variable.
    """
    at = {id(thing): number for number, thing in enumerate(things)}
    shown: Counter[int] = Counter()
    for holder in gc.get_referrers(*things):
        shown.update(at[id(each)] for each in gc.get_referents(holder) if id(each) in at)
    return [sys.getrefcount(things[number]) - 1 - shown[number] for number in range(len(things))]


class _Replacing:
    """The replacements, and how to make them in each kind of holder."""

    def __init__(self, pairs: list[tuple[Any, Any]], held_in_c: int) -> None:
        self._held_in_c = held_in_c
        self._olds = [old for old, _ in pairs]
        self._new_of = {id(old): new for old, new in pairs}
        pairs.clear()
        self.rebuilt: list[tuple[Any, Any]] = []  # immutable holders, and their copies with the new objects
        self.failed: list[str] = []
        self._refusing: list[Any] = []  # holders that could not be changed

    def referrers(self) -> list[Any]:
        """Return the holders that Python's collector tracks."""
        return [holder for holder in gc.get_referrers(*self._olds) if not self._is_own(holder)]

    def functions(self) -> list[Any]:
        """Return the functions with an old object as a default, in a tuple that the collector no longer tracks."""
        functions = (thing for thing in gc.get_objects() if type(thing) is types.FunctionType)
        return [each for each in functions if (each.__defaults__ or each.__kwdefaults__) and self._in_defaults(each)]

    def untracked(self) -> list[Any]:
        """Return the dicts and tuples that the collector no longer tracks, as all their content is plain."""
        found: dict[int, Any] = {}
        for holder in gc.get_objects():
            if self._is_own(holder):
                continue
            for each in _forgotten_in(holder):
                if not self._new_of.keys().isdisjoint(map(id, gc.get_referents(each))):
                    found[id(each)] = each
        return list(found.values())

    def frozen(self) -> list[Any]:
        """Return the holders that were hidden before the fork, such as modules; they are not hidden again."""
        unfreeze()
        return self.referrers()

    @property
    def hidden(self) -> bool:
        """Whether an old object is referenced by something that the collector does not show."""
        return any(count > self._held_in_c for count in hidden_references(self._olds))

    def _is_own(self, holder: Any) -> bool:
        if holder is self._olds or holder is self._new_of or any(holder is each for each in self._refusing):
            return True
        # What classes hold is in their dicts, except their bases; a descriptor holds its class or its functions.
        return type(holder) is Protected or issubclass(type(holder), (type, *_DESCRIPTORS))

    def _in_defaults(self, function: types.FunctionType) -> bool:
        values = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        return any(id(value) in self._new_of for value in values)

    def _new(self, value: Any) -> Any:
        return self._new_of.get(id(value), value)

    def _new_tuple(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(map(self._new, self._new(values)))

    def put(self, holder: Any) -> None:
        """Put the new objects into ``holder``."""
        try:
            # By type: getattr of a proxy's class may have effects.
            self._put(type(holder), holder)
        except Exception as error:  # noqa: BLE001  (objects may refuse, and one must not break the session)
            self._refusing.append(holder)
            self.failed.append(f"what an object of {type(holder).__name__} holds ({type(error).__name__}: {error})")

    def _put(self, kind: type, holder: Any) -> None:
        for kinds, put in (
            ((dict,), self._put_in_dict),
            ((list, deque), self._put_in_list),
            ((set,), self._put_in_set),
            ((tuple, frozenset), self._rebuild),
            ((types.MethodType,), self._rebuild_method),
            ((types.CellType,), self._put_in_cell),
            ((types.FunctionType,), self._put_in_function),
            ((functools.partial,), self._put_in_partial),
        ):
            if issubclass(kind, kinds):
                put(holder)
                return
        self._put_in_attributes(holder)

    def _put_in_list(self, holder: Any) -> None:
        for at, value in enumerate(holder):
            if id(value) in self._new_of:
                holder[at] = self._new(value)

    def _put_in_set(self, holder: set[Any]) -> None:
        for value in [value for value in holder if id(value) in self._new_of]:
            holder.remove(value)
            holder.add(self._new(value))

    def _rebuild(self, holder: Any) -> None:
        base: Any = tuple if isinstance(holder, tuple) else frozenset
        self.rebuilt.append((holder, base.__new__(type(holder), map(self._new, holder))))

    def _rebuild_method(self, holder: types.MethodType) -> None:
        self.rebuilt.append((holder, types.MethodType(self._new(holder.__func__), self._new(holder.__self__))))

    def _put_in_cell(self, holder: types.CellType) -> None:
        holder.cell_contents = self._new(holder.cell_contents)

    def _put_in_function(self, holder: types.FunctionType) -> None:
        if holder.__defaults__ is not None:
            holder.__defaults__ = self._new_tuple(holder.__defaults__)
        self._put_in_dict(holder.__kwdefaults__ or {})
        self._put_in_dict(holder.__dict__)

    def _put_in_partial(self, holder: functools.partial[Any]) -> None:
        keywords = {name: self._new(value) for name, value in holder.keywords.items()}
        state = (self._new(holder.func), self._new_tuple(holder.args), keywords, vars(holder))
        holder.__setstate__(state)  # type: ignore[attr-defined]

    def _put_in_dict(self, holder: dict[Any, Any]) -> None:
        held = [key for key, value in holder.items() if id(value) in self._new_of]
        owner = _class_of(holder) if held and "__module__" in holder and "__doc__" in holder else None
        for key in held:
            if owner is None:
                holder[key] = self._new(holder[key])
            else:
                setattr(owner, key, self._new(holder[key]))

    def _put_in_attributes(self, holder: Any) -> None:
        """Replace attributes: since Python 3.11 an object may hold them itself, and slots always are."""
        attributes: Any = getattr(holder, "__dict__", None)
        if issubclass(type(attributes), dict):
            self._put_in_dict(attributes)
        for name in _slots(type(holder)):
            value = getattr(holder, name, None)
            if id(value) in self._new_of:
                object.__setattr__(holder, name, self._new(value))


def _forgotten_in(holder: Any) -> Iterator[Any]:
    """Yield the dicts and tuples in ``holder``, nested ones too, that the collector does not track."""
    for each in gc.get_referents(holder):
        if (type(each) is dict or issubclass(type(each), tuple)) and not gc.is_tracked(each):
            yield each
            yield from _forgotten_in(each)


def _slots(kind: type) -> Iterator[str]:
    for each in kind.__mro__:
        yield from (name for name, value in vars(each).items() if type(value) is types.MemberDescriptorType)


def _class_of(holder: dict[Any, Any]) -> type | None:
    """Return the class with this dict: if the dict is changed directly, cached old attributes stay in use."""
    for owner in gc.get_referrers(holder):
        if issubclass(type(owner), type) and any(each is holder for each in gc.get_referents(owner)):
            return owner  # type: ignore[no-any-return]
    return None
