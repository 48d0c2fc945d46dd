"""Compare jupyter_disttrain with torchrun and other notebook tools.

Covers: start, cells, output, transfer of variables, training, memory; each through a real kernel, in one run with its
baseline.
Does not cover: recovery (benchmarks.faults), scaling (benchmarks.scaling), several hosts (benchmarks.hosts).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from benchmarks.lib import environment
from benchmarks.lib.command_line import exit_on_sigterm, make_parser, name_list
from benchmarks.lib.tools import DISTTRAIN, Disttrain

from . import measures, peer_environment, report, runner
from .plan import Plan

if TYPE_CHECKING:
    import argparse


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _arguments() -> argparse.Namespace:
    parser = make_parser("benchmarks", __doc__)
    parser.add_argument("--quick", action="store_true", help="few repetitions, without the peers")
    measure_names = name_list("measure", measures.ALL)
    parser.add_argument("--only", type=measure_names, default=measures.ALL, help=",".join(measures.ALL))
    parser.add_argument("--ranks", type=_integers, default=(2, 4), help="numbers of ranks, e.g. 2,4")
    parser.add_argument("--no-peers", action="store_true", help="measure jupyter_disttrain only")
    parser.add_argument("--no-ours", action="store_true", help="measure the peers only")
    return parser.parse_args()


def main() -> int:
    """Run the comparison; the exit status is 0 unless the run itself failed."""
    arguments = _arguments()
    exit_on_sigterm()
    facts = environment.facts()
    plan = Plan.quick(arguments.ranks) if arguments.quick else Plan(ranks=arguments.ranks)
    without_peers = arguments.no_peers or (arguments.quick and not arguments.no_ours)
    peers, missing = ([], {}) if without_peers else peer_environment.peers()
    tools = [*([] if arguments.no_ours else [Disttrain(name=DISTTRAIN)]), *peers]
    measurements = runner.run(plan, tools, arguments.only)
    is_complete = set(arguments.only) == set(measures.ALL) and plan == Plan()
    # Only a complete run replaces the tables that docs/benchmarks.md quotes.
    name = "partial.md" if not is_complete else "peers.md" if arguments.no_ours else "table.md"
    path = environment.RESULTS / name
    print("\n" + report.write(path, plan, facts, measurements, missing))
    print(f"written to {path.relative_to(environment.ROOT)} and {path.with_suffix('.json').name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
