"""Switches of torch that an interrupt can leave as they should not stay.

Covers: gradients and autocast, which code turns for a while and back again.
Does not cover: interrupts that are put off (``untimely``).

``torch.no_grad()`` and every optimizer's step turn gradients off, and on again at their end, in Python code. An
interrupt that falls into that end skips it, and without gradients no model on the rank trains any more.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

AUTOCAST = ("cpu", "cuda")  # the devices whose autocast is looked at


class Switches:
    """How a cell found the switches."""

    def __init__(self) -> None:
        self._found: dict[str, bool] = {}

    def note(self) -> None:
        """Take note of them before a cell."""
        self._found = {name: read() for name, read, _ in _switches()}

    def put_back(self) -> list[str]:
        """Set them as they were noted; return what is to be said of those that were not so."""
        said = []
        for name, read, write in _switches():
            before = self._found.get(name)
            if before is not None and read() != before:
                write(before)
                word = "on" if before else "off"
                said.append(
                    f"{name} is {word} again, as before the cell: the interrupt had skipped what turns it {word}"
                )
        return said


def _switches() -> Iterator[tuple[str, Callable[[], bool], Callable[[bool], Any]]]:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    yield "torch's gradient mode", torch.is_grad_enabled, torch.set_grad_enabled
    for device in AUTOCAST:
        yield (
            f"torch.autocast({device!r})",
            partial(torch.is_autocast_enabled, device),
            partial(torch.set_autocast_enabled, device),
        )
