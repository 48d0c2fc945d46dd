"""Complete the options of the magics.

Covers: ``-``, ``--`` and the choices of an option, on lines that begin with one of the magics.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .arguments import PARSERS

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def install(shell: InteractiveShell) -> None:
    """Register the options with IPython's completer."""
    for name in PARSERS:
        for prefix in ("%%", "%"):
            shell.set_hook("complete_command", complete_options, str_key=f"{prefix}{name}")


def complete_options(_shell: Any, event: Any) -> list[str]:
    """Return the options, or the choices of the option before the cursor."""
    words = event.line.split()
    name = words[0].lstrip("%")
    previous = words[-1] if not event.symbol else (words[-2] if len(words) > 1 else "")
    # argparse has no public list of its actions.
    actions = [action for action in PARSERS[name]._actions if action.help != argparse.SUPPRESS]  # noqa: SLF001
    for action in actions:
        if previous in action.option_strings and action.choices:
            return [str(choice) for choice in action.choices]
    return sorted(option for action in actions for option in action.option_strings)
