"""Code written for a script, pasted into a cell and run repeatedly."""

from __future__ import annotations

import re
import socket
from typing import TYPE_CHECKING

import pytest
import torch

from jupyter_disttrain.errors import RankFailure

if TYPE_CHECKING:
    from pathlib import Path

    from jupyter_disttrain import Cluster

SUM = "x = torch.ones(1); dist.all_reduce(x); x.item()"


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "'gloo'",
        "backend='gloo', init_method='env://'",
        "'gloo', rank=rank, world_size=world_size",
        "'gloo', init_method='tcp://127.0.0.1:{port}', rank=rank, world_size=world_size",
        "'gloo', init_method='file://{folder}/meet', rank=rank, world_size=world_size",
        "'cpu:gloo'",
    ],
)
def test_cell_that_creates_its_group_runs_again(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, arguments: str
) -> None:
    # Runs again after a group that was left, and after one that was destroyed.
    for ends in ("", "", "dist.destroy_process_group()", "dist.destroy_process_group()"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        # A file store can be used once: torch reports it, and a script that is run again has to remove it too.
        filled = arguments.format(port=port, folder=tmp_path_factory.mktemp("meeting"))
        cell = f"dist.init_process_group({filled})\n{SUM}\ntotal = x.item()\n{ends}"
        cluster.run(cell)
        assert cluster.run("total").results == {0: 2.0, 1: 2.0}
        assert cluster.run(SUM).results == {0: 2.0, 1: 2.0}


def test_two_groups_in_one_cell_behave_as_documented_by_torch(cluster: Cluster) -> None:
    with pytest.raises(RankFailure, match="line 2: ValueError: trying to initialize the default process group twice"):
        cluster.run("dist.init_process_group('gloo')\ndist.init_process_group('gloo')")
    assert cluster.run(SUM).results == {0: 2.0, 1: 2.0}


MAIN = """
import argparse, os

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--local-rank", type=int, default=int(os.environ["LOCAL_RANK"]))
    args = parser.parse_args()
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    torch.nn.functional.mse_loss(model(torch.ones(1, 1)), torch.ones(1, 1)).backward()
    dist.destroy_process_group()
    print(args.lr, args.local_rank == local_rank)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("cluster", ["mpi"], indirect=True)
def test_whole_script_is_pasted(cluster: Cluster) -> None:
    # The model is the last to refer to the destroyed group, which has blocked a rank in one of ten runs.
    for _ in range(30):
        assert cluster.run(MAIN).stdout == {0: "0.1 True\n", 1: "0.1 True\n"}


@pytest.mark.parametrize(
    "call",
    [
        "mp.spawn(train, args=(2,), nprocs=2)",
        "spawn(fn=train, args=(2,), nprocs=2)",
        "mp.start_processes(train, (2,), nprocs=2)",
    ],
)
def test_processes_started_by_a_cell_are_refused_with_advice(cluster: Cluster, call: str) -> None:
    imports = "import torch.multiprocessing as mp\nfrom torch.multiprocessing import spawn"
    with pytest.raises(RankFailure, match=r"line 4: SpawnInCellError: mp\.\w+ starts processes") as caught:
        cluster.run(f"{imports}\ndef train(rank, size): pass\n{call}")
    assert "call train(rank, ...) in the cell" in str(caught.value)
    assert "%dist_run --per-node train.py" in str(caught.value)


@pytest.mark.parametrize(
    ("code", "refusal"),
    [
        (
            """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
Trainer(strategy='ddp_notebook', devices=2, accelerator='cpu', logger=False).fit(BoringModel())""",
            r"use Trainer\(strategy='ddp', devices=\.\.\.\) with the number of ranks",
        ),
        (
            "from accelerate import notebook_launcher\ndef train(): pass\nnotebook_launcher(train, num_processes=2)",
            "the ranks are already such processes; call the launched function itself in the cell",
        ),
    ],
    ids=["Lightning", "accelerate"],
)
def test_notebook_launchers_are_refused_with_advice(cluster: Cluster, code: str, refusal: str) -> None:
    with pytest.raises(RankFailure, match=refusal) as caught:
        cluster.run(code, timeout_s=120)
    assert [failure.ranks for failure in caught.value.failures] == [(0, 1)]
    assert cluster.run(SUM).results == {0: 2.0, 1: 2.0}


def test_nccl_without_a_gpu_is_reported_before_any_rank_waits(cluster: Cluster) -> None:
    for arguments in ("'nccl'", "backend='nccl', init_method='env://'", "'cpu:gloo,cuda:nccl'"):
        with pytest.raises(RankFailure, match=r"the backend '.*nccl' needs a GPU, and rank 0 on .* has none; use "):
            cluster.run(f"dist.init_process_group({arguments})")
        assert cluster.run(SUM).results == {0: 2.0, 1: 2.0}


def test_differing_backends_are_reported(cluster: Cluster) -> None:
    with pytest.raises(RankFailure, match="rank 1 requests the backend 'gloo' and rank 0 the backend 'mpi'"):
        cluster.run("dist.init_process_group('gloo' if rank else 'mpi')")
    with pytest.raises(RankFailure, match="rank 1 requests the one that torch chooses and rank 0 the backend 'gl"):
        cluster.run("dist.init_process_group(None if rank else 'gloo')")
    assert cluster.run(SUM).results == {0: 2.0, 1: 2.0}


def test_missing_framework_is_reported_with_its_install_command(cluster: Cluster) -> None:
    here = re.escape(torch.__version__.partition("+")[0])
    remedy = rf"No module named 'deepspeed'; on this rank's host: pip install 'deepspeed>=0\.15' torch=={here}$"
    with pytest.raises(RankFailure, match=remedy):
        cluster.run("import deepspeed.ops")
    with pytest.raises(RankFailure, match=r"No module named 'no_such_thing'$"):
        cluster.run("import no_such_thing")


def test_installed_framework_is_not_reported_as_missing(cluster: Cluster) -> None:
    pytest.importorskip("accelerate")
    for code in ("import accelerate.no_such_part", "import accelerate\nimport accelerate.no_such_part"):
        with pytest.raises(RankFailure, match=r"ModuleNotFoundError: No module named 'accelerate\.no_such_part'$"):
            cluster.run(code)


def test_outdated_framework_is_reported(cluster: Cluster, tmp_path: Path) -> None:
    old = tmp_path / "deepspeed"
    old.mkdir()
    (old / "__init__.py").write_text("__version__ = '0.9.2'\ndef initialize(): raise AttributeError('config')")
    cluster.run(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import deepspeed")
    with pytest.raises(
        RankFailure,
        match=r"AttributeError: config; deepspeed 0\.9\.2 is older than the versions known to work; pip install",
    ):
        cluster.run("deepspeed.initialize()")
    with pytest.raises(RankFailure, match=r"No module named 'deepspeed\.later'; deepspeed 0\.9\.2 is older than"):
        cluster.run("import deepspeed.later")
    cluster.run("sys.path.pop(0); del sys.modules['deepspeed'], deepspeed")
