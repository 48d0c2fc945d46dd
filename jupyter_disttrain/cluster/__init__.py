"""The client's side: starting ranks, running cells on them, bringing values back.

Imports the standard library's rooms and ipyparallel; reaches ``engine`` by messages alone.
"""

from __future__ import annotations

from .cell_run import CellRun
from .cluster import Cluster

__all__ = ["CellRun", "Cluster"]
