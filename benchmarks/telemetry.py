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
from pathlib import Path

import psutil

from jupyter_disttrain import Cluster
from jupyter_disttrain.cluster.snapshot import metrics_packet, rank_snapshots

from . import environment
from .page import measure, panel

RESULTS = Path(__file__).parent / "results" / "telemetry.md"
LOOP = (Path(__file__).parent / "workloads" / "ddp_loop.py").read_text()
_SECONDS = re.compile(r"loop seconds (\S+)")
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


def loop_ratio(model: str, repeats: int) -> tuple[float, float, float]:
    """Return the medians in seconds with and without figures, in turns, and the median of the pairs' ratios."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    os.environ["OMP_NUM_THREADS"] = threads
    code = f'import os\nos.environ["BENCH_MODEL"] = "{model}"\n{LOOP}'
    seconds: dict[float, list[float]] = {1.0: [], 0.0: []}
    with Cluster(n=2, sample_s=1.0, name="told") as told, Cluster(n=2, sample_s=0.0, name="untold") as untold:
        for _ in range(repeats):
            for cluster in (told, untold):
                match = _SECONDS.search(cluster.run(code).stdout[0])
                assert match is not None
                seconds[cluster.config.sample_s].append(float(match[1]))
    ratios = [on / off for on, off in zip(seconds[1.0], seconds[0.0], strict=True)]
    return statistics.median(seconds[1.0]), statistics.median(seconds[0.0]), statistics.median(ratios)


def many_ranks(ranks: int, seconds: float) -> tuple[float, float]:
    """Return the notebook's processor milliseconds per update, and the bytes of a rank's figures a second."""
    with Cluster(n=ranks, launcher="local", backend="none", start_timeout_s=300, name="many") as cluster:
        infos = [entry.info for entry in cluster.table]
        time.sleep(3.0)  # the figures of every rank have come, and are as they will be
        run = cluster.run(MANY.format(seconds=seconds), block=False)
        here = psutil.Process()
        begun = here.cpu_times()
        mark, updates, next_state = 0, 0, 0.0
        while not run.done:
            time.sleep(0.1)  # ten updates a second, as the widget makes them
            if cluster.telemetry.has_metrics:
                mark, _, _ = metrics_packet(cluster.metrics, mark)
                updates += 1
            if time.monotonic() >= next_state:
                rank_snapshots(cluster.telemetry, infos, dict.fromkeys(range(ranks), "running"))
                next_state = time.monotonic() + 0.5
        ended = here.cpu_times()
        run.wait()
        used = ended.user + ended.system - begun.user - begun.system
        pack = cluster._launch.open_link.session.pack  # noqa: SLF001
        size = len(pack(cluster.telemetry.ranks[0].vitals.to_content())) + FRAMES
        assert len(cluster.metrics) > ranks * 6 * seconds
        return 1000 * used / updates, size / cluster.config.sample_s


FRAMES = 60  # bytes of a message beside its content: topic, engine, lengths


def main() -> int:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.telemetry", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--write", action="store_true", help="write the table that the README quotes")
    arguments = parser.parse_args()
    repeats, ranks, seconds = (2, 8, 3.0) if arguments.quick else (9, 64, 20.0)
    rows = [("a call of `log_metrics` with three floats", f"{call_us():.1f} us", "20 us")]
    for model in ("mlp", "cnn"):
        on, off, ratio = loop_ratio(model, repeats)
        rows.append(
            (
                f"DDP loop, {model.upper()}, N=2, figures on against off",
                f"{ratio:.3f}x ({on:.3g} s, {off:.3g} s)",
                "1.00x",
            )
        )
    update_ms, volume = many_ranks(ranks, seconds)
    rows.append((f"notebook, {ranks} ranks x 6 metrics x 10 a second, per update", f"{update_ms:.2f} ms", "1 ms"))
    for cost in measure((64, 512), 3.0 if arguments.quick else 10.0):
        what = f"page, {cost.ranks} ranks x 6 metrics x 10 a second, its table scrolled"
        told = f"{cost.fps:.0f} frames/s (95 % within {cost.gap95_ms:.0f} ms), {100 * cost.core:.0f} % of a core"
        rows.append((what, f"{told}, {cost.rows} rows in the document", "60 frames/s, 30 %"))
    times = panel.measure(3 if arguments.quick else 9)
    rows.append(("side panel live after it was opened", f"{times.opened:.2f} s", "2 s"))
    rows.append(("the same after the page was loaded anew", f"{times.reloaded:.2f} s", "2 s"))
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
