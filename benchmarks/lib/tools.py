"""Define the interface of a compared tool, and jupyter_disttrain as one of them.

Covers: the kernel to start, the cells that start the ranks, run a cell on all of them and transfer a variable.
Does not cover: measuring (compare.measures), the other tools (compare.peers).

Each tool is used as its documentation shows; where it shows several ways, the fastest is taken.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

DISTTRAIN = "jupyter_disttrain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One tool; the defaults are those of an ordinary IPython kernel."""

    name: str
    python: str = sys.executable
    start_includes_kernel: bool = False  # the kernel starts the ranks, so its own start is measured too
    limit_s: float = 60.0  # time limit of one cell
    budget_s: float = 3600.0  # time limit of all measures at one number of ranks

    def command(self) -> list[str]:
        """Return the kernel's command line, with a placeholder for the connection file."""
        return [self.python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]

    def environment(self, ranks: int) -> dict[str, str]:  # noqa: ARG002
        """Return variables to add to the kernel's environment."""
        return {}

    def comm_target(self) -> str | None:
        """Return the target of the comm that the tool's frontend opens, if its output is sent over one."""
        return None

    def load_cells(self) -> list[str]:
        """Return the cells to run before the start is measured."""
        return []

    def start_cells(self, ranks: int) -> list[str]:
        """Return the cells after which all ranks can run an all_reduce."""
        raise NotImplementedError

    def torchless_start_cells(self, ranks: int) -> list[str] | None:  # noqa: ARG002
        """Return the cells that start ranks without torch, or None if the tool has no such ranks."""
        return None

    def has_torchless_ranks(self) -> bool:
        """Return whether the tool can start ranks without torch."""
        return self.torchless_start_cells(1) is not None

    def after_start_cells(self) -> list[str]:
        """Return the cells to run after the start was measured."""
        return []

    def on_all_ranks(self, code: str) -> str:
        """Return the cell that runs ``code`` on all ranks."""
        return f"%%distributed\n{code}"

    def has_local_cells(self) -> bool:
        """Return whether a cell can run in the notebook's process."""
        return True

    def pull_cell(self, name: str) -> str | None:  # noqa: ARG002
        """Return the cell that copies rank 0's ``name`` into the notebook, or None."""
        return None

    def push_cell(self, name: str) -> str | None:  # noqa: ARG002
        """Return the cell that copies the notebook's ``name`` to every rank, or None."""
        return None

    def pull_conversion(self, name: str) -> str:  # noqa: ARG002
        """Return code for the ranks that converts a tensor to the type that is pulled fastest; it is not measured."""
        return ""

    def reset_cell(self) -> str | None:
        """Return the cell that starts all ranks again, or None."""
        return None

    def script_cell(self, script: str, argument: str) -> str:
        """Return the cell that runs a script for torchrun on the ranks, for a tool with a ``reset_cell``."""
        raise NotImplementedError

    def stop_cells(self) -> list[str]:
        """Return the cells that end the ranks."""
        return []


class Disttrain(Tool):
    """jupyter_disttrain."""

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

    def reset_cell(self) -> str:
        return "%dist_reset"

    def script_cell(self, script: str, argument: str) -> str:
        return f"%dist_run {script} {argument}"

    def stop_cells(self) -> list[str]:
        return ["%dist_shutdown"]
