"""Read the end of ranks' logs.

Covers: the logs of one or all ranks, which parts are stderr.
Does not cover: writing logs (``rank.nanny.log_file``), displaying them (``server``, ``notebook.views.widget``).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ..transport.ssh_tunnel import split

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

END_BYTES = 64_000  # read from a single log
ALL_BYTES, LEAST_BYTES = 256_000, 2_000  # read from the logs of several ranks together, and at least from each
CHANGES_BYTES = 256_000  # read from the file of changes between the streams
STREAMS = ("stdout", "stderr")


def log_ends(path_of: Callable[[int], Path], ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Return the end of each rank's log as JSON, of more ranks less of each; empty if there is no log."""
    size = END_BYTES if len(ranks) == 1 else max(LEAST_BYTES, ALL_BYTES // max(1, len(ranks)))
    return [{"rank": rank, **_end(path_of(rank), size)} for rank in ranks]


def require_here(path: Path, rank: int, job_file: str) -> Path:
    """Return the path of a log; a UsageError if it is on another machine, because the job was reached through ssh."""
    if split(job_file):
        host = job_file.partition(":")[0]
        raise UsageError(f"the log of rank {rank} is on {host}: {path}; ssh {host} tail -f {path} shows it")
    return path


def _end(path: Path, size_bytes: int) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            start = file.seek(max(0, end - size_bytes))
            data = file.read(size_bytes)
    except FileNotFoundError:
        return {"parts": [], "is_cut": False}
    before, changes = _changes(path.with_suffix(".streams"), start, start + len(data))
    bounds = [(start, before), *changes, (start + len(data), "")]
    parts = []
    for (begin, stream), (until, _) in pairwise(bounds):
        text = data[begin - start : until - start].decode(errors="replace")
        if text:
            parts.append({"stream": stream, "text": text})
    return {"parts": parts, "is_cut": start > 0}


def _changes(path: Path, start: int, end: int) -> tuple[str, list[tuple[int, str]]]:
    """Return the stream at position ``start`` of the log, and the changes between the two streams up to ``end``."""
    try:
        with path.open("rb") as file:
            cut = max(0, file.seek(0, 2) - CHANGES_BYTES)
            file.seek(cut)
            lines = file.read(CHANGES_BYTES).decode().split("\n")
    except FileNotFoundError:
        return STREAMS[0], []
    found = [(int(at), name) for at, _, name in (line.partition(" ") for line in lines[bool(cut) : -1])]
    earlier = [name for at, name in found if at <= start]
    others = [name for name in STREAMS if not found or name != found[0][1]]
    before = earlier[-1] if earlier else others[0]
    return before, [(at, name) for at, name in found if start < at < end]
