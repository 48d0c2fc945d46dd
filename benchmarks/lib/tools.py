"""The contenders: one class for each, with the cells that a person would type.

Covers: the kernel to start, the cells that start the ranks, run a cell on all of them and move a variable.
Does not cover: measuring (``measures``), the environment of the peers (``environment``).

An arm's words are its own documentation's: each peer is used as its authors show it, and where several ways exist the
fastest is taken.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One contender; the values here are those of a person who types into an ordinary kernel."""

    name: str
    python: str = sys.executable
    start_includes_kernel: bool = False  # where the ranks come with the kernel, its start counts as theirs
    limit_s: float = 60.0  # for one cell
    budget_s: float = 3600.0  # for one number of ranks, all measures together

    def command(self) -> list[str]:
        return [self.python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]

    def environment(self, ranks: int) -> dict[str, str]:  # noqa: ARG002
        return {}

    def comm_target(self) -> str | None:
        """Name the comm that the contender's own page opens, if its output comes over one."""
        return None

    def load_cells(self) -> list[str]:
        """Cells before the clock starts."""
        return []

    def start_cells(self, ranks: int) -> list[str]:
        """Cells until the first all_reduce can be sent."""
        raise NotImplementedError

    def torchless_start_cells(self, ranks: int) -> list[str] | None:  # noqa: ARG002
        """Cells that start ranks which have no torch, or None where it can't be had."""
        return None

    def has_ranks_without_torch(self) -> bool:
        return self.torchless_start_cells(1) is not None

    def after_start_cells(self) -> list[str]:
        """Cells after the clock has stopped."""
        return []

    def on_all_ranks(self, code: str) -> str:
        return f"%%distributed\n{code}"

    def has_local_cells(self) -> bool:
        return True

    def pull_cell(self, name: str) -> str | None:  # noqa: ARG002
        """Bring rank 0's ``name`` into the notebook."""
        return None

    def push_cell(self, name: str) -> str | None:  # noqa: ARG002
        """Bring the notebook's ``name`` to every rank."""
        return None

    def pull_conversion(self, name: str) -> str:  # noqa: ARG002
        """Code for the ranks, before the clock starts, that makes a tensor what can be pulled fastest."""
        return ""

    def stop_cells(self) -> list[str]:
        return []


class Ours(Arm):
    """jupyter_disttrain, as DESIGN shows it."""

    def load_cells(self) -> list[str]:
        return ["%load_ext jupyter_disttrain"]

    def start_cells(self, ranks: int) -> list[str]:
        return [f"%dist_init -n {ranks}"]

    def torchless_start_cells(self, ranks: int) -> list[str] | None:
        return [f"%dist_init -n {ranks} --launcher local --backend none"]

    def pull_cell(self, name: str) -> str:
        return f"%dist_pull -r 0 {name}"

    def push_cell(self, name: str) -> str:
        return f"%dist_push {name}"

    def stop_cells(self) -> list[str]:
        return ["%dist_shutdown"]
