"""Measure 16 to 256 idle ranks: the cost of the control plane, and how it grows.

Covers: start, an empty cell, output, status, an interrupt, shutdown; memory and processor time of all processes.
Does not cover: ranks with torch, training.

The ranks have no torch (``--backend none``) and run on this machine, so the times of many ranks depend on the number of
cores; the processor time of each process does not. With ``--lab`` they run on two hosts made of namespaces, over ssh
and TCP, with every message encrypted.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

import psutil

from benchmarks.lib import environment, processes
from benchmarks.lib.command_line import add_write_option, make_parser, report
from benchmarks.lib.outputs import check_lines
from benchmarks.lib.session import Session
from benchmarks.lib.stats import percentile
from benchmarks.lib.table import bullets, markdown_table, page
from benchmarks.lib.tools import DISTTRAIN, Disttrain
from tests.lab import Lab

from .session_processes import SessionProcesses

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = environment.RESULTS / "control_plane.md"
RANKS = (16, 64, 128, 256)
LINES = 1000
LIMIT_S = 300.0
WARM_UP = 5
RESERVED_MB = 6000.0  # memory that must stay free
RANK_MB = 30.0  # PSS of a rank and its nanny, with a margin
COUNT_LOGGED_LINES = """
from pathlib import Path
print(sum(Path(path).read_bytes().count(b" line ") for path in Path(cluster.log_folder).glob("rank*.log")))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchlessDisttrain(Disttrain):
    """jupyter_disttrain with many ranks without torch."""

    options: str = "--launcher local"

    def torchless_start_cells(self, ranks: int) -> list[str] | None:
        count = "" if "--hosts" in self.options else f"-n {ranks} "
        return [f"%dist_init {count}--backend none --start-timeout {LIMIT_S:g} {self.options}"]


@dataclass(slots=True)
class Costs:
    """The results for one number of ranks, in seconds, MB and fractions of one core."""

    ranks: int
    lower_bound_s: list[float]
    start_s: float = 0.0
    pass_s: list[float] = field(default_factory=list)
    pass_cpu_s: dict[str, float] = field(default_factory=dict)  # of one cell, by role
    line_s: list[float] = field(default_factory=list)
    flood_s: float = 0.0
    status_s: list[float] = field(default_factory=list)
    interrupt_s: list[float] = field(default_factory=list)
    shutdown_s: float = 0.0
    memory_mb: dict[str, float] = field(default_factory=dict)  # by role
    open_files: int = 0
    threads: int = 0
    kernel_mb: float = 0.0  # of the notebook before the extension was loaded
    idle_cores: dict[str, float] = field(default_factory=dict)  # by role
    problems: list[str] = field(default_factory=list)


def lower_bound(ranks: int, repetitions: int) -> list[float]:
    """Return the seconds of round trips over plain ZeroMQ to as many processes."""
    command = [sys.executable, "-m", "benchmarks.overhead.zmq_round_trips", str(ranks), str(repetitions)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=environment.ROOT)
    return [float(seconds) for seconds in done.stdout.split()]


def measure(ranks: int, lab: Lab | None, repetitions: int, idle_s: float) -> Costs:
    """Start ``ranks`` ranks and measure all costs.

    Raises
    ------
    RuntimeError
        If this machine has too little free memory.
    """
    free_mb = psutil.virtual_memory().available / processes.MB
    needed_mb = ranks * RANK_MB + RESERVED_MB
    if free_mb < needed_mb:
        raise RuntimeError(f"{ranks} ranks need {needed_mb:.0f} MB of free memory, there are {free_mb:.0f} MB")
    costs = Costs(ranks, lower_bound_s=lower_bound(ranks, repetitions))
    tool = TorchlessDisttrain(name=DISTTRAIN, limit_s=LIMIT_S, options=_options(lab, ranks))
    with Session(tool, ranks, {"OMP_NUM_THREADS": "1"}, torch=False) as session:
        costs.start_s = session.start_s
        assert session.before is not None
        costs.kernel_mb = session.before.pss_mb
        found = SessionProcesses.find(session, lab)
        _cells(session, found, costs, repetitions)
        _lines(session, costs, repetitions)
        costs.status_s = [session.local("%dist_status --text").seconds for _ in range(3)]
        costs.interrupt_s = [_interrupt(session) for _ in range(3)]
        session.on_all_ranks("pass")
        _idle(found, costs, idle_s)
        costs.memory_mb = found.memory_mb()
        costs.open_files, costs.threads = found.open_files(), found.threads()
        costs.shutdown_s = session.local("%dist_shutdown").seconds
        if found.running():
            costs.problems.append(f"{found.running()} processes still ran after `%dist_shutdown`")
    return costs


def _cells(session: Session, found: SessionProcesses, costs: Costs, repetitions: int) -> None:
    for _ in range(WARM_UP):
        session.on_all_ranks("pass")
    before = found.cpu_s()
    costs.pass_s = [session.on_all_ranks("pass").seconds for _ in range(repetitions)]
    costs.pass_cpu_s = {role: (used - before[role]) / repetitions for role, used in found.cpu_s().items()}


def _lines(session: Session, costs: Costs, repetitions: int) -> None:
    """Print one line on each rank, then many; missing and mislabelled lines are problems."""
    for _ in range(max(3, repetitions // 5)):
        record = session.on_all_ranks('print("rank", rank, "line 0")')
        costs.line_s.append(record.seconds)
        problem = check_lines(record.text, costs.ranks, 1).problem
        costs.problems += [f"one line from each rank: {problem}"] if problem else []
    before = int(session.local(COUNT_LOGGED_LINES).text)
    record = session.on_all_ranks(f'for i in range({LINES}): print("rank", rank, "line", i)')
    costs.flood_s = record.seconds
    total = LINES * costs.ranks
    missing = total - (int(session.local(COUNT_LOGGED_LINES).text) - before)
    costs.problems += [f"{missing} of {total} lines are missing in the logs"] if missing else []


def _interrupt(session: Session) -> float:
    """Interrupt a cell on all ranks; returns the seconds from the signal until the kernel is idle."""
    sent_s: list[float] = []

    def interrupt() -> None:
        sent_s.append(time.perf_counter())
        os.kill(session.kernel.pid, signal.SIGINT)

    timer = threading.Timer(2.0 + session.ranks / 100, interrupt)  # all ranks have begun the cell by then
    timer.start()
    record = session.kernel.run(session.tool.on_all_ranks("import time; time.sleep(600)"), timeout_s=120, check=False)
    timer.join()
    assert "KeyboardInterrupt" in record.failure, record.failure
    return record.idle_s - sent_s[0]


def _idle(found: SessionProcesses, costs: Costs, seconds: float) -> None:
    """Measure the processor time of an idle session."""
    time.sleep(2.0)
    before, begun = found.cpu_s(), time.monotonic()
    time.sleep(seconds)
    elapsed_s = time.monotonic() - begun
    costs.idle_cores = {role: (used - before[role]) / elapsed_s for role, used in found.cpu_s().items()}


def _ms(values: list[float]) -> str:
    return f"{1000 * median(values):.1f} ms (p95 {1000 * percentile(values, 95):.1f})"


def _percent(cores: float) -> str:
    return f"{100 * cores:.1f} %"


def _per_rank(costs: Costs, role: str) -> str:
    return f"{costs.memory_mb[role] / costs.ranks:.1f} MB"


ROWS: tuple[tuple[str, Callable[[Costs], str]], ...] = (
    ("`%dist_init` until all ranks are ready", lambda c: f"{c.start_s:.1f} s"),
    ("lower bound: round trip over plain ZeroMQ to as many processes", lambda c: _ms(c.lower_bound_s)),
    ("`pass` on all ranks, until idle", lambda c: _ms(c.pass_s)),
    ("processor time of one `pass`: notebook", lambda c: f"{1000 * c.pass_cpu_s['notebook']:.1f} ms"),
    ("... controller", lambda c: f"{1000 * c.pass_cpu_s['controller']:.1f} ms"),
    ("... all ranks and nannies", lambda c: f"{1000 * (c.pass_cpu_s['ranks'] + c.pass_cpu_s['nannies']):.0f} ms"),
    ("one line from each rank, all shown", lambda c: _ms(c.line_s)),
    (f"{LINES:,} lines from each rank, until idle", lambda c: f"{c.flood_s:.2f} s"),
    ("`%dist_status --text`", lambda c: f"{1000 * median(c.status_s):.0f} ms"),
    ("interrupt of all ranks, until idle", lambda c: f"{median(c.interrupt_s):.2f} s"),
    ("`%dist_shutdown`, until all processes have exited", lambda c: f"{c.shutdown_s:.2f} s"),
    ("memory, PSS: a rank", lambda c: _per_rank(c, "ranks")),
    ("... its nanny", lambda c: _per_rank(c, "nannies")),
    ("... controller", lambda c: f"{c.memory_mb['controller']:.1f} MB"),
    ("... notebook, before `%load_ext` and now", lambda c: f"{c.kernel_mb:.1f}, {c.memory_mb['notebook']:.1f} MB"),
    ("... total", lambda c: f"{sum(c.memory_mb.values()) / 1000:.2f} GB"),
    ("open files of the controller", lambda c: str(c.open_files)),
    ("threads of a rank and its nanny", lambda c: f"{c.threads / c.ranks:.0f}"),
    ("idle, share of a core: notebook", lambda c: _percent(c.idle_cores["notebook"])),
    ("... controller", lambda c: _percent(c.idle_cores["controller"])),
    ("... all ranks", lambda c: _percent(c.idle_cores["ranks"])),
    ("... all nannies", lambda c: _percent(c.idle_cores["nannies"])),
)


def table(found: list[Costs]) -> list[str]:
    """Return a table with one column for each number of ranks, and the problems below it."""
    head = ("", *(f"{costs.ranks} ranks" for costs in found))
    lines = markdown_table(head, [(name, *(show(costs) for costs in found)) for name, show in ROWS])
    problems = bullets(f"{costs.ranks} ranks: **{problem}**" for costs in found for problem in costs.problems)
    return [*lines, *(["", *problems] if problems else [])]


def _options(lab: Lab | None, ranks: int) -> str:
    if lab is None:
        return "--launcher local"
    return f"--launcher ssh --ssh {lab.ssh} --hosts {','.join(f'{host}:{ranks // 2}' for host in lab.hosts)}"


def main() -> int:
    """Measure, print and write the table."""
    parser = make_parser("benchmarks.overhead.control_plane", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="numbers of ranks, one after the other")
    parser.add_argument("--lab", action="store_true", help="on two hosts of tests/lab, over ssh; needs root")
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    add_write_option(parser, RESULTS)
    arguments = parser.parse_args()
    repetitions, idle_s = (10, 5.0) if arguments.quick else (50, 20.0)
    facts, found = environment.facts(), []
    for ranks in arguments.ranks:
        with ExitStack() as stack:
            lab = stack.enter_context(Lab(2)) if arguments.lab else None
            found.append(measure(ranks, lab, repetitions, idle_s))
        print("\n".join(table(found[-1:])), flush=True)
    where = "two hosts of the lab, launcher ssh, CurveZMQ" if arguments.lab else "this machine, launcher local"
    path = RESULTS.with_stem("control_plane_lab") if arguments.lab else RESULTS
    text = page("Cost of many ranks", [*facts, f"ranks without torch on {where}"], table(found))
    report(text, path if arguments.write else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
