"""Report findings on a machine.

Covers: a finding, a check that itself fails, text with colour on a terminal only, JSON, the exit status.
Does not cover: the checks (``doctor``).
"""

from __future__ import annotations

import json
import os
import traceback
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, TextIO

from ..protocol.ranks import counted
from .probe import ProbeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    Checks = Mapping[str, Callable[[], Iterable["Finding"]]]

Status = Literal["ok", "warning", "error"]
# From the best to the worst.
_COLOURS: dict[Status, str] = {"ok": "\033[32m", "warning": "\033[33m", "error": "\033[1;31m"}
_WIDTH = max(map(len, _COLOURS))


@dataclass(frozen=True, slots=True)
class Finding:
    """The result for one checked item, and its remedy.

    ``warning``: ranks run, but something will be slower or missing. ``error``: ranks don't run.
    """

    status: Status
    subject: str  # "torch", "shared memory"
    text: str  # one line: the version, the figure, or what is wrong
    remedy: str | None = None  # one line; None if there is nothing to do


def write_text(stream: TextIO, checks: Checks) -> int:
    """Write each finding when it is made, then a summary; return the exit status: 1 if any is an error."""
    paint = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    statuses: Counter[Status] = Counter()
    for group, find in checks.items():
        stream.write(f"{group}\n")
        stream.flush()
        for finding in _examine(group, find):
            statuses[finding.status] += 1
            stream.write(_as_text(finding, paint=paint))
            stream.flush()
    parts = [counted(statuses[status], status) for status in ("error", "warning") if statuses[status]]
    summary = (
        f"{' and '.join(parts)}; each with its remedy above." if parts else f"All {statuses['ok']} findings are fine."
    )
    stream.write(f"{summary}\n")
    return int(statuses["error"] > 0)


def write_json(stream: TextIO, checks: Checks) -> int:
    """Write all findings as one JSON object; return the exit status: 1 if any is an error.

    ``{"status": "warning", "findings": [{"group": ..., "status": ..., "subject": ..., "text": ..., "remedy": ...}]}``;
    the first status is the worst of all.
    """
    findings = [{"group": group, **asdict(each)} for group, find in checks.items() for each in _examine(group, find)]
    worst = max((each["status"] for each in findings), key=list(_COLOURS).index)
    json.dump({"status": worst, "findings": findings}, stream, indent=1)
    stream.write("\n")
    return int(worst == "error")


def _examine(group: str, find: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield the findings of a check; one that fails by itself never hides the others."""
    try:
        yield from find()
    except ProbeError as failure:
        yield Finding("error", group, f"not checked further: {failure}", "see the versions above")
    except Exception as failure:  # noqa: BLE001  (any failure is a finding)
        place = traceback.extract_tb(failure.__traceback__)[-1]
        yield Finding(
            "error",
            group,
            f"this check raised an error: {type(failure).__name__}: {failure} ({place.filename}:{place.lineno})",
            "report this line to the authors; the other checks are not affected",
        )


def _as_text(finding: Finding, *, paint: bool) -> str:
    # Plain ASCII is readable in any locale, and colour is never the only sign.
    label = finding.status.ljust(_WIDTH)
    if paint:
        label = f"{_COLOURS[finding.status]}{label}\033[0m"
    text = f"  {label}  {finding.subject}: {finding.text}\n"
    return text if finding.remedy is None else f"{text}  {'':{_WIDTH}}  -> {finding.remedy}\n"
