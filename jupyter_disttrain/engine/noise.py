"""What libraries write on a rank's stderr that says nothing to anybody.

Covers: torch's warning that a rank's address has no name: it goes on with the address.
Does not cover: other warnings, which are shown; the rank's log, which has all.
"""

from __future__ import annotations

import re

_SIGN = b"hostname of the client socket cannot be retrieved"
_LINE = re.compile(rb"\[W[^\n]*\[c10d\] The hostname of the client socket cannot be retrieved\.[^\n]*\n?")


def without_noise(data: bytes) -> bytes:
    """Return what was written without such lines; torch writes each of them at once."""
    return _LINE.sub(b"", data) if _SIGN in data else data
