"""Measure ``%dist_stage``, alternating with scp of the same files between two hosts.

Covers: one large file, many small ones, two and three nodes.
Does not cover: object storage, a network that is slower than the processors.

scp makes one copy; staging on two nodes makes two copies and checks each by hash.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.lib import environment
from benchmarks.lib.command_line import add_write_option, make_parser, report
from benchmarks.lib.table import markdown_table, page
from jupyter_disttrain import Cluster
from jupyter_disttrain.config.hosts import HostSlots
from tests.lab import Lab

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = environment.RESULTS / "stage.md"
SMALL_FILES, SMALL_BYTES = 2000, 20_000


def seconds_of(copy: Callable[[], object], target: Path) -> float:
    """Return the seconds of a copy into ``target``, which is emptied first."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    begun = time.monotonic()
    copy()
    return time.monotonic() - begun


def measure(lab: Lab, folder: Path, source: Path, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of scp and of staging on two and on three nodes, measured alternately."""
    target = folder / "target"
    scp = f"scp -r -q -F {lab.folder}/ssh_config {source} {lab.address('node2')}:{target}/"
    names = {2: "stage on 2 nodes", 3: "stage on 3 nodes"}
    seconds: dict[str, list[float]] = {"scp": [], **{name: [] for name in names.values()}}
    clusters = {}
    try:
        for nodes in names:
            hosts = tuple(HostSlots(name=lab.address(f"node{at}"), slots=1) for at in range(1, nodes + 1))
            clusters[nodes] = Cluster(
                hosts=hosts, launcher="ssh", ssh=str(lab.ssh), backend="none", name=f"bench{nodes}", sample_s=0.0
            )
            # The hosts share one disk, so each rank gets its own target.
            clusters[nodes].run(f"import os; os.environ['BENCH'] = f'{target}/{{rank}}'")
        for _ in range(repeats):
            seconds["scp"].append(seconds_of(lambda: lab.run("node1", scp), target))
            for nodes, name in names.items():
                cluster = clusters[nodes]
                seconds[name].append(seconds_of(lambda: cluster.staging.stage(source, "$BENCH"), target))  # noqa: B023
    finally:
        for cluster in clusters.values():
            cluster.shutdown()
    return seconds


def make_data(folder: Path, megabytes: int) -> dict[str, Path]:
    """Write the data sets; returns their paths by title."""
    large = folder / "large"
    large.write_bytes(os.urandom(megabytes * 1_000_000))
    small = folder / "small"
    small.mkdir()
    for number in range(SMALL_FILES):
        (small / f"{number:05}").write_bytes(os.urandom(SMALL_BYTES))
    return {f"one file of {megabytes} MB": large, f"{SMALL_FILES} files of {SMALL_BYTES // 1000} kB": small}


def main() -> int:
    """Measure, print and write the table."""
    parser = make_parser("benchmarks.hosts.staging", __doc__)
    parser.add_argument("--repeats", type=int, default=7, help="of each copy (default: %(default)s)")
    parser.add_argument("--megabytes", type=int, default=500, help="of the large file (default: %(default)s)")
    add_write_option(parser, RESULTS)
    arguments = parser.parse_args()
    facts, rows = environment.facts(), []
    with tempfile.TemporaryDirectory(prefix="disttrain-bench-") as name, Lab(3) as lab:
        for data_set, source in make_data(Path(name), arguments.megabytes).items():
            seconds = measure(lab, Path(name), source, arguments.repeats)
            baseline = median(seconds["scp"])
            for copy, times in seconds.items():
                spread = f"{min(times):.2f} to {max(times):.2f} s"
                ratio = f"{median(times) / baseline:.2f}x"
                rows.append((data_set, copy, f"{median(times):.2f} s", spread, ratio))
    method = f"{arguments.repeats} repetitions, alternating; hosts are namespaces of this machine and share its disk"
    table = markdown_table(("data set", "copy", "median", "range", "ratio to scp"), rows)
    text = page("Copying a data set to the nodes", [*facts, method], table)
    report(text, RESULTS if arguments.write else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
