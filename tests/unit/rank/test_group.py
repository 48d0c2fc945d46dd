"""Process groups: verifying a new one, recording them, finding their sockets, reporting why one was not formed."""

from __future__ import annotations

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d as c10d

from jupyter_disttrain.protocol.requests import Form
from jupyter_disttrain.rank.kernel.requests import RequestHandler
from jupyter_disttrain.rank.process_group import sockets
from jupyter_disttrain.rank.process_group.errors import RendezvousError
from jupyter_disttrain.rank.process_group.group import Group
from jupyter_disttrain.rank.process_group.subgroups import GroupRecord, Groups

from ..records import rank_info

if TYPE_CHECKING:
    from collections.abc import Callable


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


def record(name: str, held: Callable[[], Any]) -> GroupRecord:
    """Return the record of a group."""
    return GroupRecord(
        name=name,
        ranks=(),
        backend="gloo",
        timeout=timedelta(minutes=1),
        tag=None,
        description=None,
        made_at="line 1",
        held=held,  # type: ignore[arg-type]  # stands in for a weak reference
        loops=(),
    )


def test_group_made_while_another_thread_reads_the_records_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c10d, "_new_process_group_helper", c10d._new_process_group_helper)  # which Groups replaces
    monkeypatch.setattr(c10d, "_world", SimpleNamespace(pg_names={"old group": "old"}))
    groups = Groups()

    def read() -> str:
        c10d._world.pg_names["new group"] = "new"  # the main thread makes a group at this moment
        groups._records["new"] = record("new", lambda: "new group")
        return "old group"

    groups._records["old"] = record("old", read)
    assert "old" in groups.live
    assert groups.live["new"].made_at == "line 1"


def test_looking_for_sockets_leaves_no_descriptor_open() -> None:
    descriptor = os.memfd_create("no socket")
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    assert sockets._kind(descriptor, os.fstat(descriptor).st_ino) is None
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208
    os.close(descriptor)


@pytest.mark.parametrize(("error", "blames_interface"), [(RuntimeError, True), (RendezvousError, False)])
def test_interface_is_blamed_only_for_an_error_without_a_cause(
    monkeypatch: pytest.MonkeyPatch, error: type[RuntimeError], blames_interface: bool
) -> None:
    monkeypatch.setenv("TP_SOCKET_IFNAME", "eth99")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")

    def form(*_: Any) -> list[str]:
        raise error("a rank has died while the group was formed")

    handler: Any = SimpleNamespace(
        _shell=SimpleNamespace(let_go=lambda: None),
        scripts=SimpleNamespace(know=lambda *_: None),
        mpi=SimpleNamespace(settle=lambda *_, **__: "", take_new=lambda: None),
        _show=lambda _: [],
        group=SimpleNamespace(form=form),
    )
    request = Form(address="127.0.0.1", port=1, generation=2, mpi_lost="", mpi_revoked=False, places=[], tf_roles=None)
    with pytest.raises(RuntimeError, match="eth99" if blames_interface else "^a rank has died"):
        RequestHandler._form(handler, request, [])
