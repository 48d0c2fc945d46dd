"""DeepSpeed's compiled extensions: built once, and again after an interrupted build."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain import Cluster

from ..integration.features.scripts.test_scripts import lines_of, write
from ..support.process_tools import wait_until
from ..support.recovery_tools import stop

if TYPE_CHECKING:
    from pathlib import Path

    from jupyter_disttrain import CellRun

BUILD = "from deepspeed.accelerator import get_accelerator as a; a().create_op_builder('ShareMemCommBuilder').load()"
SCRIPT = """
import deepspeed, torch
from deepspeed.utils import groups
print(deepspeed.comm.comm.cdb, groups.mpu, groups._WORLD_GROUP, deepspeed.comm.comm.comms_logger.enabled)
deepspeed.init_distributed("gloo")
deepspeed.comm.configure(enabled=True)
groups.mpu = "the script's"
total = torch.ones(1)
deepspeed.comm.all_reduce(total)
print(total.item(), groups._clone_world_group() is groups._WORLD_GROUP)
"""
START = "import deepspeed; deepspeed.init_distributed(); deepspeed.comm.get_world_size()"


@pytest.mark.timeout(1200)  # it compiles nearly twice, for a minute each on an idle machine
def test_extension_is_built_by_one_rank_and_again_after_a_killed_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where a killed compiler leaves its files
    with Cluster(n=2) as cluster:
        run = cluster.run(START, block=False)
        assert wait_until(
            lambda: any("is being compiled, once for this host" in text for text in run.stderr.values()), 60
        )
        (builder,) = (rank for rank, text in run.stderr.items() if "is being compiled" in text)
        (lock,) = tmp_path.glob("*/lock")
        os.kill(cluster.table[builder].info.pid, signal.SIGKILL)
        assert wait_until(lambda: bool(run.failures))
        stop(cluster, run)
        cluster.run(BUILD, 1 - builder)  # which has waited for it
        assert cluster.run(START).results == {0: 2, 1: 2}
        assert not lock.exists()
        built = (lock.parent / ".ninja_log").read_text().splitlines()[1:]
        outputs = [line.split("\t")[3] for line in built]
        assert len(outputs) == len(set(outputs)) > 0, built


def test_script_imports_it_afresh_and_the_session_keeps_its_own(folder: Path) -> None:
    def first_and_last(run: CellRun) -> dict[int, list[str]]:
        return {
            rank: [lines[0], lines[-1]] for rank, lines in lines_of(run).items()
        }  # between them it prints what it built

    script = write(folder, "train.py", SCRIPT)
    expected = {rank: ["None None None False", "2.0 True"] for rank in range(2)}
    with Cluster(n=2, name="script") as cluster:
        for _ in range(2):
            assert first_and_last(cluster.scripts.run(script)) == expected
            assert cluster.run("import deepspeed; deepspeed.comm.is_initialized()").results == {0: False, 1: False}
        cluster.run("deepspeed.init_distributed('gloo'); ours = deepspeed.comm.comm.cdb; total = torch.ones(1)")
        assert first_and_last(cluster.scripts.run(script)) == expected
        assert cluster.run("ours is deepspeed.comm.comm.cdb").results == {0: True, 1: True}
        assert cluster.run("deepspeed.comm.all_reduce(total); total.item()").results == {0: 2.0, 1: 2.0}
        assert cluster.run("deepspeed.utils.groups.mpu is None").results == {0: True, 1: True}
