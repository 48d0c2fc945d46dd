"""DeepSpeed's compiled parts: built once, and again after a build that was cut off."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import RankFailure

from ..test_lifecycle import wait_until

if TYPE_CHECKING:
    from pathlib import Path

BUILD = "from deepspeed.accelerator import get_accelerator as a; a().create_op_builder('ShareMemCommBuilder').load()"
START = "import deepspeed; deepspeed.init_distributed(); deepspeed.comm.get_world_size()"


def test_a_part_is_built_by_one_rank_and_after_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where a compiler that is killed leaves its files
    with Cluster(n=2) as cluster:
        run = cluster.run(START, block=False)
        assert wait_until(
            lambda: any("is compiled now, once for this host" in text for text in run.stderr.values()), 60
        )
        (builder,) = (rank for rank, text in run.stderr.items() if "is compiled now" in text)
        (lock,) = tmp_path.glob("*/lock")
        os.kill(cluster.table[builder].info.pid, signal.SIGKILL)
        assert wait_until(lambda: bool(run.errors))
        cluster.interrupt()
        with pytest.raises(RankFailure):
            run.wait()
        cluster.run(BUILD, 1 - builder)  # which has waited for it
        assert cluster.run(START).results == {0: 2, 1: 2}
        assert not lock.exists()
        built = (lock.parent / ".ninja_log").read_text().splitlines()[1:]
        outputs = [line.split("\t")[3] for line in built]
        assert len(outputs) == len(set(outputs)) > 0
