"""References to an old process group are replaced by the new one, wherever they are; nothing keeps the old one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain.errors import RankFailure

from ...support.recovery_tools import failure_of

if TYPE_CHECKING:
    from pathlib import Path

    from jupyter_disttrain import Cluster

HELD = """
def default_of(function): return function.__defaults__[-1]
def mine(x, group=dist.group.WORLD): return x
class Settings: group = dist.group.WORLD
pairs = [(1, (dist.group.WORLD,))]
import gc; gc.freeze()"""
CHECK_HELD = """
held = (default_of(mine), Settings.group, pairs[0][1][0])
[each is dist.group.WORLD for each in held]"""
OPEN_FILES = "import psutil; len(psutil.Process().net_connections())"


def test_references_held_by_cells_are_replaced(three: Cluster) -> None:
    three.run(HELD)
    sockets = three.run(OPEN_FILES).results
    for _ in range(3):
        with pytest.raises(RankFailure, match="on purpose"):
            three.run("if rank == 0: raise ValueError('on purpose')\ndist.barrier()")
    assert three.run(CHECK_HELD).results == {rank: [True, True, True] for rank in range(3)}
    assert three.run(OPEN_FILES).results == sockets


OWN_GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo")
import torch.distributed.nn.functional
dist.destroy_process_group()
"""


def test_torch_functions_use_the_current_default_group(three: Cluster, folder: Path) -> None:
    # Otherwise it would be the group at the time when a script, or any optimizer in a cell, imported them.
    (folder / "own.py").write_text(OWN_GROUP)
    assert three.run("'torch.distributed.nn.functional' in __import__('sys').modules").results[0] is False
    three.scripts.run("own.py", how="session")
    total = "torch.distributed.nn.functional.all_reduce(torch.ones(1)).item()"
    assert three.run(total).results == dict.fromkeys(range(3), 3.0)
    failure = failure_of(three, f"if rank == 0: raise ValueError('on purpose')\n{total}")
    assert set(failure.waited) == {1, 2}
    assert three.run(total).results == dict.fromkeys(range(3), 3.0)
