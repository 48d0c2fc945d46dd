"""Records of ranks and cells for unit tests."""

from __future__ import annotations

from typing import Any

from jupyter_disttrain.protocol.ranks import RankInfo
from jupyter_disttrain.rank.cell_started import CellStarted


def rank_info(rank: int, world_size: int, **fields: Any) -> RankInfo:
    """Describe a rank of one host, with Gloo on the CPU unless ``fields`` change that."""
    node = {"local_rank": rank, "local_world_size": world_size, "node_rank": 0, "node_count": 1, "host": "vm", "pid": 1}
    others: dict[str, Any] = {"backend": "gloo", "device": "cpu", **node, **fields}
    return RankInfo(rank=rank, world_size=world_size, **others)


def cell_started(number: int = 1) -> CellStarted:
    """Describe the start of a cell that the user has written."""
    return CellStarted(number=number, execution_count=number, header={"msg_id": str(number)}, is_typed=True)
