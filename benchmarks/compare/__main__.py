"""``python -m benchmarks``: measure, and write the report."""

from __future__ import annotations

import argparse
import signal
import sys

from benchmarks.lib import environment
from benchmarks.lib.tools import Ours

from . import measures, peer_environment, report, runner
from .plan import Plan


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _measures(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in measures.ALL]
    if unknown:
        raise argparse.ArgumentTypeError(f"no measure {unknown[0]!r}; there are {', '.join(measures.ALL)}")
    return names


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one or few repetitions, without the peers")
    parser.add_argument("--only", type=_measures, default=measures.ALL, help=",".join(measures.ALL))
    parser.add_argument("--ranks", type=_numbers, default=(2, 4), help="numbers of ranks, e.g. 2,4")
    parser.add_argument("--no-peers", action="store_true", help="leave the peers out")
    parser.add_argument("--no-ours", action="store_true", help="the peers alone")
    return parser.parse_args()


def main() -> int:
    """Run the benchmarks; the exit status says only whether they ran."""
    arguments = _arguments()
    # As an exception, so that everything that was started is ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    facts = environment.facts()
    plan = Plan.quick(arguments.ranks) if arguments.quick else Plan(ranks=arguments.ranks)
    alone = arguments.no_peers or (arguments.quick and not arguments.no_ours)
    peers, missing = ([], {}) if alone else peer_environment.peers()
    arms = [*([] if arguments.no_ours else [Ours(name=report.OURS)]), *peers]
    figures = runner.run(plan, arms, arguments.only)
    everything = set(arguments.only) == set(measures.ALL) and plan == Plan()
    # Only whole runs may replace the tables that docs/benchmarks.md quotes.
    name = "partial.md" if not everything else "peers.md" if arguments.no_ours else "report.md"
    path = environment.RESULTS / name
    print("\n" + report.write(path, plan, facts, figures, missing))
    print(f"written to {path.relative_to(environment.ROOT)} and {path.with_suffix('.json').name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
