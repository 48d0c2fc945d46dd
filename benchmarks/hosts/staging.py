"""``python -m benchmarks.stage``: ``%dist_stage`` against scp of the same file between two hosts, in turns.

Covers: one large file, many small ones, on two nodes and on three.
Does not cover: blob storage, which has a speed of its own; a network that is slower than the processors.

The hosts are those of the tests' lab: namespaces of this machine, so that all of them share its cores and its disk.
scp makes one copy; staging on two nodes makes two, each checked by hash.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.lib import environment
from jupyter_disttrain import Cluster
from jupyter_disttrain.hosts import HostSlots
from tests.lab import Lab

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = Path(__file__).parents[1] / "results" / "stage.md"
SMALL_FILES, SMALL_BYTES = 2000, 20_000


def seconds_of(what: Callable[[], object], folder: Path) -> float:
    """Return how long it takes, from an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    begun = time.monotonic()
    what()
    return time.monotonic() - begun


def measure(lab: Lab, folder: Path, source: Path, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of scp and of staging on two and on three nodes, taken in turns."""
    target = folder / "target"
    scp = f"scp -r -q -F {lab.folder}/ssh_config {source} {lab.address('node2')}:{target}/"
    names = {2: "stage on 2 nodes", 3: "stage on 3 nodes"}
    taken: dict[str, list[float]] = {"scp": [], **{name: [] for name in names.values()}}
    clusters = {}
    try:
        for nodes in names:
            there = tuple(HostSlots(name=lab.address(f"node{at}"), slots=1) for at in range(1, nodes + 1))
            clusters[nodes] = Cluster(
                hosts=there, launcher="ssh", ssh=str(lab.ssh), backend="none", name=f"bench{nodes}", sample_s=0.0
            )
            clusters[nodes].run(f"import os; os.environ['BENCH'] = f'{target}/{{rank}}'")  # the disk is one
        for _ in range(repeats):
            taken["scp"].append(seconds_of(lambda: lab.run("node1", scp), target))
            for nodes, name in names.items():
                cluster = clusters[nodes]
                taken[name].append(seconds_of(lambda: cluster.stage(source, "$BENCH"), target))  # noqa: B023
    finally:
        for cluster in clusters.values():
            cluster.shutdown()
    return taken


def main() -> int:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stage", description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=500, help="of the large file")
    parser.add_argument("--write", action="store_true", help="write the table that docs/benchmarks.md quotes")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="disttrain-bench-") as name, Lab(3) as lab:
        folder = Path(name)
        large = folder / "large"
        large.write_bytes(os.urandom(arguments.megabytes * 1_000_000))
        small = folder / "small"
        small.mkdir()
        for number in range(SMALL_FILES):
            (small / f"{number:05}").write_bytes(os.urandom(SMALL_BYTES))
        for source, what in (
            (large, f"one file of {arguments.megabytes} MB"),
            (small, f"{SMALL_FILES} files of {SMALL_BYTES // 1000} kB"),
        ):
            taken = measure(lab, folder, source, arguments.repeats)
            yardstick = statistics.median(taken["scp"])
            for how, seconds in taken.items():
                middle = statistics.median(seconds)
                spread = f"{min(seconds):.2f} to {max(seconds):.2f} s"
                rows.append((what, how, f"{middle:.2f} s", spread, f"{middle / yardstick:.2f}x"))
    head = ("data set", "how", "median", "all", "to scp")
    table = "\n".join(
        ["# Copying a data set to the nodes", "", *(f"- {fact}" for fact in environment.facts())]
        + [f"- {arguments.repeats} times in turns; hosts are namespaces of this machine; all copies on one disk", ""]
        + [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]
    )
    print(table)
    if arguments.write:
        RESULTS.write_text(table + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
