"""Telemetry of ranks and nodes while ranks work, wait, hang and die."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.client.cells.history import Origin
from jupyter_disttrain.errors import UsageError
from jupyter_disttrain.notebook.views.status_text import status_text
from jupyter_disttrain.protocol.messages import RankVitals

from ....support.process_tools import wait_until
from ....support.recovery_tools import holding_gil, stop

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST = socket.gethostname()
WAIT = "import os, time\nwhile not os.path.exists({path!r}): time.sleep(0.01)"


@pytest.fixture(scope="module", params=["mpi", "local"])
def quick(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two ranks that send telemetry ten times a second."""
    with Cluster(n=2, launcher=request.param, sample_s=0.1, name="quick") as cluster:
        yield cluster


def vitals_of(cluster: Cluster, rank: int) -> RankVitals:
    figures = cluster.telemetry.ranks.get(rank)
    return figures.vitals if figures else RankVitals(time_s=0, beat_s=0, state="no report")


def state(cluster: Cluster, rank: int) -> str:
    return cluster.telemetry.state(rank, cluster.table[rank].state)[1]


def test_figures_of_ranks_and_node_arrive_without_a_request(quick: Cluster) -> None:
    assert wait_until(lambda: set(quick.telemetry.ranks) == {0, 1})
    for rank in range(2):
        process = psutil.Process(quick.table[rank].info.pid)
        assert wait_until(lambda rank=rank: vitals_of(quick, rank).memory_bytes > 0)  # type: ignore[misc]
        assert vitals_of(quick, rank).memory_bytes == pytest.approx(process.memory_info().rss, rel=0.2)
        assert vitals_of(quick, rank).state == "idle"
        assert vitals_of(quick, rank).gpu is None
    assert wait_until(lambda: len(quick.telemetry.nodes) == 1)
    (node,) = quick.telemetry.nodes
    assert node.host == HOST
    assert node.cores == psutil.cpu_count()
    assert 0 < node.memory_used_bytes < node.memory_total_bytes
    assert node.disk_free_bytes > 0


def test_running_line_and_cell_are_reported(quick: Cluster, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    run = quick.run(f"# a comment\n{WAIT.format(path=str(stop))}", block=False, origin=Origin(execution_count=7))
    assert wait_until(lambda: all(vitals_of(quick, rank).line == 3 for rank in range(2)))
    assert vitals_of(quick, 0).state == "running"
    assert (vitals_of(quick, 0).cell, vitals_of(quick, 0).execution_count) == (run.number, 7)
    stop.touch()
    run.wait()
    assert wait_until(lambda: vitals_of(quick, 0).state == "idle" and vitals_of(quick, 0).cell is None)


def test_cpu_use_includes_child_processes_also_ended_ones(quick: Cluster, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    child = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code!r}], check=True)\n"
    busy = child.format(code=f"import os\nwhile not os.path.exists({str(stop)!r}): pass")
    run = quick.run(busy + 3 * child.format(code="sum(range(10**7))"), 1, block=False)
    assert wait_until(lambda: vitals_of(quick, 1).cpu_percent > 30)
    stop.touch()
    run.wait()
    figures = quick.telemetry.ranks[1]
    assert wait_until(lambda: figures.vitals.cell is None)
    assert all(0 <= each.cpu_percent < 400 for each in tuple(figures.history))


def test_wait_in_a_collective_is_reported_with_its_name(quick: Cluster, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    wait = WAIT.format(path=str(stop)).replace("\n", "\n    ")
    run = quick.run(f"if rank == 1:\n    {wait}\ndist.all_reduce(torch.ones(3))", block=False)
    assert wait_until(lambda: vitals_of(quick, 0).state == "in collective")
    assert "all_reduce" in vitals_of(quick, 0).call
    assert state(quick, 0).startswith("in all_reduce for ")
    assert vitals_of(quick, 1).state == "running"
    stop.touch()
    run.wait()


def test_wait_in_mpi_is_reported(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    with Cluster(n=2, launcher="mpi", backend="none", sample_s=0.1, name="mpi-only") as cluster:
        wait = WAIT.format(path=str(stop)).replace("\n", "\n    ")
        run = cluster.run(f"if rank == 1:\n    {wait}\ncomm.Barrier()", block=False)
        assert wait_until(lambda: vitals_of(cluster, 0).call == "MPI Barrier")
        stop.touch()
        run.wait()
        stop.unlink()
        # Sampling a line with constants of all kinds ends no thread.
        condition = f"[(), 1, None, '', (2,)] and not os.path.exists({str(stop)!r})"
        run = cluster.run(f"import os, time\nwhile {condition}: time.sleep(0.01)", block=False)
        assert wait_until(lambda: vitals_of(cluster, 0).line == 2)
        assert "at line 2: while" in cluster.where()[0]
        seen = vitals_of(cluster, 0).checks
        assert wait_until(lambda: vitals_of(cluster, 0).checks > seen + 2)
        stop.touch()
        assert run.wait().stderr.get(0, "") == ""


def test_code_that_holds_the_gil_is_shown_as_not_responding(quick: Cluster, tmp_path: Path) -> None:
    with holding_gil(tmp_path) as call:
        run = quick.run(f"import ctypes, os\n{call}", 1, block=False)
        assert wait_until(lambda: state(quick, 1).startswith("not responding for "))
        before = vitals_of(quick, 1).time_s
        assert wait_until(lambda: vitals_of(quick, 1).time_s > before)  # its figures are still updated
        assert state(quick, 0) == "idle"
    run.wait()
    assert wait_until(lambda: state(quick, 1) == "idle")


@pytest.mark.parametrize("is_nanny", [False, True])
def test_stopped_process_and_silent_nanny_are_shown(quick: Cluster, is_nanny: bool) -> None:
    entry = quick.table[1]
    pid, text = (entry.nanny_pid, "no report for ") if is_nanny else (entry.info.pid, "stopped")
    os.kill(pid, signal.SIGSTOP)
    try:
        assert wait_until(lambda: state(quick, 1).startswith(text))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert wait_until(lambda: state(quick, 1) == "idle")


TRAIN = """
from torch.utils.data import DataLoader
import time
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): time.sleep(0.0025); return torch.randn(4)
model = torch.nn.Linear(4, 1)
first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
for batch in DataLoader(Slow(), batch_size=16):
    model(batch).sum().backward()
    first.step(); second.step()
"""


def test_steps_samples_and_data_wait_are_counted_without_a_call(quick: Cluster) -> None:
    before = [vitals_of(quick, rank) for rank in range(2)]
    quick.run("from torch.utils.data import DataLoader")
    quick.run(TRAIN)
    expected = [(each.steps + 4, each.samples + 64) for each in before]
    assert wait_until(
        lambda: [(each.steps, each.samples) for each in (vitals_of(quick, 0), vitals_of(quick, 1))] == expected
    )
    assert all(vitals_of(quick, rank).data_wait_s >= before[rank].data_wait_s + 0.16 for rank in range(2))


def test_status_of_a_new_cell_has_nothing_of_the_one_before() -> None:
    with Cluster(n=2, launcher="local", sample_s=60, name="afresh") as cluster:
        wait = "if rank == 0:\n    dist.barrier()\nelse:\n    for _ in tqdm(range(60), mininterval=0): time.sleep(1)"
        run = cluster.run(f"import time\nfrom tqdm import tqdm\n{wait}", block=False)
        assert wait_until(lambda: vitals_of(cluster, 1).total == 60)
        stop(cluster, run)
        run = cluster.run("import time; time.sleep(100)", block=False, origin=Origin(execution_count=9))
        rows = [line.split() for line in status_text(cluster).splitlines() if line.startswith("  ")]
        assert [row[1:4] for row in rows[1:3]] == [["running", "9", HOST]] * 2, "no line, no collective"
        assert "of 60" not in status_text(cluster)
        stop(cluster, run)


HEAD = """
import os, time
from torch.utils.data import DataLoader
from tqdm import tqdm
batches = torch.ones(1200, 2)  # at 0.02 s each, a pass takes long enough to be reported
def hold(is_here):
    while is_here and not os.path.exists({path!r}): time.sleep(0.01)
"""
PASS = "for number, _ in enumerate(DataLoader(batches, batch_size=3)): time.sleep(0.02); hold(number == 2)"
SELDOM = """
bar = tqdm(DataLoader(batches, batch_size=3), mininterval=1000, miniters=1000)
for number, _ in enumerate(bar): time.sleep(0.02); hold(number == 2)
"""
EPOCHS = """
for epoch in tqdm(range(4), mininterval=0):
    for number, _ in enumerate(DataLoader(batches, batch_size=300)): hold(epoch == 2 and number == 3)
"""
BAR = """
for epoch in tqdm(range(5), mininterval=0):
    for batch in tqdm(range(1000), mininterval=0): hold(epoch == 2)
"""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(PASS, id="a DataLoader"),
        pytest.param(SELDOM, id="a bar that is drawn seldom"),
        pytest.param(EPOCHS, id="a bar that is as long as the DataLoader within"),
        pytest.param(BAR, id="the outermost bar"),
    ],
)
def test_loop_progress_is_reported(quick: Cluster, tmp_path: Path, code: str) -> None:
    stop = tmp_path / "stop"
    total = {BAR: 5, EPOCHS: 4}.get(code, 400)
    run = quick.run(HEAD.format(path=str(stop)) + code, block=False)
    done = 2 if code in (BAR, EPOCHS) else 3  # a DataLoader has returned the batch that a bar has not counted yet
    assert wait_until(
        lambda: all((vitals_of(quick, each).done, vitals_of(quick, each).total) == (done, total) for each in (0, 1))
    )
    assert re.fullmatch(rf"{done} of {total}, \d+ s left in this loop", run.progress)
    assert run.progress in status_text(quick)
    stop.touch()
    run.wait()
    assert wait_until(lambda: vitals_of(quick, 0).total == 0)
    assert run.progress == ""


HELD = """
import os, time
from tqdm import tqdm
for step in tqdm(range(60), mininterval=0):
    while step > 2 and not os.path.exists({path!r} + str(step)): time.sleep(0.01)
"""
FAST = """
import time
from tqdm import tqdm
until = time.monotonic() + 2
for step in tqdm(range(10**9), mininterval=0):
    if time.monotonic() > until: break
"""


def test_loop_progress_is_reported_soon_after_its_bar(tmp_path: Path) -> None:
    with Cluster(n=2, launcher="local", backend="none", sample_s=60, name="seldom") as cluster:
        assert wait_until(lambda: set(cluster.telemetry.ranks) == {0, 1})
        run = cluster.run(HELD.format(path=f"{tmp_path}/"), block=False, origin=Origin(execution_count=7))
        for step in range(3, 8):
            assert wait_until(lambda step=step: all(f"| {step}/60" in run.stderr.get(each, "") for each in (0, 1)))  # type: ignore[misc]
            assert wait_until(lambda step=step: [vitals_of(cluster, each).done for each in (0, 1)] == [step, step], 2)  # type: ignore[misc]
            (tmp_path / str(step)).touch()
        vitals = vitals_of(cluster, 0)
        assert (vitals.state, vitals.total, vitals.execution_count) == ("running", 60, 7)
        stop(cluster, run)
        # However often bars are drawn, few messages report it.
        before = cluster.telemetry.changes
        cluster.run(FAST)
        assert 2 <= cluster.telemetry.changes - before <= 2 * (2 / 0.3 + 2)


def test_steps_and_samples_are_counted_without_a_process_group() -> None:
    code = """
import gc
from torch.utils.data import DataLoader
from jupyter_disttrain.features.telemetry.rank.progress import Progress
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
for batch in DataLoader(range(6), batch_size=2): optimizer.step()
[(each.steps, each.samples) for each in gc.get_objects() if isinstance(each, Progress)]
"""
    with Cluster(n=1, launcher="local", backend="none", name="plain") as cluster:
        assert cluster.run(f"import torch\n{code}").results == {0: [(3, 6)]}


def test_nested_loaders_report_the_outer_one(quick: Cluster) -> None:
    code = """
import gc, time
from dataclasses import astuple
from torch.utils.data import DataLoader
from jupyter_disttrain.features.telemetry.rank.progress import Progress
(progress,) = [each for each in gc.get_objects() if isinstance(each, Progress)]
next(iter(DataLoader(range(5))))  # its loop was left
seen = {}
for number, _ in enumerate(DataLoader(range(100)), 1):
    time.sleep(0.02)
    if number == 50:
        for _ in DataLoader(range(10)): pass  # validation
    if number > 51: seen[number] = astuple(progress.loop)
together = [astuple(progress.loop) for _ in zip(DataLoader(range(10)), DataLoader(range(100)))]
seen, together
"""
    quick.run("from torch.utils.data import DataLoader")
    seen, together = quick.run(code, 0).results[0]
    assert {number: loop[:2] for number, loop in seen.items()} == {number: (number, 100) for number in range(52, 101)}
    assert all(left_s >= 0.02 * (100 - done) for done, _, left_s, _ in seen.values())
    assert [loop[:2] for loop in together] == [(done, 10) for done in range(1, 11)]
    assert all(left_s >= 0 for _, _, left_s, _ in together[1:])


def test_data_loaders_of_all_kinds_are_unchanged(quick: Cluster) -> None:
    code = """
from torch.utils.data import DataLoader, Sampler
class Odd(Sampler):
    def __init__(self, length): self.length = length
    def __iter__(self): return iter(range(8))
    def __len__(self):
        if self.length is None: raise NotImplementedError
        return self.length
batches = [sum(1 for _ in DataLoader(list(range(8)), batch_size=2, sampler=Odd(length))) for length in (None, 2**64, 8)]
inside = []
inside.append(inside)
batches + [len(list(DataLoader([1, 2], collate_fn=lambda _: inside)))]
"""
    quick.run("from torch.utils.data import DataLoader")
    assert quick.run(code, 0).results[0] == [4, 4, 4, 2]


def test_repeated_short_waits_are_not_reported_as_one_long_wait(quick: Cluster) -> None:
    code = """
import time
if rank == 0:
    for _ in range(16):
        dist.recv(torch.zeros(1), 1)
        sum(range(200_000))  # what it does with it
else:
    for _ in range(16):
        time.sleep(0.3)
        dist.send(torch.ones(1), 0)
"""
    quick.run(code)  # the first time is slow
    run = quick.run(code, block=False)
    waited = []
    while not run.done:
        waited.append(vitals_of(quick, 0).waits_s)
        time.sleep(0.05)
    run.wait()
    assert 0 < max(waited) < 2.4  # half of the whole waiting time


def test_slow_rank_is_named_with_figures_while_the_cell_runs(quick: Cluster, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    code = f"""
import os, time
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
going = torch.ones(1)
while going:
    time.sleep(0.06 if rank == 1 else 0.01)
    optimizer.step()
    going.fill_(not os.path.exists({str(stop)!r}))
    dist.all_reduce(going, op=dist.ReduceOp.MIN)
"""
    run = quick.run(code, block=False)
    remarks: list[str] = []
    assert wait_until(lambda: bool(remarks.extend(run.remarks) or remarks), seconds=40)
    remark = remarks[0]
    stop.touch()
    run.wait()
    found = re.fullmatch(
        r"rank 1 is slower than the others: it takes (.*) s a step by itself, rank 0 (.*) s, and they wait for it",
        remark,
    )
    assert found, remark
    slow, fast = float(found[1]), float(found[2])
    assert 1.25 * fast <= slow < 0.15  # about 0.06 s; what came before the cell does not count


def test_replaced_rank_starts_a_new_history(quick: Cluster) -> None:
    quick.run(TRAIN)
    assert wait_until(lambda: vitals_of(quick, 1).steps >= 4)
    quick.replace([1])
    assert wait_until(lambda: 1 in quick.telemetry.ranks and vitals_of(quick, 1).steps == 0)
    quick.run("x = 1")
    assert wait_until(lambda: state(quick, 1) == "idle")


def test_without_sampling_there_are_no_samples_and_metrics_still_arrive(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    with Cluster(n=2, launcher="local", backend="none", sample_s=0, name="quiet") as cluster:
        run = cluster.run(f"log_metrics(0, x=rank)\n{WAIT.format(path=str(stop))}", block=False)
        assert wait_until(lambda: len(cluster.metrics) == 2)  # while the cell runs
        stop.touch()
        run.wait()
        assert cluster.telemetry.ranks == {}
        assert cluster.telemetry.nodes == ()
    with pytest.raises(UsageError, match=r"at least 0.1 s, or 0 for none, not 0.01 s"):
        Cluster(n=2, sample_s=0.01)


def test_telemetry_messages_are_small(quick: Cluster) -> None:
    """At the default of one a second, below 2 kB a second."""
    assert wait_until(lambda: bool(quick.telemetry.ranks) and bool(quick.telemetry.nodes))
    pack = quick._session.launch.open_link.session.pack
    overhead = 1000  # frames for the topic, the signature and the header
    size = len(pack(vitals_of(quick, 0).to_content())) + len(pack(quick.telemetry.nodes[0].to_content())) + overhead
    assert size < 2000


def test_nvml_is_not_imported_on_ranks() -> None:
    """NVML is loaded by the nanny only, and not without a GPU."""
    code = "import sys, jupyter_disttrain.rank.nanny.nanny; sys.exit('pynvml' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
