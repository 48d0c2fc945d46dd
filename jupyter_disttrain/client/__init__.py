"""Start ranks, run cells on them, and copy values back: the side of the notebook's process.

Imports ipyparallel, never torch; reaches ``rank`` only by messages.
"""

from __future__ import annotations

from .cells.cell_run import CellRun
from .cluster import Cluster

__all__ = ["CellRun", "Cluster"]
