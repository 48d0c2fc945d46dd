"""Inject faults into sessions at random and check that they recover."""

from __future__ import annotations

import random
import signal
import sys

from benchmarks.lib.command_line import add_write_option, exit_on_sigterm, make_parser
from benchmarks.lib.environment import RESULTS as FOLDER
from benchmarks.lib.table import page

from .campaign import FAULTS, REQUIREMENTS, Campaign
from .report import GRACE_FACT, TITLE, summary

RESULTS = FOLDER / "faults.md"


def main() -> int:
    """Run the campaign; the exit status is 1 if a round failed or something leaked."""
    parser = make_parser("benchmarks.faults", __doc__)
    parser.add_argument("--rounds", type=int, default=200, help="for each seed (default: %(default)s)")
    parser.add_argument("--seed", type=int, nargs="+", default=[1], help="one campaign each (default: 1)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4], help="sizes of sessions (default: 2 3 4)")
    parser.add_argument("--launcher", nargs="+", default=["mpi", "local"], help="of sessions (default: mpi local)")
    parser.add_argument("--fault", nargs="+", default=list(FAULTS), choices=list(FAULTS), help="only these faults")
    add_write_option(parser, RESULTS)
    arguments = parser.parse_args()
    exit_on_sigterm()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
    problems = {
        name: problem for name, check in REQUIREMENTS.items() if name in arguments.fault and (problem := check())
    }
    notes = [f"without {name}: {problem}" for name, problem in problems.items()]
    print("\n".join(notes), flush=True)
    texts, failed = [], False
    for seed in arguments.seed:
        faults = [fault for fault in arguments.fault if fault not in problems]
        campaign = Campaign(random=random.Random(seed), faults=faults)
        kinds = [(n, launcher) for n in arguments.ranks for launcher in arguments.launcher]
        for at, (n, launcher) in enumerate(kinds):
            campaign.run_session(n, launcher, len(range(at, arguments.rounds, len(kinds))))
        text = "\n".join(summary(campaign, seed))
        print(f"\n{text}\n", flush=True)
        texts += [text, ""]
        failed |= bool(campaign.leaks) or any(each.failed for each in campaign.rounds)
    if arguments.write:
        RESULTS.write_text(page(TITLE, [GRACE_FACT, *notes], texts))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
