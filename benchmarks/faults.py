"""``python -m benchmarks.faults``: break sessions at random, and see whether they come back.

Covers: interrupts, kills, errors, stopped and hanging ranks, exits and crashes, at random moments of random cells; what
has to be so after each; how long it took.
Does not cover: the texts that a person sees (the tests do).

A session is a cluster that lives through many rounds. Every round leaves marks on the ranks, runs a cell that would
never end, breaks something in it, and then checks that the very next cell runs on every rank, that survivors have their
marks, that all ranks can all_reduce, and that nothing has grown.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import DisttrainError, RankFailure

from .fault_cells import CELLS, CHECK, COUNT, MPI_CELL, PREPARE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jupyter_disttrain import CellRun
    from jupyter_disttrain.cluster.events import Event

RESULTS = Path(__file__).parent / "results" / "faults.md"
GRACE_S = 1.0  # for ranks to end once another has failed; part of the time of those rounds
PATIENCE_S = 60.0  # for anything that is checked
LONGEST_DELAY_S = 0.6
ALLOWED_GROWTH = 6  # descriptors or threads of one process over a campaign


@dataclass
class Round:
    """What was done in one round, and what came of it."""

    fault: str
    cell: str
    usable_s: float | None = None  # from the fault until an all_reduce of all ranks was done
    named_s: float | None = None  # from the failure until it was told
    lost: str = ""  # why the session did not come back
    dropped: bool = False  # the next cell did not run on every rank


@dataclass
class Campaign:
    """Rounds of several sessions."""

    random: random.Random
    faults: Sequence[str]  # to choose from
    rounds: list[Round] = field(default_factory=list)
    grown: list[str] = field(default_factory=list)

    def session(self, n: int, launcher: str, rounds: int) -> None:
        """Break one session ``rounds`` times; a lost one is replaced, and counted."""
        before = _own_counts()
        while rounds > 0:
            with Cluster(n=n, launcher=launcher, grace_s=GRACE_S, hang_after_s=5.0) as cluster:
                rounds -= self._break_session(cluster, launcher, rounds)
        left = {name: count - before[name] for name, count in _own_counts().items() if count > before[name]}
        self.grown += [f"the notebook's process kept {count} {name} of a session" for name, count in left.items()]

    def _break_session(self, cluster: Cluster, launcher: str, rounds: int) -> int:
        """Run rounds until one is lost; returns how many were run."""
        first: dict[int, tuple[Counter[str], int, int]] = {}
        for number in range(rounds):
            result = self._round(cluster)
            self.rounds.append(result)
            usable = "-" if result.usable_s is None else f"{result.usable_s:.2f} s"
            where = f"{cluster.world_size} ranks, {launcher}"
            print(f"{len(self.rounds):4} {where}: {result.fault} in {result.cell}: {usable} {result.lost}", flush=True)
            if result.lost:
                return number + 1
            if number + 1 in (rounds // 2, rounds):  # by half time each cell has made what it makes only once
                self._compare(cluster, first)
        return rounds

    def _compare(self, cluster: Cluster, first: dict[int, tuple[Counter[str], int, int]]) -> None:
        """Compare what each process of a rank holds with what it held when it was seen first."""
        counts = cluster.run(COUNT, timeout_s=PATIENCE_S).results
        for rank, (pid, descriptors, threads, children) in counts.items():
            before, *then = first.setdefault(pid, (descriptors, threads, children))
            added = "".join(f" +{count} {kind}" for kind, count in (descriptors - before).items())
            for what, a, b, allowed in (
                ("descriptors", before.total(), descriptors.total(), ALLOWED_GROWTH),
                ("threads", then[0], threads, ALLOWED_GROWTH),
                ("child processes", then[1], children, 0),
            ):
                if b > a + allowed:
                    self.grown.append(f"rank {rank}: {a} {what} at first, {b} at last{added}")

    def _round(self, cluster: Cluster) -> Round:
        choose = self.random
        has_world = cluster.config.launcher == "mpi" and not cluster.mpi_lost
        cells = CELLS | ({"MPI allreduce": MPI_CELL} if has_world else {})
        fault, cell = choose.choice(self.faults), choose.choice(list(cells))
        result = Round(fault=fault, cell=cell)
        victim = choose.randrange(cluster.world_size)
        mark = choose.randrange(1000) * 100
        try:
            cluster.run(
                PREPARE.format(mark=mark, victim=victim, at=choose.randrange(1, 12), fault=fault), timeout_s=PATIENCE_S
            )
            pids = {entry.info.rank: entry.info.pid for entry in cluster.table}
            struck_at = FAULTS[fault](cluster, result, cells[cell], victim, choose.uniform(0.0, LONGEST_DELAY_S))
        except (DisttrainError, TimeoutError, KeyboardInterrupt) as error:
            doing = " | ".join(cluster.where())
            result.lost = f"the round itself failed: {type(error).__name__}: {error} ({doing})"
            return result
        self._check(cluster, result, pids, mark)
        result.usable_s = None if result.lost else time.time() - struck_at
        return result

    @staticmethod
    def _check(cluster: Cluster, result: Round, pids: dict[int, int], mark: int) -> None:
        ranks = range(cluster.world_size)
        try:
            has_world = cluster.config.launcher == "mpi" and not cluster.mpi_lost
            found = cluster.run(CHECK.format(has_world=has_world), timeout_s=PATIENCE_S).results
        except (DisttrainError, KeyboardInterrupt) as error:
            doing = " | ".join(cluster.where())
            result.lost, result.dropped = f"the next cell failed: {type(error).__name__}: {error} ({doing})", True
            return
        if set(found) != set(ranks):
            result.lost, result.dropped = f"the next cell ran on {sorted(found)} alone", True
            return
        total = float(sum(rank + 1 for rank in ranks))
        for rank, (pid, reduced, in_mpi, kept, tensor) in found.items():
            if reduced != [total] or in_mpi != cluster.world_size:
                result.lost = f"all_reduce gave {reduced} on rank {rank}, not {total}; MPI's {in_mpi}"
            expected = (mark + rank, [float(mark + rank)]) if pid == pids[rank] else (None, [0.0])
            if (kept, tensor) != expected:
                result.lost = f"rank {rank} has {kept, tensor} in place of {expected}"


def _own_counts() -> Counter[str]:
    me = psutil.Process()
    return Counter(
        descriptors=me.num_fds(),
        processes=len(me.children(recursive=True)),
        threads=sum("disttrain" in thread.name for thread in threading.enumerate()),
    )


# The faults: each runs the cell, breaks it, waits for the prompt, and returns when it broke, in seconds since the epoch


class EarlyFailureError(DisttrainError):
    """A cell failed before anything was done to it."""


class _Watcher:
    """A person who sees the first failure, and presses stop then where the others wait for nobody and would go on."""

    def __init__(self, code: str) -> None:
        self._presses = code == CELLS["python loop"]
        self.named_at = 0.0  # seconds since the epoch

    def on_events(self, events: Sequence[Event], run: CellRun) -> None:  # noqa: ARG002
        """Look for the first failure."""
        if run.failures and not self.named_at:
            self.named_at = time.time()
            if self._presses:
                _press()

    def on_end(self, run: CellRun) -> None:
        """Do nothing."""


def _expect_failure(cluster: Cluster, result: Round, code: str) -> float:
    """Run a cell that ends in a failure, and return when the first rank failed."""
    watcher = _Watcher(code)
    try:
        cluster.run(code, timeout_s=PATIENCE_S, listener=watcher)
    except RankFailure as error:
        struck_at = min(failure.time_s for failure in error.failures)
        result.named_s = watcher.named_at - struck_at
        return struck_at
    raise AssertionError("a cell that never ends has ended")


def _break_itself(cluster: Cluster, result: Round, code: str, _victim: int, _delay_s: float) -> float:
    return _expect_failure(cluster, result, code)


def _meanwhile(delay_s: float, act: Callable[[], None]) -> tuple[threading.Thread, list[float]]:
    """Act after a while; returns the thread and the moments at which it acted."""
    moments: list[float] = []

    def work() -> None:
        time.sleep(delay_s)  # the random moment is what is tested
        moments.append(time.time())
        act()

    thread = threading.Thread(target=work)
    thread.start()
    return thread, moments


def _press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def _interrupted(cluster: Cluster, code: str, delay_s: float, press: Callable[[], None]) -> float:
    thread, moments = _meanwhile(delay_s, press)
    try:
        cluster.run(code, timeout_s=PATIENCE_S)
    except (RankFailure, KeyboardInterrupt) as error:
        if not moments:
            raise EarlyFailureError(_words(error)) from error
        return moments[-1]
    finally:
        _join(thread)
    raise AssertionError("a cell that never ends has ended")


def _words(error: BaseException) -> str:
    """Return all that an error tells, its ranks' tracebacks too."""
    lines = error._render_traceback_() if isinstance(error, RankFailure) else [repr(error)]
    return "\n".join(lines)


def _join(thread: threading.Thread) -> None:
    """Wait for a thread whose last interrupt may come when there is nothing left to interrupt."""
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt:
            continue


def _interrupt(cluster: Cluster, _result: Round, code: str, _victim: int, delay_s: float) -> float:
    return _interrupted(cluster, code, delay_s, _press)


def _interrupt_twice(cluster: Cluster, _result: Round, code: str, _victim: int, delay_s: float) -> float:
    def press() -> None:
        _press()
        time.sleep(delay_s / 20)
        if any(entry.state == "running" for entry in cluster.table):
            _press()

    return _interrupted(cluster, code, delay_s, press)


def _hang(cluster: Cluster, _result: Round, code: str, _victim: int, delay_s: float) -> float:
    """One rank never comes; the person waits for a while and presses stop."""
    return _interrupted(cluster, code, delay_s + 0.5, _press)


def _stop_and_go(cluster: Cluster, _result: Round, code: str, victim: int, delay_s: float) -> float:
    """One rank is stopped, the person presses stop, later the rank goes on."""
    pid = cluster.table[victim].info.pid

    def press() -> None:
        os.kill(pid, signal.SIGSTOP)
        _press()
        time.sleep(delay_s)
        os.kill(pid, signal.SIGCONT)

    return _interrupted(cluster, code, delay_s, press) + delay_s


def _killed(cluster: Cluster, result: Round, code: str, victims: Sequence[int], delay_s: float) -> float:
    processes = [psutil.Process(cluster.table[rank].info.pid) for rank in victims]

    def kill() -> None:
        for process in processes:
            process.kill()

    thread, moments = _meanwhile(delay_s, kill)
    watcher = _Watcher(code)
    try:
        cluster.run(code, timeout_s=PATIENCE_S, listener=watcher)
    except RankFailure as error:
        if not moments:
            raise EarlyFailureError(_words(error)) from error
        result.named_s = watcher.named_at - moments[0]
        return moments[0]
    finally:
        _join(thread)
    raise AssertionError("a cell that never ends has ended")


def _kill(cluster: Cluster, result: Round, code: str, victim: int, delay_s: float) -> float:
    return _killed(cluster, result, code, [victim], delay_s)


def _kill_two(cluster: Cluster, result: Round, code: str, victim: int, delay_s: float) -> float:
    return _killed(cluster, result, code, [victim, (victim + 1) % cluster.world_size], delay_s)


FAULTS: dict[str, Callable[[Cluster, Round, str, int, float], float]] = {
    "interrupt": _interrupt,
    "interrupt twice": _interrupt_twice,
    "kill": _kill,
    "kill two": _kill_two,
    "raise": _break_itself,
    "sys.exit": _break_itself,
    "exit": _break_itself,
    "segfault": _break_itself,
    "hang": _hang,
    "stop and go": _stop_and_go,
}


def summary(campaign: Campaign, seed: int) -> list[str]:
    """Return the figures as lines of Markdown."""
    rounds = campaign.rounds
    lost = [each for each in rounds if each.lost]
    times = sorted(each.usable_s for each in rounds if each.usable_s is not None)
    dropped = sum(each.dropped for each in rounds)
    head = f"seed {seed}: {len(rounds)} rounds, {len(lost)} sessions lost, {dropped} cells dropped, usable again after "
    head += f"{statistics.median(times):.2f} s (median), {_p95(times):.2f} s (p95)"
    lines = [
        head,
        "",
        "| fault | rounds | median | p95 | longest | told after (median) |",
        "|---|---|---|---|---|---|",
    ]
    for fault in FAULTS:
        found = sorted(each.usable_s for each in rounds if each.fault == fault and each.usable_s is not None)
        if found:
            median = statistics.median(found)
            named = [each.named_s for each in rounds if each.fault == fault and each.named_s is not None]
            told = f"{statistics.median(named) * 1000:.0f} ms" if named else "-"
            figures = f"{median:.2f} s | {_p95(found):.2f} s | {found[-1]:.2f} s | {told}"
            lines.append(f"| {fault} | {len(found)} | {figures} |")
    lines += ["", *(f"- lost: {each.fault} in {each.cell}: {each.lost}" for each in lost)]
    lines += [f"- grown: {words}" for words in campaign.grown] or ["No process, thread or descriptor was left over."]
    return lines


def _p95(ordered: list[float]) -> float:
    return ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]


def main() -> int:
    """Run the campaign; the exit status is 1 if a session was lost, a cell dropped or something grew."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--launcher", nargs="+", default=["mpi", "local"])
    parser.add_argument("--fault", nargs="+", default=list(FAULTS), choices=list(FAULTS), help="those alone")
    parser.add_argument("--write", action="store_true", help=f"write the figures to {RESULTS.name}")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without it
    texts, failed = [], False
    for seed in arguments.seed:
        campaign = Campaign(random=random.Random(seed), faults=arguments.fault)
        kinds = [(n, launcher) for n in arguments.ranks for launcher in arguments.launcher]
        for at, (n, launcher) in enumerate(kinds):
            campaign.session(n, launcher, len(range(at, arguments.rounds, len(kinds))))
        text = summary(campaign, seed)
        print("\n".join(["", *text, ""]), flush=True)
        texts.append("\n".join(text))
        failed |= bool(campaign.grown) or any(each.lost or each.dropped for each in campaign.rounds)
    if arguments.write:
        heading = f"# Fault campaign\n\nIn all times of raise and sys.exit stand {GRACE_S:g} s of grace.\n\n"
        RESULTS.write_text(heading + "\n\n".join(texts) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
