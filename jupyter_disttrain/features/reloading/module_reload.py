"""Reload one module, so that objects and variables of cells get its new code.

Covers: what IPython's reloader can't do: methods that start or cease to use ``super()``, a module that fails.
Does not cover: which modules are reloaded, and when (``rank``), their classes (``class_patching``).

Reloading is IPython's own, as in its ``%autoreload``. Where that fails half-way, old and new code would stay mixed, and
every later attempt would fail as well.
"""

from __future__ import annotations

from contextlib import contextmanager
from importlib.util import cache_from_source
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from .class_patching import give_new_classes, pair

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


def reload_module(module: ModuleType, old_objects: dict[Any, Any]) -> list[str]:
    """Execute the module's file again, and update objects made by the old code.

    Parameters
    ----------
    module
        As it was imported; it is unchanged if its file can't be executed.
    old_objects
        Of IPython's reloader, which fills it.

    Returns
    -------
    list of str
        Classes whose objects or subclasses can't get the new code, each with the reason; new objects have it.
    """
    from IPython.extensions.autoreload import superreload  # noqa: PLC0415  (few sessions need it)

    # Python takes compiled code for current if the file has the same size and second: two edits within one second.
    Path(cache_from_source(str(module.__file__))).unlink(missing_ok=True)
    classes: list[tuple[type, type]] = []
    before = dict(module.__dict__)
    try:
        with _rules_that_bear(module.__name__, classes):
            superreload(module, old_objects=old_objects)
    except BaseException:  # an interrupt too, after which IPython's reloader leaves the module empty
        module.__dict__.clear()
        module.__dict__.update(before)
        raise
    del before  # it holds the old classes
    with _rules_that_bear(module.__name__):
        return give_new_classes(pair(module, classes))


@contextmanager
def _rules_that_bear(name: str, classes: list[tuple[type, type]] | None = None) -> Iterator[None]:
    """Make IPython's reloader replace what it can't change, in the module of that name.

    It never patches classes: it adds the old and the new one to ``classes``, or replaces the old one with the new.
    """
    from IPython.extensions import autoreload  # noqa: PLC0415

    own = (autoreload.update_class, autoreload.update_function)

    def are_noted(old: Any, new: Any) -> bool:
        return classes is not None and isinstance(old, type) and isinstance(new, type)

    def note(old: type, new: type) -> None:
        assert classes is not None
        classes.append((old, new))

    def takes_code(old: Any, new: Any) -> bool:
        """Whether a function can take another's code; else the other function replaces it in the class.

        A class attribute of another module, e.g. ``act = relu``, belongs to that module: all its users would get the
        other's code.
        """
        if not (isinstance(old, FunctionType) and isinstance(new, FunctionType) and old.__module__ == name):
            return False
        return len(old.__code__.co_freevars) == len(new.__code__.co_freevars)

    before = list(autoreload.UPDATE_RULES)
    update_instances = autoreload.update_instances
    autoreload.UPDATE_RULES[:] = [
        (are_noted, note),
        (takes_code, autoreload.update_function),
        *(rule for rule in before if rule[1] not in own),
    ]
    autoreload.update_instances = lambda _old, _new: None  # one search of the memory handles all at once
    try:
        yield
    finally:
        autoreload.UPDATE_RULES[:] = before
        autoreload.update_instances = update_instances
