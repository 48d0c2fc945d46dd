"""Kill, reset and run scripts many times in one session, and count what grows or is left over.

Covers: descriptors, threads, child processes and memory of the notebook's process, the controller, the warm process and
the ranks; files in /dev/shm and in the temporary folder.
Does not cover: how a session recovers from other faults (campaign).
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks.lib.command_line import add_write_option, exit_on_sigterm, make_parser, report
from benchmarks.lib.environment import RESULTS as FOLDER
from benchmarks.lib.environment import facts
from benchmarks.lib.processes import MB, TOKEN_VARIABLE, WARM_PROCESS, name_of, new_token, with_token
from benchmarks.lib.table import markdown_table, page
from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import RankFailure

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = FOLDER / "endurance.md"
SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size()
dist.destroy_process_group()
"""
CHECK = "total = torch.ones(1)\ndist.all_reduce(total)\ntotal.item()"
CONTROLLER = "jupyter_disttrain.client.transport.controller"
SETTLE_S = 10.0  # for what has been killed to be reaped


def _kill_rank(cluster: Cluster, choose: random.Random) -> None:
    os.kill(choose.choice(cluster.table).info.pid, signal.SIGKILL)


def _kill_nanny(cluster: Cluster, choose: random.Random) -> None:
    os.kill(choose.choice(cluster.table).nanny_pid, signal.SIGKILL)


def _kill_in_cell(cluster: Cluster, choose: random.Random) -> None:
    victim = choose.randrange(cluster.world_size)
    try:
        cluster.run(f"import os, signal\nif rank == {victim}: os.kill(os.getpid(), signal.SIGKILL)\n{CHECK}")
    except RankFailure:
        return
    raise RuntimeError(f"rank {victim} was killed in a cell, which did not fail")


def _reset(cluster: Cluster, _choose: random.Random) -> None:
    cluster.reset()


def _run_script(cluster: Cluster, _choose: random.Random) -> None:
    with tempfile.TemporaryDirectory(prefix="disttrain-bench-") as folder:
        path = Path(folder, "script.py")
        path.write_text(SCRIPT)
        cluster.scripts.run(path)


EVENTS: dict[str, Callable[[Cluster, random.Random], None]] = {
    "kill -9 of a rank": _kill_rank,
    "kill -9 of a rank in a collective": _kill_in_cell,
    "kill -9 of a nanny": _kill_nanny,
    "reset": _reset,
    "script": _run_script,
}


@dataclass(frozen=True, slots=True)
class Counts:
    """What one kind of process uses; ranks are counted together."""

    processes: int
    descriptors: int
    threads: int
    memory_mb: float  # PSS


def count() -> dict[str, Counts]:
    """Return the counts of this session's processes, by kind."""
    by_kind: dict[str, list[psutil.Process]] = {"notebook": [psutil.Process()]}
    for process in with_token(os.environ[TOKEN_VARIABLE]):
        name = name_of(process)
        kind = {WARM_PROCESS: "warm process", CONTROLLER: "controller", "jupyter_disttrain.rank": "ranks"}.get(name)
        by_kind.setdefault(kind or "other", []).append(process)
    return {kind: _sum(found) for kind, found in by_kind.items()}


def _sum(found: list[psutil.Process]) -> Counts:
    return Counts(
        len(found),
        sum(process.num_fds() for process in found),
        sum(process.num_threads() for process in found),
        sum(process.memory_full_info().pss for process in found) / MB,
    )


def files() -> set[str]:
    """Return the files of all sessions in shared memory and in the temporary folder."""
    return {str(path) for folder in ("/dev/shm", tempfile.gettempdir()) for path in Path(folder).iterdir()}


def check(cluster: Cluster) -> None:
    """Run an all_reduce on all ranks; raises a RuntimeError if the session is lost."""
    deadline = time.monotonic() + 60.0
    while True:
        try:
            results = cluster.run(CHECK).results
        except RankFailure as failure:  # the cell was sent before the death was seen
            if time.monotonic() > deadline:
                raise RuntimeError("the session has not recovered") from failure
            continue
        break
    if set(results.values()) != {float(cluster.world_size)} or len(results) != cluster.world_size:
        raise RuntimeError(f"the all_reduce gave {results}")


def main() -> int:
    """Run the events; the exit status is 1 if something was left over."""
    parser = make_parser("benchmarks.faults.endurance", __doc__)
    parser.add_argument("--events", type=int, default=1000, help="(default: %(default)s)")
    parser.add_argument("--scripts", type=int, default=100, help="one after another, first (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--launcher", default="local", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    add_write_option(parser, RESULTS)
    arguments = parser.parse_args()
    exit_on_sigterm()
    os.environ[TOKEN_VARIABLE] = new_token()
    choose = random.Random(arguments.seed)
    before, begun, done = files(), time.monotonic(), Counter[str]()
    rows: list[list[str]] = []

    def note(after: str) -> None:
        for kind, counts in count().items():
            mb = f"{counts.memory_mb:.0f} MB"
            rows.append([after, kind, str(counts.processes), str(counts.descriptors), str(counts.threads), mb])
            print("  ".join(rows[-1]), flush=True)

    with Cluster(n=arguments.ranks, launcher=arguments.launcher, grace_s=0.5) as cluster:
        for _ in range(2):
            _run_script(cluster, choose)
        check(cluster)
        note("2 scripts")
        for _ in range(arguments.scripts):
            _run_script(cluster, choose)
        note(f"{arguments.scripts} scripts more")
        for number in range(1, arguments.events + 1):
            name = choose.choice(list(EVENTS))
            EVENTS[name](cluster, choose)
            check(cluster)
            done[name] += 1
            if number % max(1, arguments.events // 4) == 0:
                cluster.reset()  # so that ranks of one age are compared
                check(cluster)
                note(f"{number} events")
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline and (
        left := [each for each in with_token(os.environ[TOKEN_VARIABLE]) if name_of(each) != WARM_PROCESS]
    ):
        time.sleep(0.1)
    kept = sorted(files() - before)
    lines = markdown_table(("after", "processes", "number", "descriptors", "threads", "memory (PSS)"), rows)
    lines += ["", f"Events: {', '.join(f'{number} of {name}' for name, number in sorted(done.items()))}."]
    lines += [f"Left over: {len(left)} processes, {len(kept)} files{': ' if kept else ''}{', '.join(kept)}."]
    minutes = (time.monotonic() - begun) / 60
    what = f"{arguments.ranks} ranks, launcher {arguments.launcher}, seed {arguments.seed}, {minutes:.0f} minutes"
    report(page("Endurance", [*facts(), what], lines), RESULTS if arguments.write else None)
    return int(bool(left or kept))


if __name__ == "__main__":
    sys.exit(main())
