"""``python -m benchmarks.telemetry``: what figures and metrics cost the ranks, the notebook and the network.

Covers: a call of ``log_metrics``, a DDP loop with and without figures, the notebook's share with 64 ranks, messages,
the page with 64 and 512 ranks (``page``), the side panel's (``page.panel``).
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil

from benchmarks.lib import environment
from jupyter_disttrain import Cluster
from jupyter_disttrain.cluster.snapshot import metrics_packet, rank_snapshots

from .page import side_panel as panel
from .page.widget import measure

RESULTS = Path(__file__).parents[1] / "results" / "telemetry.md"
LOOP = (Path(__file__).parents[1] / "workloads" / "ddp_loop.py").read_text()
# Short, and many of them: the machine's own speed changes within seconds.
LOOP = LOOP.replace("STEPS, WARM_UP_STEPS = 200, 10", "STEPS, WARM_UP_STEPS = 50, 5")
_SECONDS = re.compile(r"loop seconds (\S+)")
# glibc gives large memory back and gets it anew in each step, or does not, as it happens to lie: one process of the
# same program has twice the page faults of another, and is up to 15 % slower.
KEPT_HEAP = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(1 << 30))
USED = "time.process_time() - begun"
STEP = "    optimizer.step()\n"
CALL = """
import time
def timed(count=5000):
    begun = time.perf_counter()
    for step in range(count): log_metrics(step, loss=0.5, accuracy=0.25, rate=1e-3)
    return (time.perf_counter() - begun) / count
[timed() for _ in range(5)]
"""
MANY = """
import time
until = time.monotonic() + {seconds}
step = 0
while time.monotonic() < until:
    log_metrics(step, a=1.0, b=2.0, c=3.0, d=4.0, e=5.0, f=6.0)
    step += 1
    time.sleep(0.1)
step
"""


def call_us() -> float:
    """Return microseconds for one call with three floats."""
    with Cluster(n=2, launcher="local", backend="none") as cluster:
        return 1e6 * statistics.median(cluster.run(CALL).results[0])


def loop_ratios(model: str, repeats: int) -> list[tuple[float, float]]:
    """Return what the loop takes beside the same without figures, and the same of another cluster without them.

    First in seconds, then in processor seconds of all ranks. Each is the median of the turns' ratios: three clusters
    take turns, so that what the machine does meanwhile hits them alike, and each turn another begins. Each is the first
    that was started as often as the others, which by itself makes up to 5 %. The second number of a pair, one but for
    noise, says how far the first is to be believed.
    """
    os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // 2))
    os.environ.update(KEPT_HEAP)
    plain = f'import os, time\nos.environ["BENCH_MODEL"] = "{model}"\nbegun = time.process_time()\n{LOOP}\n{USED}'
    measured = plain.replace(STEP, f"{STEP}    log_metrics(step, loss=loss)\n")
    assert measured != plain
    turns: list[list[tuple[float, float]]] = []
    for first in range(3):
        roles = _turned(("told", "untold", "again"), first)
        with ExitStack() as stack:
            there = {
                role: stack.enter_context(Cluster(n=2, sample_s=float(role == "told"), name=role)) for role in roles
            }
            for turn in range(repeats):
                costs = {
                    role: _cost(there[role], measured if role == "told" else plain) for role in _turned(roles, turn)
                }
                each = zip(costs["told"], costs["again"], costs["untold"], strict=True)
                turns.append([(on / off, control / off) for on, control, off in each])
    return [tuple(map(statistics.median, zip(*pairs, strict=True))) for pairs in zip(*turns, strict=True)]  # type: ignore[misc]


def _turned(names: tuple[str, ...], by: int) -> tuple[str, ...]:
    return names[by % len(names) :] + names[: by % len(names)]


def _cost(cluster: Cluster, code: str) -> tuple[float, float]:
    run = cluster.run(code)
    match = _SECONDS.search(run.stdout[0])
    assert match is not None
    return float(match[1]), sum(run.results.values())


def many_ranks(ranks: int, seconds: float) -> tuple[float, float, float]:
    """Return the milliseconds in which the notebook's process makes an update of the widget, the part of a core that it
    needs in all, and the bytes of a rank's figures a second.
    """
    with Cluster(n=ranks, launcher="local", backend="none", start_timeout_s=300, name="many") as cluster:
        infos = [entry.info for entry in cluster.table]
        time.sleep(3.0)  # the figures of every rank have come, and are as they will be
        run = cluster.run(MANY.format(seconds=seconds), block=False)
        here = psutil.Process()
        begun = here.cpu_times()
        mark, updates, next_state, making_s, started_s = 0, 0, 0.0, 0.0, time.monotonic()
        while not run.done:
            time.sleep(0.1)  # ten updates a second, as the widget makes them
            making_s -= time.thread_time()
            if cluster.telemetry.has_metrics:
                mark, _, _ = metrics_packet(cluster.metrics, mark)
                updates += 1
            if time.monotonic() >= next_state:
                rank_snapshots(cluster.telemetry, infos, dict.fromkeys(range(ranks), "running"))
                next_state = time.monotonic() + 0.5
            making_s += time.thread_time()
        ended, elapsed_s = here.cpu_times(), time.monotonic() - started_s
        run.wait()
        used = ended.user + ended.system - begun.user - begun.system
        pack = cluster._launch.open_link.session.pack  # noqa: SLF001
        size = len(pack(cluster.telemetry.ranks[0].vitals.to_content())) + FRAMES
        assert len(cluster.metrics) > ranks * 6 * seconds
        return 1000 * making_s / updates, used / elapsed_s, size / cluster.config.sample_s


FRAMES = 60  # bytes of a message beside its content: topic, engine, lengths


def main() -> int:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.telemetry", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--write", action="store_true", help="write the table that docs/benchmarks.md quotes")
    arguments = parser.parse_args()
    repeats, ranks, seconds = (2, 8, 3.0) if arguments.quick else (9, 64, 20.0)
    rows = [("a call of `log_metrics` with three floats", f"{call_us():.1f} us", "20 us")]
    for model in ("mlp", "cnn"):
        what = f"DDP loop, {model.upper()}, N=2, with figures and `log_metrics` in each step, against none of them"
        for unit, (on, control) in zip(("", ", processor time"), loop_ratios(model, 2 * repeats), strict=True):
            rows.append((what + unit, f"{on:.3f}x (another cluster without them: {control:.3f}x)", "1.00x"))
    update_ms, part, volume = many_ranks(ranks, seconds)
    what = f"notebook, {ranks} ranks x 6 metrics x 10 a second"
    rows.append((f"{what}: making an update of the widget", f"{update_ms:.2f} ms", "1 ms"))
    rows.append(
        (
            f"{what}: all that its process does, reading the ranks' messages most of all",
            f"{100 * part:.1f} % of a core",
            "-",
        )
    )
    for cost in measure(((64, False), (512, False), (512, True)), 3.0 if arguments.quick else 10.0):
        what = f"page, {cost.ranks} ranks x 6 metrics x 10 a second{', its table scrolled' if cost.scrolls else ''}"
        told = f"{cost.fps:.0f} frames/s (95 % within {cost.gap95_ms:.0f} ms), {100 * cost.core:.0f} % of a core"
        rows.append((what, f"{told}, {cost.rows} rows in the document", "60 frames/s, 30 %"))
    times = panel.measure(3 if arguments.quick else 9)
    rows.append(("side panel live after it was opened", f"{times.opened:.2f} s", "2 s"))
    rows.append(
        ("the same after its page was loaded anew, JupyterLab's own time in it", f"{times.reloaded:.2f} s", "2 s")
    )
    ended = f"{times.interrupted:.2f} s, seen there after {times.seen:.2f} s"
    rows.append(("Interrupt in the side panel, until the cell has ended on both ranks", ended, "0.5 s"))
    rows.append(("figures of one rank, at one a second", f"{volume / 1000:.2f} kB/s", "2 kB/s"))
    table = "\n".join(
        ["# What figures and metrics cost", "", *(f"- {fact}" for fact in environment.facts()), ""]
        + ["| measure | median | reach |", "| --- | --- | --- |"]
        + [f"| {' | '.join(row)} |" for row in rows]
    )
    print(table)
    if arguments.write:
        RESULTS.write_text(table + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
