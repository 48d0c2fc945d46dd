"""Read torch's flight recorder on a rank."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, NoReturn

from torch._C import _distributed_c10d

from jupyter_disttrain.rank.process_group.flight_recorder import pending_on_device

if TYPE_CHECKING:
    import pytest


def test_record_is_read_again_after_a_thread_failed_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"profiling_name": "nccl:all_reduce", "state": "started", "collective_seq_id": 1, "time_created_ns": 0}
    dump = json.dumps({"entries": [entry]})
    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace_json", lambda **_: dump, raising=False)

    def refuse(_thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert pending_on_device(0.5) is None
    pending = pending_on_device(0.5)
    assert pending is not None
    assert pending["name"] == "all_reduce"
