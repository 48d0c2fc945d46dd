"""Reloading one module, so that what cells and objects hold of it gets the new code.

Covers: what IPython's reloader can't do: methods that begin or cease to use ``super()``, a module that fails.
Does not cover: which modules are reloaded, and when (``local_modules``), their classes (``reloaded_classes``).

Reloading is IPython's own, as its ``%autoreload`` does it. Where that fails half-way, old and new code are mixed for
good, and every later attempt fails as well.
"""

from __future__ import annotations

from contextlib import contextmanager
from importlib.util import cache_from_source
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from .reloaded_classes import give_new_classes, pair

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


def reload_module(module: ModuleType, old_objects: dict[Any, Any]) -> list[str]:
    """Execute the module's file anew, and give what was made of it the new code.

    Parameters
    ----------
    module
        As it was imported; it stays as it was if its file can't be executed.
    old_objects
        Of IPython's reloader, which fills it.

    Returns
    -------
    list of str
        Classes whose objects or subclasses can't be given the new code, each with the reason; new objects have it.
    """
    from IPython.extensions.autoreload import superreload  # noqa: PLC0415  (few sessions need it)

    # Python takes compiled code for current if the file has the same size and second: two edits within one.
    Path(cache_from_source(str(module.__file__))).unlink(missing_ok=True)
    classes: list[tuple[type, type]] = []
    before = dict(module.__dict__)
    try:
        with _rules_that_bear(module.__name__, classes):
            superreload(module, old_objects=old_objects)
    except BaseException:  # an interrupt too, with which IPython's leaves it empty
        module.__dict__.clear()
        module.__dict__.update(before)
        raise
    del before  # it holds the old classes
    with _rules_that_bear(module.__name__):
        return give_new_classes(pair(module, classes))


@contextmanager
def _rules_that_bear(name: str, classes: list[tuple[type, type]] | None = None) -> Iterator[None]:
    """Have IPython's reloader replace what it can't change, in the module of that name.

    Classes it patches in no case: it adds the old and the new one to ``classes``, or takes the new one for the old.
    """
    from IPython.extensions import autoreload  # noqa: PLC0415

    own = (autoreload.update_class, autoreload.update_function)

    def are_noted(old: Any, new: Any) -> bool:
        return classes is not None and isinstance(old, type) and isinstance(new, type)

    def note(old: type, new: type) -> None:
        assert classes is not None
        classes.append((old, new))

    def takes_code(old: Any, new: Any) -> bool:
        """Whether a function can be given another's code; else the other takes its place in the class.

        What a class has of another module, ``act = relu`` say, is that module's: all would get the other's code.
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
    autoreload.update_instances = lambda _old, _new: None  # all at once is one search of the memory
    try:
        yield
    finally:
        autoreload.UPDATE_RULES[:] = before
        autoreload.update_instances = update_instances
