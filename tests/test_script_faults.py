"""What befalls a session while a script runs: failures, interrupts, hangs, deaths."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import pytest

from jupyter_disttrain.errors import RankFailure

from .recovery_tools import HOST, SUM, is_whole
from .test_lifecycle import wait_until
from .test_scripts import TRAIN, WAYS, write

if TYPE_CHECKING:
    from pathlib import Path

    from jupyter_disttrain import Cluster


@pytest.mark.parametrize("how", WAYS)
def test_who_waits_for_a_rank_whose_script_failed_is_released(
    three: Cluster, folder: Path, how: str, pids: dict[int, int]
) -> None:
    code = TRAIN.replace("from helper import double", "double = float").replace(
        "    dist.init", "    if os.environ['RANK'] == '1': raise ValueError('the cause')\n    dist.init"
    )
    with pytest.raises(RankFailure) as caught:
        three.run_script(write(folder, "train.py", code), how=how)
    (failure,) = caught.value.failures
    assert failure.ranks == (1,)
    if how == "here":
        assert failure.headline == f"rank 1 ({HOST}), train.py:10: ValueError: the cause"
    else:
        assert "exited with code 1" in failure.evalue
    assert set(caught.value.waited) == {0, 2}
    assert is_whole(three, pids)


@pytest.mark.parametrize("how", WAYS)
def test_an_interrupt_ends_the_script_and_what_it_started(
    three: Cluster, folder: Path, how: str, pids: dict[int, int]
) -> None:
    script = write(
        folder,
        "long.py",
        """
        import os, subprocess, sys, time
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        print("begun", flush=True)
        if dist.get_rank() == 0:
            while True: time.sleep(0.01)
        dist.barrier()
        """,
    )
    run = three.run_script(script, how=how, block=False)
    run.listen(Seen())
    assert wait_until(lambda: three.table[0].state == "running" and len(three.where()) > 0)
    assert wait_until(lambda: any("barrier" in line or "long.py" in line for line in three.where()))
    three.interrupt()
    with pytest.raises(RankFailure, match="KeyboardInterrupt"):
        run.wait()
    assert is_whole(three, pids)
    left = [each for pid in pids.values() for each in psutil.Process(pid).children(recursive=True)]
    assert not left


def test_a_group_that_an_interrupt_left_half_ended_is_formed_anew(three: Cluster, pids: dict[int, int]) -> None:
    half = "from torch.distributed import distributed_c10d as c10d\nif rank == 1: c10d._update_default_pg(None)\n"
    with pytest.raises(RankFailure, match="KeyboardInterrupt"):
        three.run(f"{half}raise KeyboardInterrupt")
    assert is_whole(three, pids)


class Seen:
    """A listener that takes note of nothing."""

    def on_events(self, *_: object) -> None:
        return

    def on_end(self, *_: object) -> None:
        return


def test_a_hang_in_a_script_names_its_lines(three: Cluster, folder: Path) -> None:
    script = write(
        folder,
        "stuck.py",
        """\
        import time
        import torch, torch.distributed as dist
        dist.init_process_group()
        if dist.get_rank() == 0:
            while True: time.sleep(0.01)
        dist.barrier()
        """,
    )
    run = three.run_script(script, block=False)
    assert wait_until(lambda: bool(run.hang))
    text = "\n".join(run.hang)
    assert "at stuck.py:6: dist.barrier()" in text
    assert "rank 0: in Python code at stuck.py:5: while True: time.sleep(0.01)" in text
    three.interrupt()
    with pytest.raises(RankFailure, match="KeyboardInterrupt"):
        run.wait()


def test_a_rank_that_dies_in_a_script_is_replaced(three: Cluster, folder: Path) -> None:
    script = write(
        folder,
        "dies.py",
        "import os, torch.distributed as dist\nif os.environ['RANK'] == '1': os._exit(3)\ndist.barrier()",
    )
    with pytest.raises(RankFailure, match=r"rank 1 .*RankDied: process .* exited with code 3"):
        three.run_script(script)
    assert three.run(SUM).results == {rank: [6.0] for rank in range(3)}
