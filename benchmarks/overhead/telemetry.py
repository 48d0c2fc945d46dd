"""Measure the cost of telemetry and metrics for the ranks, the notebook, the network and the browser.

Covers: a call of ``log_metrics``, a DDP loop with and without telemetry, the notebook's process with 64 ranks, the size
of messages, the widget with 64 and 512 ranks (page.widget), the side panel (page.side_panel).
Does not cover: ranks without telemetry (control_plane).
"""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

import psutil

from benchmarks.lib import environment
from benchmarks.lib.command_line import add_write_option, make_parser, report
from benchmarks.lib.table import markdown_table, page
from jupyter_disttrain import Cluster
from jupyter_disttrain.features.telemetry.snapshot import Feed, snapshot

from .page import side_panel, widget

RESULTS = environment.RESULTS / "telemetry.md"
LOOP = (environment.WORKLOADS / "ddp_loop.py").read_text()
# Short loops, many times, since the speed of a machine changes within seconds.
LOOP = LOOP.replace("STEPS, WARM_UP_STEPS = 200, 10", "STEPS, WARM_UP_STEPS = 50, 5")
_SECONDS = re.compile(r"loop seconds (\S+)")
# Depending on the address layout, glibc returns large blocks to the system and allocates them again in each step: one
# process then has twice the page faults of another that runs the same program, and is up to 15 % slower.
KEEP_HEAP = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(1 << 30))
PROCESSOR_TIME = "time.process_time() - begun"
STEP = "    optimizer.step()\n"
CALLS = """
import time
def timed(count=5000):
    begun = time.perf_counter()
    for step in range(count): log_metrics(step, loss=0.5, accuracy=0.25, rate=1e-3)
    return (time.perf_counter() - begun) / count
[timed() for _ in range(5)]
"""
SIX_METRICS = """
import time
until = time.monotonic() + {seconds}
step = 0
while time.monotonic() < until:
    log_metrics(step, a=1.0, b=2.0, c=3.0, d=4.0, e=5.0, f=6.0)
    step += 1
    time.sleep(0.1)
step
"""
MESSAGE_OVERHEAD_BYTES = 60  # of a message besides its content: topic, engine, lengths
WIDGET_KINDS = ((64, False), (512, False), (512, True))  # number of ranks, whether the table is scrolled
Rows = list[tuple[str, str, str]]  # measure, result, target


def call_us() -> float:
    """Return the microseconds of one call of ``log_metrics`` with three floats."""
    with Cluster(n=2, launcher="local", backend="none") as cluster:
        return float(1e6 * median(cluster.run(CALLS).results[0]))


@dataclass(frozen=True, slots=True)
class Ratio:
    """Time with telemetry over time without it, and the same for two clusters without it."""

    telemetry: float
    control: float  # differs from 1 by noise only


def loop_ratios(model: str, repeats: int) -> tuple[Ratio, Ratio]:
    """Return the cost of telemetry in a DDP loop, in seconds and in processor seconds of all ranks.

    Each ratio is the median over all turns. Three clusters alternate, so other load on the machine affects all of them,
    and each turn begins with another one. Each role is started first as often as the others, because the order of the
    starts alone makes a difference of up to 5 %.
    """
    os.environ["OMP_NUM_THREADS"] = str(max(1, environment.core_count() // 2))
    os.environ.update(KEEP_HEAP)
    plain = f'import os, time\nos.environ["BENCH_MODEL"] = "{model}"\nbegun = time.process_time()\n{LOOP}\n'
    plain += PROCESSOR_TIME
    with_metrics = plain.replace(STEP, f"{STEP}    log_metrics(step, loss=loss)\n")
    assert with_metrics != plain
    seconds: list[Ratio] = []
    processor_seconds: list[Ratio] = []
    for first in range(3):
        roles = _rotated(("telemetry", "plain", "control"), first)
        with ExitStack() as stack:
            clusters = {
                role: stack.enter_context(Cluster(n=2, sample_s=float(role == "telemetry"), name=role))
                for role in roles
            }
            for turn in range(repeats):
                costs = {
                    role: _cost(clusters[role], with_metrics if role == "telemetry" else plain)
                    for role in _rotated(roles, turn)
                }
                for ratios, with_telemetry, without, control in zip(
                    (seconds, processor_seconds), costs["telemetry"], costs["plain"], costs["control"], strict=True
                ):
                    ratios.append(Ratio(with_telemetry / without, control / without))
    return _median(seconds), _median(processor_seconds)


def _median(ratios: list[Ratio]) -> Ratio:
    return Ratio(median(ratio.telemetry for ratio in ratios), median(ratio.control for ratio in ratios))


def _rotated(names: tuple[str, ...], by: int) -> tuple[str, ...]:
    return names[by % len(names) :] + names[: by % len(names)]


def _cost(cluster: Cluster, code: str) -> tuple[float, float]:
    """Return the seconds of the loop on rank 0 and the processor seconds of all ranks."""
    run = cluster.run(code)
    match = _SECONDS.search(run.stdout[0])
    assert match is not None
    return float(match[1]), sum(run.results.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class NotebookCost:
    """The cost of the telemetry of many ranks for the notebook's process."""

    update_ms: float  # to prepare one update of the widget
    cores: float  # processor time of the whole process, as a fraction of one core
    bytes_per_s: float  # of the telemetry of one rank


def notebook_cost(ranks: int, seconds: float) -> NotebookCost:
    """Measure the notebook's process while each rank logs six metrics ten times a second."""
    with Cluster(n=ranks, launcher="local", backend="none", start_timeout_s=300, name="many") as cluster:
        time.sleep(3.0)  # until the telemetry of every rank has arrived
        run = cluster.run(SIX_METRICS.format(seconds=seconds), block=False)
        this_process = psutil.Process()
        begun = this_process.cpu_times()
        feed = Feed(cluster.telemetry)
        updates, next_state, preparing_s, started_s = 0, 0.0, 0.0, time.monotonic()
        while not run.done:
            time.sleep(0.1)  # ten updates a second, as the widget does
            preparing_s -= time.thread_time()
            updates += feed.metrics() is not None
            if time.monotonic() >= next_state:
                snapshot(cluster.telemetry, [(entry.info, entry.state) for entry in cluster.table])
                next_state = time.monotonic() + 0.5
            preparing_s += time.thread_time()
        ended, elapsed_s = this_process.cpu_times(), time.monotonic() - started_s
        run.wait()
        used_s = ended.user + ended.system - begun.user - begun.system
        pack = cluster._session.launch.open_link.session.pack  # noqa: SLF001
        size = len(pack(cluster.telemetry.ranks[0].vitals.to_content())) + MESSAGE_OVERHEAD_BYTES
        assert len(cluster.metrics) > ranks * 6 * seconds
        return NotebookCost(
            update_ms=1000 * preparing_s / updates,
            cores=used_s / elapsed_s,
            bytes_per_s=size / cluster.config.sample_s,
        )


def rank_rows(repeats: int) -> Rows:
    """Measure the cost for the ranks."""
    rows = [("a call of `log_metrics` with three floats", f"{call_us():.1f} us", "20 us")]
    for model in ("mlp", "cnn"):
        loop = f"DDP loop, {model.upper()}, N=2, telemetry and `log_metrics` in each step, relative to none"
        for unit, ratio in zip(("", ", processor time"), loop_ratios(model, repeats), strict=True):
            result = f"{ratio.telemetry:.3f}x (two clusters without telemetry: {ratio.control:.3f}x)"
            rows.append((loop + unit, result, "1.00x"))
    return rows


def notebook_rows(ranks: int, seconds: float) -> Rows:
    """Measure the cost for the notebook's process and the network."""
    cost = notebook_cost(ranks, seconds)
    load = f"{ranks} ranks x 6 metrics x 10 per second"
    return [
        (f"notebook, {load}: preparing an update of the widget", f"{cost.update_ms:.2f} ms", "1 ms"),
        (
            f"notebook, {load}: whole process, most of it reading messages of the ranks",
            f"{100 * cost.cores:.1f} % of a core",
            "-",
        ),
        ("telemetry of one rank, once per second", f"{cost.bytes_per_s / 1000:.2f} kB/s", "2 kB/s"),
    ]


def browser_rows(seconds: float, repeats: int) -> Rows:
    """Measure the widget and the side panel."""
    rows = []
    for cost in widget.measure(WIDGET_KINDS, seconds):
        load = f"page, {cost.ranks} ranks x 6 metrics x 10 per second{', scrolling the table' if cost.scrolls else ''}"
        result = f"{cost.fps:.0f} frames/s (95 % within {cost.gap95_ms:.0f} ms), {100 * cost.core:.0f} % of a core, "
        rows.append((load, f"{result}{cost.rows} rows in the document", "60 frames/s, 30 %"))
    times = side_panel.measure(repeats)
    interrupted = f"{times.interrupted_s:.2f} s, shown after {times.shown_s:.2f} s"
    return [
        *rows,
        ("side panel: live after it is opened", f"{times.opened_s:.2f} s", "2 s"),
        ("side panel: live after a page reload, including JupyterLab's", f"{times.reloaded_s:.2f} s", "2 s"),
        ("side panel: Interrupt, until the cell has ended on both ranks", interrupted, "0.5 s"),
    ]


def main() -> int:
    """Measure, print and write the table."""
    parser = make_parser("benchmarks.overhead.telemetry", __doc__)
    parser.add_argument("--quick", action="store_true", help="few repetitions, 8 ranks")
    add_write_option(parser, RESULTS)
    arguments = parser.parse_args()
    repeats, ranks, seconds, page_seconds = (2, 8, 3.0, 3.0) if arguments.quick else (9, 64, 20.0, 10.0)
    facts = environment.facts()
    rows = [
        *rank_rows(2 * repeats),
        *notebook_rows(ranks, seconds),
        *browser_rows(page_seconds, max(3, repeats)),
    ]
    text = page("Cost of telemetry and metrics", facts, markdown_table(("measure", "median", "target"), rows))
    report(text, RESULTS if arguments.write else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
