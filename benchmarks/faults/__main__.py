"""Break sessions at random and check that they recover: ``python -m benchmarks.faults``."""

from __future__ import annotations

import sys

from .campaign import main

sys.exit(main())
