"""Remove uninformative library messages from a rank's stderr.

Covers: torch's warning that a rank's address has no name (torch uses the address instead); the C++ frames below its
other warnings; libevent's message about a connection of MPI's to a process that died.
Does not cover: other warnings, which are shown; the rank's log, which has all.
"""

from __future__ import annotations

import re

_FRAMES = rb"(?:Exception raised from[^\n]*\n)?(?:(?:frame #\d+:|<omitting python frames>)[^\n]*(?:\n|$))+\n*"
_NOISE = (  # a marker to search for first, the pattern, its replacement
    (
        b"hostname of the client socket cannot be retrieved",
        re.compile(rb"\[W[^\n]*\[c10d\] The hostname of the client socket cannot be retrieved\.[^\n]*\n?"),
        b"",
    ),
    (
        b"\nframe #0:",
        re.compile(rb"(\[W[^\n]*\[c10d\][^\n]*\n)" + _FRAMES),
        rb"\1",
    ),
    (
        b"[warn] Epoll ",
        re.compile(rb"\[warn\] Epoll [A-Z]+\(\d+\) on fd \d+ failed\.[^\n]*Bad file descriptor\n?"),
        b"",
    ),
)


def without_noise(data: bytes) -> bytes:
    """Return the output without such lines; each of them is written at once."""
    for sign, pattern, rest in _NOISE:
        if sign in data:
            data = pattern.sub(rest, data)
    return data
