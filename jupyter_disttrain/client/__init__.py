"""The client's side: starting ranks, running cells on them, bringing values back.

Imports the standard library's rooms and ipyparallel; reaches ``rank`` by messages alone.
"""

from __future__ import annotations

from .cells.cell_run import CellRun
from .cluster import Cluster

__all__ = ["CellRun", "Cluster"]
