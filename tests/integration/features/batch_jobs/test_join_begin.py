"""The first process of a job, where the job cannot start.

Does not cover: jobs that start (``test_join``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain.features.batch_jobs import join
from jupyter_disttrain.protocol.shared_memory import PREFIX, ROOT
from jupyter_disttrain.rank.startup.startup_args import JoinArgs, Setup

if TYPE_CHECKING:
    from pathlib import Path

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
WANTED = {"timeout_s": 1.0, "interface": "", "backend": "none"}


@pytest.mark.parametrize("trouble", ["ports", "controller", "file"])
def test_job_that_cannot_start_reports_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    name = f"begin-{trouble}"
    file = tmp_path / f"{name}.json"
    for variable, value in LAUNCHED.items():
        monkeypatch.setenv(variable, value)
    if trouble == "ports":
        monkeypatch.setattr(join, "choose_ports", _no_ports)
        message = r"has no free ports for a controller at 127\.0\.0\.1: all are taken; choose .* with --interface"
    elif trouble == "controller":
        monkeypatch.setattr(join, "choose_ports", lambda _address, count: [1] * count)  # a privileged port
        monkeypatch.setattr(join, "CONTROLLER_SECONDS", 0.0)
        message = "the controller on .* did not start"
    else:
        monkeypatch.setattr(join.JobFile, "write", _no_room)
        message = "can't write .*: No space left on device; name another file"
    setup = JoinArgs(file=str(file), name=name, **WANTED)  # type: ignore[arg-type]
    with pytest.raises(SystemExit, match=message):
        join.join(Setup(environment="", host="", ranks=1, join=setup))
    assert not list(tmp_path.iterdir())
    assert not list(ROOT.glob(f"{PREFIX}{name}-*"))


def _no_ports(_address: str, _count: int) -> list[int]:
    raise OSError("all are taken")


def _no_room(_file: object, _path: Path) -> None:
    raise OSError(28, "No space left on device")
