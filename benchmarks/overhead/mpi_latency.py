"""Measure MPI's latency in a cell and by ``%dist_run --mpi``, compared with mpirun.

Covers: ping-pong and Allreduce of small and large messages on one machine; which of the session's options cost what.
Does not cover: hosts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.lib import environment
from benchmarks.lib.command_line import add_write_option, exit_on_sigterm, make_parser, report
from benchmarks.lib.table import markdown_table, page
from jupyter_disttrain import Cluster
from jupyter_disttrain.launchers.mpi import find_mpiexec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

RESULTS = environment.RESULTS / "mpi_latency.md"
MEASURES = ("ping-pong, 8 bytes", "ping-pong, 1 MB", "Allreduce, 64 bytes", "Allreduce, 1 MB")
# Defines measure(comm), whose result on rank 0 has the microseconds of each measure.
CODE = """
import time
import numpy as np
from mpi4py import MPI

def microseconds(repetitions, call):
    for _ in range(repetitions // 10): call()
    began = time.perf_counter()
    for _ in range(repetitions): call()
    return (time.perf_counter() - began) / repetitions * 1e6

def measure(comm):
    rank, found = comm.Get_rank(), []
    for size, repetitions in ((8, 20000), (1 << 20, 1000)):
        buffer = np.zeros(size, dtype="b")
        def ping_pong():
            if rank == 0: comm.Send(buffer, 1); comm.Recv(buffer, 1)
            elif rank == 1: comm.Recv(buffer, 0); comm.Send(buffer, 0)
        comm.Barrier()
        found.append(microseconds(repetitions, ping_pong) / 2)
        comm.Barrier()
    for size, repetitions in ((64, 20000), (1 << 20, 300)):
        buffer, result = np.zeros(size // 8), np.zeros(size // 8)
        comm.Barrier()
        found.append(microseconds(repetitions, lambda: comm.Allreduce(buffer, result)))
    return found
"""
# Rank 0 of a script writes them into a file beside it.
SCRIPT = f"""{CODE}
from pathlib import Path
found = measure(MPI.COMM_WORLD)
if MPI.COMM_WORLD.Get_rank() == 0: Path(__file__).with_suffix(".txt").write_text(" ".join(map(str, found)))
"""
NO_FT = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"}
FT = ("--with-ft", "ulfm")


@dataclass(frozen=True)
class Way:
    """One way to run the measurements."""

    name: str
    run: Callable[[int], list[float]]


def _mpirun(options: Sequence[str], variables: Mapping[str, str], script: Path) -> Callable[[int], list[float]]:
    def run(ranks: int) -> list[float]:
        placement = ("--map-by", f"ppr:{ranks}:node:oversubscribe")
        command = [find_mpiexec(), "-n", str(ranks), *placement, *options, sys.executable, str(script)]
        around = os.environ | environment.OPENMPI_AS_ROOT | variables
        subprocess.run(command, env=around, check=True)
        return _take(script)

    return run


def _take(script: Path) -> list[float]:
    """Return and remove what a script has written."""
    path = script.with_suffix(".txt")
    found = [float(each) for each in path.read_text().split()]
    path.unlink()
    return found


def ways(cluster: Cluster, script: Path) -> list[Way]:
    """Return the ways to compare; the first is the yardstick."""

    def in_cell(_ranks: int) -> list[float]:
        return [float(each) for each in cluster.run(f"{CODE}\nmeasure(comm)").results[0]]

    def by_dist_run(_ranks: int) -> list[float]:
        cluster.scripts.run(script, how="mpi")
        return _take(script)

    unbound = ("--bind-to", "none")
    return [
        Way("mpirun", _mpirun((), {}, script)),
        Way("mpirun --bind-to none", _mpirun(unbound, {}, script)),
        Way("mpirun, pml ob1, btl self,sm", _mpirun(unbound, NO_FT, script)),
        Way(
            "mpirun --with-ft ulfm, btl self,sm,tcp",
            _mpirun((*unbound, *FT), NO_FT | {"OMPI_MCA_btl": "self,sm,tcp"}, script),
        ),
        Way("%dist_run --mpi", by_dist_run),
        Way("a cell", in_cell),
    ]


def main() -> int:
    """Measure each way several times, in turns."""
    parser = make_parser("benchmarks.overhead.mpi_latency", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="(default: 2 4)")
    parser.add_argument("--rounds", type=int, default=5, help="of all ways in turn (default: %(default)s)")
    add_write_option(parser, RESULTS)
    arguments = parser.parse_args()
    exit_on_sigterm()
    facts, lines = environment.facts(), []
    for ranks in arguments.ranks:
        lines += [f"## {ranks} ranks", "", *_table(ranks, arguments.rounds), ""]
    about = "Microseconds, medians; in parentheses the ratio to mpirun."
    report(
        page("MPI in a session, compared with mpirun", facts, [about, "", *lines]), RESULTS if arguments.write else None
    )
    return 0


def _table(ranks: int, rounds: int) -> list[str]:
    found: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder, Cluster(n=ranks) as cluster:
        script = Path(folder, "latency.py")
        script.write_text(SCRIPT)
        for _ in range(rounds):
            for way in ways(cluster, script):
                found.setdefault(way.name, []).append(way.run(ranks))
    medians = {name: [median(values) for values in zip(*each, strict=True)] for name, each in found.items()}
    base = medians["mpirun"]
    rows = [
        [name, *(f"{value:.3g} ({value / of:.2f})" for value, of in zip(values, base, strict=True))]
        for name, values in medians.items()
    ]
    return markdown_table(["", *MEASURES], rows)


if __name__ == "__main__":
    sys.exit(main())
