"""Set variables of libraries that the user has not set.

Covers: setting them on a rank, keeping those of the session's process groups from programs of their own.
Does not cover: which they are (``framework_variables``).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..framework_variables import OF_SESSION_GROUPS

if TYPE_CHECKING:
    from collections.abc import Mapping

_set: dict[str, str] = {}  # by this rank


def set_defaults(defaults: Mapping[str, str]) -> None:
    """Set those that are not set."""
    new = {name: value for name, value in defaults.items() if name not in os.environ}
    _set.update(new)
    os.environ.update(new)


def without_session_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which torch's process groups have torch's own defaults, or what the user has set."""
    ours = {name: _set[name] for name in OF_SESSION_GROUPS if name in _set}
    return {name: value for name, value in environment.items() if ours.get(name) != value}
