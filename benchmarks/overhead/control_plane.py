"""``python -m benchmarks.control_plane``: what 16 to 256 ranks cost that do nothing, and what of it grows.

Covers: start, an empty cell, output, status, an interrupt, the end; memory and processor time of all processes.
Does not cover: ranks with torch, training.

The ranks have no torch (``--backend none``) and are on this machine, so with many of them what is measured is how its
cores are shared out; the table says for each process what it used, which does not depend on that. ``--lab`` has them on
two hosts made of namespaces, reached by ssh and TCP, with every message encrypted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import psutil

from benchmarks.lib import environment, processes
from benchmarks.lib.outputs import check_lines
from benchmarks.lib.session import Session
from benchmarks.lib.stats import percentile
from benchmarks.lib.tools import Ours
from tests.lab import Lab

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = Path(__file__).parents[1] / "results" / "control_plane.md"
RANKS = (16, 64, 128, 256)
LINES = 1000
LIMIT_S = 300.0
WARM_UP = 5
SPACE_MB = 6000.0  # that must stay free on the machine
RANK_MB = 30.0  # PSS of a rank and its nanny, a little more than measured
PIDS = "import json; print(json.dumps([[e.info.host, e.info.pid, e.nanny_pid] for e in cluster.table]))"
LOGGED = """
from pathlib import Path
print(sum(Path(path).read_bytes().count(b" line ") for path in Path(cluster.log_folder).glob("rank*.log")))
"""
ROLES = ("ranks", "nannies", "controller", "others", "notebook")  # of processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Many(Ours):
    """This package with many small ranks."""

    options: str = "--launcher local"

    def torchless_start_cells(self, ranks: int) -> list[str] | None:
        count = "" if "--hosts" in self.options else f"-n {ranks} "
        return [f"%dist_init {count}--backend none --start-timeout {LIMIT_S:g} {self.options}"]


def _pids_here(lab: Lab) -> dict[tuple[str, int], int]:
    """Return the pids of this machine by a host of the lab and the pid there."""
    pids = {}
    for host in lab.hosts:
        for process in lab.processes(host):
            status = Path(f"/proc/{process.pid}/status").read_text()
            there = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1]
            pids[host, int(there)] = process.pid
    return pids


@dataclass(slots=True)
class Groups:
    """The processes of one session by what they are."""

    members: dict[str, list[psutil.Process]]

    @classmethod
    def find(cls, session: Session, lab: Lab | None) -> Groups:
        told = json.loads(session.local(PIDS).text)
        pids = _pids_here(lab) if lab else {}
        ranks, nannies = ({pids.get((host, pair[at]), pair[at]) for host, *pair in told} for at in (0, 1))
        members: dict[str, list[psutil.Process]] = {name: [] for name in ROLES}
        for process in {*processes.with_token(session.kernel.token), *map(psutil.Process, ranks | nannies)}:
            if process.pid in ranks:
                name = "ranks"
            elif process.pid in nannies:
                name = "nannies"
            elif process.pid == session.kernel.pid:
                name = "notebook"
            else:
                name = "controller" if "cluster.controller" in processes.name_of(process) else "others"
            members[name].append(process)
        return cls(members)

    def memory_mb(self) -> dict[str, float]:
        return {
            name: sum(processes.memory_of(process.pid).pss_mb for process in found)
            for name, found in self.members.items()
        }

    def cpu_s(self) -> dict[str, float]:
        return {name: processes.cpu_seconds(found) for name, found in self.members.items()}

    def open_files(self) -> int:
        """Return those of the controller's process that has most."""
        return max(process.num_fds() for process in self.members["controller"])

    def threads(self) -> int:
        """Return those of all ranks and nannies."""
        return sum(process.num_threads() for name in ("ranks", "nannies") for process in self.members[name])

    def left(self) -> int:
        """Return how many still run, the notebook left out."""
        return sum(
            process.is_running() for name, found in self.members.items() if name != "notebook" for process in found
        )


@dataclass(slots=True)
class Point:
    """The figures of one number of ranks; seconds, MB and parts of one core."""

    ranks: int
    start_s: float = 0.0
    floor_s: list[float] = field(default_factory=list)
    pass_s: list[float] = field(default_factory=list)
    pass_cpu_s: dict[str, float] = field(default_factory=dict)  # of one cell, by what the process is
    line_s: list[float] = field(default_factory=list)
    flood_s: float = 0.0
    status_s: list[float] = field(default_factory=list)
    interrupt_s: list[float] = field(default_factory=list)
    shutdown_s: float = 0.0
    memory_mb: dict[str, float] = field(default_factory=dict)
    open_files: int = 0
    threads: int = 0
    before_mb: float = 0.0  # of the notebook, when it had loaded nothing
    idle_cores: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def floor(ranks: int, times: int) -> list[float]:
    """Return seconds of round trips to as many processes through ZeroMQ alone."""
    command = [sys.executable, "-m", "benchmarks.overhead.zmq_round_trips", str(ranks), str(times)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=environment.ROOT)
    return [float(word) for word in said.stdout.split()]


def measure(ranks: int, lab: Lab | None, times: int, idle_s: float) -> Point:
    """Start so many ranks and measure everything.

    Raises
    ------
    RuntimeError
        If this machine has not the memory for them.
    """
    free_mb = psutil.virtual_memory().available / processes.MB
    if free_mb < ranks * RANK_MB + SPACE_MB:
        raise RuntimeError(f"{ranks} ranks take {ranks * RANK_MB:.0f} MB, and {free_mb:.0f} MB are free")
    point = Point(ranks, floor_s=floor(ranks, times))
    arm = Many(name="jupyter_disttrain", limit_s=LIMIT_S, options=_options(lab, ranks))
    with Session(arm, ranks, {"OMP_NUM_THREADS": "1"}, torch=False) as session:
        point.start_s = session.start_s
        assert session.before is not None
        point.before_mb = session.before.pss_mb
        groups = Groups.find(session, lab)
        _cells(session, groups, point, times)
        _lines(session, point, times)
        point.status_s = [session.local("%dist_status --text").seconds for _ in range(3)]
        point.interrupt_s = [_interrupt(session) for _ in range(3)]
        session.on_all_ranks("pass")
        _idle(groups, point, idle_s)
        point.memory_mb = groups.memory_mb()
        point.open_files, point.threads = groups.open_files(), groups.threads()
        point.shutdown_s = session.local("%dist_shutdown").seconds
        if groups.left():
            point.problems.append(f"{groups.left()} processes were there after `%dist_shutdown`")
    return point


def _cells(session: Session, groups: Groups, point: Point, times: int) -> None:
    for _ in range(WARM_UP):
        session.on_all_ranks("pass")
    before = groups.cpu_s()
    point.pass_s = [session.on_all_ranks("pass").seconds for _ in range(times)]
    point.pass_cpu_s = {name: (used - before[name]) / times for name, used in groups.cpu_s().items()}


def _lines(session: Session, point: Point, times: int) -> None:
    """Have each rank say one line, then many; what is missing, or has another rank's name, is a problem."""
    for _ in range(max(3, times // 5)):
        record = session.on_all_ranks('print("rank", rank, "line 0")')
        point.line_s.append(record.seconds)
        problem = check_lines(record.text, point.ranks, 1).problem
        point.problems += [f"one line from each rank: {problem}"] if problem else []
    logged = int(session.local(LOGGED).text)
    record = session.on_all_ranks(f'for i in range({LINES}): print("rank", rank, "line", i)')
    point.flood_s = record.seconds
    missing = LINES * point.ranks - (int(session.local(LOGGED).text) - logged)
    point.problems += [f"{missing} of {LINES * point.ranks} lines are not in the logs"] if missing else []


def _interrupt(session: Session) -> float:
    """Interrupt a cell that all ranks run; returns seconds from the signal until the prompt is back."""
    pressed: list[float] = []

    def press() -> None:
        pressed.append(time.perf_counter())
        os.kill(session.kernel.pid, signal.SIGINT)

    timer = threading.Timer(2.0 + session.ranks / 100, press)  # by then all ranks have begun
    timer.start()
    record = session.kernel.run(session.arm.on_all_ranks("import time; time.sleep(600)"), timeout_s=120, check=False)
    timer.join()
    assert "KeyboardInterrupt" in record.failure, record.failure
    return record.idle_s - pressed[0]


def _idle(groups: Groups, point: Point, seconds: float) -> None:
    time.sleep(2.0)
    before, begun = groups.cpu_s(), time.monotonic()
    time.sleep(seconds)
    elapsed_s = time.monotonic() - begun
    point.idle_cores = {name: (used - before[name]) / elapsed_s for name, used in groups.cpu_s().items()}


def _ms(values: list[float]) -> str:
    return f"{1000 * median(values):.1f} ms (p95 {1000 * percentile(tuple(values), 95):.1f})"


def table(points: list[Point]) -> str:
    """Return the figures as a table, a column for each number of ranks."""

    def per_rank(point: Point, name: str) -> str:
        return f"{point.memory_mb[name] / point.ranks:.1f} MB"

    def core(used: float) -> str:
        return f"{100 * used:.1f} %"

    rows: list[tuple[str, Callable[[Point], str]]] = [
        ("`%dist_init` until all ranks are ready", lambda p: f"{p.start_s:.1f} s"),
        ("floor: a message through ZeroMQ alone to as many processes, and back", lambda p: _ms(p.floor_s)),
        ("`pass` on all ranks, to idle", lambda p: _ms(p.pass_s)),
        ("processor time of one `pass`: notebook", lambda p: f"{1000 * p.pass_cpu_s['notebook']:.1f} ms"),
        ("... controller", lambda p: f"{1000 * p.pass_cpu_s['controller']:.1f} ms"),
        ("... all ranks and nannies", lambda p: f"{1000 * (p.pass_cpu_s['ranks'] + p.pass_cpu_s['nannies']):.0f} ms"),
        ("one line from each rank, all shown", lambda p: _ms(p.line_s)),
        (f"{LINES:,} lines from each rank, to idle", lambda p: f"{p.flood_s:.2f} s"),
        ("`%dist_status --text`", lambda p: f"{1000 * median(p.status_s):.0f} ms"),
        ("interrupt of all ranks, until the prompt is back", lambda p: f"{median(p.interrupt_s):.2f} s"),
        ("`%dist_shutdown`, until nothing is left", lambda p: f"{p.shutdown_s:.2f} s"),
        ("memory, PSS: a rank", lambda p: per_rank(p, "ranks")),
        ("... its nanny", lambda p: per_rank(p, "nannies")),
        ("... controller", lambda p: f"{p.memory_mb['controller']:.1f} MB"),
        ("... notebook, before `%load_ext` and now", lambda p: f"{p.before_mb:.1f}, {p.memory_mb['notebook']:.1f} MB"),
        ("... all together", lambda p: f"{sum(p.memory_mb.values()) / 1000:.2f} GB"),
        ("open files of the controller", lambda p: str(p.open_files)),
        ("threads of a rank and its nanny", lambda p: f"{p.threads / p.ranks:.0f}"),
        ("idle, part of a core: notebook", lambda p: core(p.idle_cores["notebook"])),
        ("... controller", lambda p: core(p.idle_cores["controller"])),
        ("... all ranks", lambda p: core(p.idle_cores["ranks"])),
        ("... all nannies", lambda p: core(p.idle_cores["nannies"])),
    ]
    lines = [f"| | {' | '.join(f'{p.ranks} ranks' for p in points)} |", f"| --- |{' --- |' * len(points)}"]
    lines += [f"| {name} | {' | '.join(show(p) for p in points)} |" for name, show in rows]
    problems = [f"- {p.ranks} ranks: **{problem}**" for p in points for problem in p.problems]
    return "\n".join([*lines, *(["", *problems] if problems else [])])


def _options(lab: Lab | None, ranks: int) -> str:
    if lab is None:
        return "--launcher local"
    return f"--launcher ssh --ssh {lab.ssh} --hosts {','.join(f'{host}:{ranks // 2}' for host in lab.hosts)}"


def main() -> int:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control_plane", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="numbers of ranks, one after the other")
    parser.add_argument("--lab", action="store_true", help="on two hosts of tests/lab, by ssh, encrypted")
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--write", action="store_true", help="write the table that docs/benchmarks.md quotes")
    arguments = parser.parse_args()
    times, idle_s = (10, 5.0) if arguments.quick else (50, 20.0)
    facts, points = environment.facts(), []
    for ranks in arguments.ranks:
        with ExitStack() as stack:
            lab = stack.enter_context(Lab(2)) if arguments.lab else None  # it takes root
            points.append(measure(ranks, lab, times, idle_s))
        print(table(points[-1:]), flush=True)
    where = "two hosts of the lab, launcher ssh, CurveZMQ" if arguments.lab else "this machine, launcher local"
    head = ["# What many ranks cost", "", *(f"- {fact}" for fact in [*facts, f"ranks without torch on {where}"]), ""]
    text = "\n".join([*head, table(points)])
    print(text)
    if arguments.write:
        (RESULTS.with_stem("control_plane_lab") if arguments.lab else RESULTS).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
