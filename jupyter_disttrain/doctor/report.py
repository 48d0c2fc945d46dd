"""Print the findings.

Covers: text, with colour on a terminal only; JSON; the exit status.
Does not cover: making them (``doctor``).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, TextIO

from ..protocol.ranks import counted
from . import CHECKS, examine

if TYPE_CHECKING:
    from .finding import Finding, Status

# From the best to the worst.
_COLOURS: dict[Status, str] = {"ok": "\033[32m", "warning": "\033[33m", "error": "\033[1;31m"}
_WIDTH = max(map(len, _COLOURS))


def write_text(stream: TextIO) -> int:
    """Write each finding when it is made, then a summary; return the exit status: 1 if any is an error."""
    paint = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    statuses: Counter[Status] = Counter()
    for group, find in CHECKS.items():
        stream.write(f"{group}\n")
        stream.flush()
        for finding in examine(group, find):
            statuses[finding.status] += 1
            stream.write(_as_text(finding, paint=paint))
            stream.flush()
    parts = [counted(statuses[status], status) for status in ("error", "warning") if statuses[status]]
    summary = (
        f"{' and '.join(parts)}; each with its remedy above." if parts else f"All {statuses['ok']} findings are fine."
    )
    stream.write(f"{summary}\n")
    return int(statuses["error"] > 0)


def write_json(stream: TextIO) -> int:
    """Write all findings as one JSON object; return the exit status: 1 if any is an error.

    ``{"status": "warning", "findings": [{"group": ..., "status": ..., "subject": ..., "text": ..., "remedy": ...}]}``;
    the first status is the worst of all.
    """
    findings = [{"group": group, **asdict(each)} for group, find in CHECKS.items() for each in examine(group, find)]
    worst = max((each["status"] for each in findings), key=list(_COLOURS).index)
    json.dump({"status": worst, "findings": findings}, stream, indent=1)
    stream.write("\n")
    return int(worst == "error")


def _as_text(finding: Finding, *, paint: bool) -> str:
    # Plain ASCII is readable in any locale, and colour is never the only sign.
    label = finding.status.ljust(_WIDTH)
    if paint:
        label = f"{_COLOURS[finding.status]}{label}\033[0m"
    text = f"  {label}  {finding.subject}: {finding.text}\n"
    return text if finding.remedy is None else f"{text}  {'':{_WIDTH}}  -> {finding.remedy}\n"
