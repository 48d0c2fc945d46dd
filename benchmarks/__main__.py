"""Run the comparison with the other tools: ``python -m benchmarks``."""

from __future__ import annotations

import sys

from .compare.__main__ import main

sys.exit(main())
