"""Set default values of libraries' environment variables that the user has not set.

Covers: setting them on a rank, removing those for the session's process groups from the environment of programs.
Does not cover: the list of variables (``config.frameworks``).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ...config.frameworks import OF_SESSION_GROUPS

if TYPE_CHECKING:
    from collections.abc import Mapping

_set: dict[str, str] = {}  # variables that this rank has set


def set_defaults(defaults: Mapping[str, str]) -> None:
    """Set the variables that are not set yet."""
    new = {name: value for name, value in defaults.items() if name not in os.environ}
    _set.update(new)
    os.environ.update(new)


def without_session_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without our defaults for process groups: torch's own or the user's values then apply."""
    ours = {name: _set[name] for name in OF_SESSION_GROUPS if name in _set}
    return {name: value for name, value in environment.items() if ours.get(name) != value}
