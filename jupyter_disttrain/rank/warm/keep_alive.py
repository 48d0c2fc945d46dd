"""Start a warm process and keep it: ``python -m jupyter_disttrain.rank.warm.keep_alive FOLDER``, until stdin is closed.

A notebook runs it before its ranks start. Its environment is that of the ranks, as far as it selects the warm process.
"""

from __future__ import annotations

import os
import sys

from .start import connect
from .start_label import import_environment


def main() -> None:
    """Connect to the warm process, which ends only without connections."""
    with connect(import_environment(os.environ, sys.argv[1])):
        sys.stdin.read()


if __name__ == "__main__":
    main()
