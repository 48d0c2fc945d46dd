"""Print the findings.

Covers: text, with colour on a terminal only; JSON; the exit status.
Does not cover: making them (``doctor``).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, TextIO

from . import CHECKS, examine

if TYPE_CHECKING:
    from .finding import Finding, Status

_COLOURS: dict[Status, str] = {"ok": "\033[32m", "warning": "\033[33m", "error": "\033[1;31m"}
_RESET = "\033[0m"
_WIDTH = max(map(len, _COLOURS))


def write_text(stream: TextIO) -> int:
    """Write each finding when it is made, then a summary; return the exit status: 1 if any is an error."""
    paint = _is_colourful(stream)
    statuses: list[Status] = []
    for check in CHECKS:
        stream.write(f"{check.group}\n")
        stream.flush()
        for finding in examine(check):
            statuses.append(finding.status)
            stream.write(_as_text(finding, paint=paint))
            stream.flush()
    stream.write(f"{_sum_up(statuses)}\n")
    return int("error" in statuses)


def write_json(stream: TextIO) -> int:
    """Write all findings as one JSON object; return the exit status: 1 if any is an error.

    ``{"status": "warning", "findings": [{"group": ..., "status": ..., "subject": ..., "text": ..., "remedy": ...}]}``;
    the first status is the worst of all.
    """
    findings = [{"group": check.group, **asdict(finding)} for check in CHECKS for finding in examine(check)]
    statuses: list[Status] = [finding["status"] for finding in findings]
    worst = next(status for status in ("error", "warning", "ok") if status in statuses)
    json.dump({"status": worst, "findings": findings}, stream, indent=1)
    stream.write("\n")
    return int(worst == "error")


def _as_text(finding: Finding, *, paint: bool) -> str:
    # Plain ASCII is readable in any locale, and colour is never the only sign.
    label = finding.status.ljust(_WIDTH)
    if paint:
        label = f"{_COLOURS[finding.status]}{label}{_RESET}"
    text = f"  {label}  {finding.subject}: {finding.text}\n"
    return text if finding.remedy is None else f"{text}  {'':{_WIDTH}}  -> {finding.remedy}\n"


def _is_colourful(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def _sum_up(statuses: list[Status]) -> str:
    errors, warnings = statuses.count("error"), statuses.count("warning")
    if not errors + warnings:
        return f"All {len(statuses)} findings are fine."
    parts = [_plural(errors, "error"), _plural(warnings, "warning")]
    return f"{' and '.join(part for part in parts if part)}; each with its remedy above."


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}" if count else ""
