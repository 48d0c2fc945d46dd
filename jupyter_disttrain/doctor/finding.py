"""Define the findings of a check.

Covers: :class:`Finding` and the three ways to make one.
Does not cover: how findings are shown (``report``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result for one checked item, and its remedy.

    ``warning``: ranks run, but something will be slower or missing. ``error``: ranks don't run.
    """

    status: Status
    subject: str  # "torch", "shared memory"
    text: str  # one line: the version, the figure, or what is wrong
    remedy: str | None = None  # one line; None if there is nothing to do


def ok(subject: str, text: str) -> Finding:
    """Return a finding that something is as it should be."""
    return Finding(status="ok", subject=subject, text=text)


def warning(subject: str, text: str, remedy: str) -> Finding:
    """Return a finding that something will be slower or missing, with the remedy."""
    return Finding(status="warning", subject=subject, text=text, remedy=remedy)


def error(subject: str, text: str, remedy: str) -> Finding:
    """Return a finding that ranks won't run, with the remedy."""
    return Finding(status="error", subject=subject, text=text, remedy=remedy)
