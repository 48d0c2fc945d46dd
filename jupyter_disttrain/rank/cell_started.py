"""Describe the start of a cell to what keeps state per cell on its rank: the kernel calls each with it, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CellStarted:
    """A cell starts on this rank."""

    number: int  # the cluster's number of the cell
    execution_count: int  # its prompt number
    header: dict[str, Any]  # of its request
    is_typed: bool  # whether the user has written the code


Subscribers = list[Callable[[CellStarted], None]]  # called on the main thread, before the cell's code runs
