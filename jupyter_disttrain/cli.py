"""The command ``jupyter disttrain``.

Covers: its subcommands and their options.
Does not cover: what they do (``doctor``).
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from typing import TYPE_CHECKING

from . import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

UNREAD = 141  # what a shell reports for a command that nobody read to its end
INTERRUPTED = 130  # what a shell reports for a command that Ctrl-C ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status of the process."""
    args = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Paths and host names may hold what the locale's encoding can't write.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Who read it has seen enough, say `head`; what is still buffered must not fail again at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jupyter disttrain", description="Distributed training from one notebook.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="look at this machine and say whether ranks can train on it",
        description="Look at this machine and say whether ranks can train on it. It starts two ranks and lets them do "
        "an all_reduce. The exit status is 1 if something is wrong, else 0.",
    )
    doctor.add_argument("--json", action="store_true", help="write JSON, for machines")
    doctor.set_defaults(run=_doctor)
    return parser


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import report  # noqa: PLC0415  (--help needs none of it)

    return report.write_json(sys.stdout) if args.json else report.write_text(sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
