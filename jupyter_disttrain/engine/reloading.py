"""Reloading one module, so that what cells and objects hold of it gets the new code.

Covers: what IPython's reloader can't do: methods that begin or cease to use ``super()``, objects of another layout.
Does not cover: which modules are reloaded, and when (``local_modules``).

Reloading is IPython's own, as its ``%autoreload`` does it. Where that fails half-way, old and new code are mixed for
good, and every later attempt fails as well.
"""

from __future__ import annotations

from contextlib import contextmanager
from importlib.util import cache_from_source
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

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
        Classes whose objects can't be given the new code, each with the reason; new objects have it.
    """
    from IPython.extensions.autoreload import superreload  # noqa: PLC0415  (few sessions need it)

    # Python takes compiled code for current if the file has the same size and second: two edits within one.
    Path(cache_from_source(str(module.__file__))).unlink(missing_ok=True)
    before = dict(module.__dict__)
    try:
        with _rules_that_bear() as kept:
            superreload(module, old_objects=old_objects)
    except BaseException:  # an interrupt too, with which IPython's leaves it empty
        module.__dict__.clear()
        module.__dict__.update(before)
        raise
    return kept


@contextmanager
def _rules_that_bear() -> Iterator[list[str]]:
    """Have IPython's reloader replace what it can't change; yields what keeps its old code all the same."""
    from IPython.extensions import autoreload  # noqa: PLC0415

    kept: list[str] = []
    own = (autoreload.update_class, autoreload.update_function)

    def are_classes(old: Any, new: Any) -> bool:
        return isinstance(old, type) and isinstance(new, type)

    def update_class(old: type, new: type) -> None:
        try:
            autoreload.update_class(old, new)
        except TypeError as error:  # of an object's new class
            kept.append(f"{old.__module__}.{old.__qualname__} ({error})")

    def takes_code(old: Any, new: Any) -> bool:
        """Whether a function can be given another's code; else the other takes its place in the class."""
        if not (isinstance(old, FunctionType) and isinstance(new, FunctionType)):
            return False
        return len(old.__code__.co_freevars) == len(new.__code__.co_freevars)

    before = list(autoreload.UPDATE_RULES)
    autoreload.UPDATE_RULES[:] = [
        (are_classes, update_class),
        (takes_code, autoreload.update_function),
        *(rule for rule in before if rule[1] not in own),
    ]
    try:
        yield kept
    finally:
        autoreload.UPDATE_RULES[:] = before
