"""Start a lab for manual use: ``python -m tests.lab [--hosts N] [--slurm] [COMMAND ...]``.

Without a command it runs until Ctrl-C or SIGTERM; with one until that has ended. The command finds
the lab in ``LAB`` (its folder), ``LAB_SSH``, ``LAB_HOSTS`` and, with Slurm, ``SLURM_CONF``.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys

from .lab import Lab

ENDINGS = {signal.SIGINT, signal.SIGTERM}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=3, metavar="N", help="how many (default: 3)")
    parser.add_argument("--slurm", action="store_true", help="with Slurm over them")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="run this, then remove the lab")
    arguments = parser.parse_args()
    with Lab(arguments.hosts) as lab:
        shown = {"LAB": str(lab.folder), "LAB_SSH": str(lab.ssh), "LAB_HOSTS": ",".join(lab.hosts)}
        if arguments.slurm:
            shown |= lab.start_slurm().environment
        if arguments.command:
            return subprocess.run(arguments.command, env=os.environ | shown, check=False).returncode
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
        print("".join(f"export {name}={value}\n" for name, value in shown.items()), end="", flush=True)  # noqa: T201 - the answer
        signal.sigwait(ENDINGS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
