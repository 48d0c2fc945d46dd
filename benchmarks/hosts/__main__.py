"""Measure clusters over two hosts: their start, lost hosts, listening sockets."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.lib import environment
from benchmarks.lib.command_line import add_write_option, make_parser, report
from benchmarks.lib.table import markdown_table, page
from tests.lab import Lab

from .clusters import CUT_S, loss_seconds, mpirun_seconds, start_seconds, survives_cut
from .sockets import listening_sockets, socket_table

RESULTS = environment.RESULTS / "hosts.md"
START_TARGET_RATIO, LOSS_TARGET_S = 1.5, 6.0


def start_table(lab: Lab, folder: Path, repeats: int) -> list[str]:
    """Measure starts, alternating between mpirun and the launchers."""
    baseline_s: list[float] = []
    seconds: dict[str, list[float]] = {"mpi": [], "ssh": []}
    for _ in range(repeats):
        baseline_s.append(mpirun_seconds(lab, folder))
        for launcher, times in seconds.items():
            times.append(start_seconds(lab, launcher))
    baseline = median(baseline_s)
    rows = [("mpirun of a plain script", f"{baseline:.2f}", "1.00", "")]
    for launcher, times in seconds.items():
        ratio = median(times) / baseline
        rows.append((f"`--launcher {launcher}`", f"{median(times):.2f}", f"{ratio:.2f}", f"{START_TARGET_RATIO}"))
    return markdown_table(("two hosts x two ranks, first all_reduce", "median (s)", "ratio", "target"), rows)


def loss_table(lab: Lab, repeats: int) -> list[str]:
    """Measure how soon a lost host is reported, and count the cells that survive a short cut."""
    rows = []
    for how, event in (("cut", "network cut"), ("kill", "powered off")):
        times = [loss_seconds(lab, how) for _ in range(repeats)]
        rows.append((event, f"{median(times):.2f}", f"{max(times):.2f}", f"{LOSS_TARGET_S:g}"))
    survived = sum(survives_cut(lab) for _ in range(repeats))
    head = ("lost host", "reported after, median (s)", "longest (s)", "target (s)")
    cuts = f"Network cuts of {CUT_S} s that a running cell survived: {survived} of {repeats}."
    return [*markdown_table(head, rows), "", cuts]


def main() -> int:
    """Measure, print and write the report."""
    parser = make_parser("benchmarks.hosts", __doc__)
    parser.add_argument("--repeats", type=int, default=5, help="of each measure (default: %(default)s)")
    add_write_option(parser, RESULTS)
    arguments = parser.parse_args()
    facts = environment.facts()
    with tempfile.TemporaryDirectory(prefix="disttrain-bench-") as name, Lab(3) as lab:
        lines = [*start_table(lab, Path(name), arguments.repeats), "", *loss_table(lab, arguments.repeats)]
        for hosts, hosts_lab, launcher in (
            ("one machine", None, "mpi"),
            ("two hosts", lab, "mpi"),
            ("two hosts", lab, "ssh"),
        ):
            title = f"Listening sockets, {hosts}, `--launcher {launcher}`"
            lines += socket_table(title, listening_sockets(hosts_lab, launcher))
    report(page("Clusters over several hosts", facts, lines), RESULTS if arguments.write else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
