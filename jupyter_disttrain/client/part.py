"""Define what the parts of a cluster need from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .cells.cell_run import CellRun, Listener
    from .cells.history import Origin
    from .startup.launch import Launch


class Part(ABC):
    """Base class of the parts of a cluster, which send requests to ranks and run code on them."""

    _launch: Launch

    @abstractmethod
    def _ready(self, ranks: str | int | Iterable[int]) -> tuple[Launch, tuple[int, ...]]:
        """Wait until ranks accept requests; return the launch and the ranks."""

    @abstractmethod
    def run(
        self,
        code: str,
        ranks: str | int | Iterable[int] = "all",
        *,
        timeout_s: float | None = None,
        values: bool = True,
        block: bool = True,
        listener: Listener | None = None,
        origin: Origin | None = None,
    ) -> CellRun:
        """Run code on ranks."""
