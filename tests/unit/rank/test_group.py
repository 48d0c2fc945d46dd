"""Verify a new process group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from jupyter_disttrain.rank.process_group.group import Group

from ..records import rank_info


def test_group_is_verified_exactly_whatever_the_default_dtype() -> None:
    group: Any = SimpleNamespace(info=rank_info(325, 26), _check_released=lambda: None)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        Group._prove(group)
    finally:
        torch.set_default_dtype(before)
        dist.destroy_process_group()
