"""Run the command ``jupyter disttrain``.

Covers: its subcommands and their options.
Does not cover: what they do (``doctor``, ``doctor.gpu_check``, ``client.registry.listing``,
``client.registry.observer``, ``features.horovod.build``).
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from typing import TYPE_CHECKING

from . import __version__
from .errors import DisttrainError

if TYPE_CHECKING:
    from collections.abc import Sequence


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
        return 130  # a shell's exit status for a command that Ctrl-C ended
    except DisttrainError as error:
        print(error, file=sys.stderr)  # noqa: T201  (a command's output)
        return 1
    except BrokenPipeError:
        # The reader, e.g. `head`, has closed the pipe; what is still buffered must not fail again at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # a shell's exit status for a command whose output was not read to its end
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jupyter disttrain", description="Distributed training from one notebook.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="check whether ranks can train on this machine",
        description="Check whether ranks can train on this machine. It starts two ranks and runs "
        "an all_reduce on them. The exit status is 1 if a check found an error, else 0.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=_doctor)
    gpu_check = commands.add_parser(
        "gpu-check",
        help="test interrupts, failures, deaths and training on this machine's GPUs",
        description="Test a session on this machine's GPUs: training, interrupts, failures, deaths, subgroups, errors "
        "of CUDA, scripts. With one GPU several ranks share it over NCCL. It takes about ten minutes. The exit status "
        "is 1 if a check failed, 2 without a GPU, else 0.",
    )
    gpu_check.add_argument(
        "--ranks", type=int, metavar="N", help="ranks (default: one per GPU, at most 8; 4 on one GPU)"
    )
    gpu_check.add_argument(
        "--only", default="", metavar="CHECK,...", help="run only these checks, named as in the table"
    )
    gpu_check.add_argument("--long", action="store_true", help="watch released ranks for ten minutes each")
    gpu_check.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: run with Gloo on the CPU, to test the checks"
    )
    gpu_check.set_defaults(run=_gpu_check)
    listing = commands.add_parser(
        "list",
        help="list your clusters on this machine",
        description="List your running clusters on this machine, the state of their ranks and their holders.",
    )
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=_list)
    stop = commands.add_parser(
        "stop",
        help="end a cluster and everything it started",
        description="End a cluster and everything it started, no matter which process holds it.",
    )
    which = stop.add_mutually_exclusive_group(required=True)
    which.add_argument("cluster", nargs="?", help="its name or id, as `jupyter disttrain list` shows them")
    which.add_argument("--all", action="store_true", help="all your clusters on this machine")
    stop.set_defaults(run=_stop)
    horovod = commands.add_parser(
        "horovod",
        help="build Horovod for this environment's torch and MPI, and install it",
        description="Build Horovod for this environment's torch and MPI, and install it. The wheel is kept, so a "
        "later installation takes seconds.",
    )
    horovod.set_defaults(run=_horovod)
    return parser


def _list(args: argparse.Namespace) -> int:
    from .client.registry import listing  # noqa: PLC0415  (--help needs none of it)

    listing.write(sys.stdout, as_json=args.json)
    return 0


def _stop(args: argparse.Namespace) -> int:
    from .client.registry import cluster_file, observer  # noqa: PLC0415

    for cluster in cluster_file.running() if args.all else [cluster_file.find(args.cluster)]:
        observer.stop(cluster)
        print(f"{cluster.cluster_id} ended")  # noqa: T201
    return 0


def _horovod(_args: argparse.Namespace) -> int:
    from .features.horovod import build  # noqa: PLC0415

    build.install()
    return 0


def _gpu_check(args: argparse.Namespace) -> int:
    from .doctor import gpu_check  # noqa: PLC0415

    only = [name.strip() for name in args.only.split(",") if name.strip()]
    return gpu_check.run(sys.stdout, args.device, args.ranks, only, long=args.long)


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import CHECKS, report  # noqa: PLC0415

    return (report.write_json if args.json else report.write_text)(sys.stdout, CHECKS)


if __name__ == "__main__":
    sys.exit(main())
