"""``%dist_export``: the script computes what the notebook did."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import numpy as np
import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.client.cells.history import Journal, Origin
from jupyter_disttrain.errors import RankFailure, UsageError

from ....support.process_tools import wait_until
from ...notebook.test_examples import EXAMPLES

if TYPE_CHECKING:
    from ....support.notebook_driver import Notebook

TRAIN = [
    """#%%distributed
from __future__ import annotations
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(3)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)""",
    """def step(seed: int) -> float:
    torch.manual_seed(1000 * seed + rank)
    loss = (model(torch.randn(64, 8) * scale) - 1).pow(2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    loss = loss.detach()  # Gloo's thread divides for AVG, and would write the history of a loss that has one
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    return loss.item()""",
    "%time losses = [step(seed) for seed in range(20)]\nlog_metrics(20, loss=losses[-1])",
]
# In one write: torchrun's Python writes the newline separately, and another rank's text may come between.
SHOW = "print(f'rank {rank} of {world_size}: {losses[-1].hex()} {offset}\\n', end='', flush=True)"


def clear_history(cluster: Cluster) -> None:
    """Exclude from the script what other tests ran; like a reset, but without new ranks."""
    cluster._session.launch.journal = Journal(began_late=False)


# A fault of torch 2.13 in any script on a busy machine: a Gloo thread that frees the last collective while Python exits
# aborts the process.
CRASH_OF_TORCH = "terminate called without an active exception"


def launched(command: str, folder: Path) -> list[str]:
    """Run the exported script as a user would, and return its output, ordered by rank."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "DISTTRAIN_"))
    }
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment |= {
        "TMPDIR": str(folder),  # where torchrun leaves an empty folder
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    for _ in range(3):
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, shell=True
        )
        if CRASH_OF_TORCH not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    lines = (re.sub(r"^\[\d+\]<stdout>:", "", line) for line in done.stdout.splitlines())  # horovodrun's prefix
    return sorted(line for line in lines if line.startswith("rank "))


@pytest.mark.parametrize("launch", ["torchrun", "mpi"])
def test_script_gives_exactly_the_same_losses(cluster: Cluster, tmp_path: Path, launch: str) -> None:
    clear_history(cluster)
    cluster.push({"lr": 3e-3, "scale": np.linspace(0.5, 1.5, 8, dtype=np.float32), "unused": object})
    cluster.run("scale = torch.from_numpy(scale)")
    for code in TRAIN:
        cluster.run(code)
    cluster.run("offset = 10 * rank", 1)
    cluster.copy(["offset"], 1, [0])
    expected = sorted(text.rstrip() for text in cluster.run(SHOW).stdout.values())
    assert len({line.split()[4] for line in expected}) == 1
    exported = cluster.scripts.export(tmp_path / "train.py", launch)
    assert exported.notes == ()
    assert exported.values == tmp_path / "train_values.pkl"
    assert "lr = 0.003" in exported.script.read_text()
    assert "unused" not in exported.script.read_text()
    assert launched(exported.command, tmp_path) == expected


def test_failed_cells_are_left_out_and_repeated_cells_appear_once(cluster: Cluster, tmp_path: Path) -> None:
    clear_history(cluster)
    with pytest.raises(UsageError, match="no cell has succeeded on the ranks yet"):
        cluster.scripts.export(tmp_path / "empty.py")
    ids = ["a", "b", "a", "c", "d"]
    codes = ["x = 1", "y = x", "x = 2", "raise ValueError(x)", "while True: pass"]
    for number, (cell_id, code) in enumerate(zip(ids, codes, strict=True), 1):
        origin = Origin(execution_count=number, cell_id=cell_id)
        run = cluster.run(code, block=False, origin=origin)
        if "while" in code:
            assert wait_until(lambda: all(entry.state == "running" for entry in cluster.table))
            cluster.interrupt()
        if cell_id in "cd":
            with pytest.raises(RankFailure):
                run.wait()
        else:
            run.wait()
    cluster.sync()
    exported = cluster.scripts.export(tmp_path / "it.py")
    text = exported.script.read_text()
    assert text.index("x = 2") < text.index("y = x") < text.index("while True")
    assert "x = 1" not in text
    assert "raise" not in text
    assert text.count("barrier") == 1, "only the barrier of %sync"
    assert exported.notes == (
        "cells [4] failed or still run, and are left out",
        "cells [1] ran again later: only the last run is in the script, in the place of the first",
        "cells [5] were interrupted; the script runs them to their end, or hangs where ranks waited for others",
    )
    assert "x = 1" in cluster.scripts.export(tmp_path / "all.py", every_run=True).script.read_text()


def test_cells_are_written_as_they_ran_without_magics(cluster: Cluster, tmp_path: Path) -> None:
    clear_history(cluster)
    cluster.run("text = '''one\n  two\n'''\nif rank:\n    more = f'''{rank}\nlast'''\nelse:\n    more = ''", [1])
    cluster.run("from __future__ import annotations; y = 3")
    cluster.run("# only a remark", 0)
    cluster.run("def hook(state, comm): return comm\n%time x = -y + 1")
    cluster.run("%matplotlib inline\nif rank:\n    %time a = 5\nelse:\n    a = 4")
    shown = "{a} {b} {x} {hook(0, 1)} {(text, more) if rank else None!r}"
    cluster.run(f"%%time\nb = 7\nprint(f'rank {{rank}} {shown}\\n', end='', flush=True)")
    exported = cluster.scripts.export(tmp_path / "it.py")
    assert "get_ipython" not in exported.script.read_text()
    assert launched(exported.command, tmp_path) == [
        "rank 0 4 7 -2 1 None",
        "rank 1 5 7 -2 1 ('one\\n  two\\n', '1\\nlast')",
    ]


def test_comm_needs_mpi(tmp_path: Path) -> None:
    with Cluster(n=2, name="comm-exported") as cluster:
        cluster.run("print('rank', rank, comm.allreduce(rank), node_rank, local_world_size, flush=True)")
        with pytest.raises(
            UsageError, match=r"In \[1\] uses comm, MPI's world, which torchrun does not start; export with --mpi"
        ):
            cluster.scripts.export(tmp_path / "it.py")
        exported = cluster.scripts.export(tmp_path / "it.py", "mpi")
    assert launched(exported.command, tmp_path) == ["rank 0 1 0 2", "rank 1 1 0 2"]


def test_magic_reports_what_it_wrote(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("%dist_reset").check()  # cells of other tests are not exported
    notebook.run("%%distributed\nx = 1").check()
    output = notebook.run(f"%dist_export {tmp_path}/train.py --slurm").check().text
    assert output.startswith(f"wrote train.py, train.sbatch in {tmp_path}; run it with sbatch train.sbatch")
    assert "#SBATCH --nodes=1" in (tmp_path / "train.sbatch").read_text()


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("first_steps", "points.norm().item(), walk.norm().item(), lr, x.tolist()"),
        ("ddp_digits", "losses"),
        ("model_parallel", "before, after, difference"),
    ],
)
def test_example_gives_the_same_losses_as_a_script(
    bare_notebook: Notebook, tmp_path: Path, name: str, digest: str
) -> None:
    cells = [cell.source for cell in nbformat.read(EXAMPLES / f"{name}.ipynb", 4).cells if cell.cell_type == "code"]
    assert cells.pop() == "%dist_shutdown"
    folders = {where: tmp_path / where for where in ("notebook", "script")}
    for folder in folders.values():
        (folder / "output").mkdir(parents=True)
    bare_notebook.run(f"import os; os.chdir({str(folders['notebook'])!r})").check()
    # repr() shows every digit of a float
    keep = f"from pathlib import Path\nkept = Path(f'{{rank}}.txt').write_text(repr(({digest})))"
    for cell in (*cells, f"%%distributed\n{keep}"):
        outcome = bare_notebook.run(cell)
    outcome.check()
    output = bare_notebook.run(f"%dist_export {folders['script']}/it.py").check().text
    bare_notebook.run("%dist_shutdown").check()
    assert "wrote it.py, it" in output
    launched("bash it.sh", folders["script"])
    for rank in range(2):
        in_notebook, in_script = ((folder / f"{rank}.txt").read_text() for folder in folders.values())
        assert len(in_notebook) > 20
        assert in_notebook == in_script
