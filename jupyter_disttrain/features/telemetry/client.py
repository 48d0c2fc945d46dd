"""Collect the figures that ranks and nodes report over time.

Covers: the latest figures of each rank and node, histories for plots, the metrics table, ranks that stopped reporting.
Does not cover: drawing (``notebook``), serving (``server``), explaining differences between ranks (``warnings``).

The notebook's kernel and the server both use it, each with its own subscription.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...protocol.messages import METRICS, NodeVitals, RankVitals
from ...protocol.metric_blocks import unpack
from ...protocol.states import RankActivity, RankState
from .rank_figures import RankFigures
from .warnings import Remarks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .metrics_table import MetricsTable

SILENT_SAMPLES = 4  # missing reports after which a rank's nanny or host counts as not responding
_NO_CELL: dict[str, Any] = {"cell": None, "execution_count": None, "line": None, "call": "", "waits_s": 0.0}
_NO_LOOP: dict[str, Any] = {"done": 0, "total": 0, "left_s": None}


def _without_cell(vitals: RankVitals) -> RankVitals:
    """Return a rank's figures as they are once its cell has ended."""
    state = RankActivity.IDLE if vitals.state in (RankActivity.RUNNING, RankActivity.IN_COLLECTIVE) else vitals.state
    return replace(vitals, state=state, **_NO_CELL, **_NO_LOOP)


def _is_other_process(before: RankVitals, now: RankVitals) -> bool:
    """Whether a rank's counters started again from zero, i.e. a new process reports."""
    return now.steps < before.steps or now.checks < before.checks or now.samples < before.samples


class Telemetry:
    """Figures and metrics of one cluster, whose ranks report every ``sample_s`` seconds; 0: not at all.

    ``note`` gets a message for the user whenever metrics are lost.
    """

    def __init__(self, sample_s: float, note: Callable[[str], None]) -> None:
        self._lock = threading.Lock()
        self._sample_s, self._note = sample_s, note
        self._ranks: dict[int, RankFigures] = {}
        self._asked_to_end: set[int] = set()  # ended ranks whose process was asked to end
        # By rank, the last cell whose end was reported before the rank's figures showed it.
        self._ended: dict[int, int] = {}
        self._nodes: dict[str, tuple[NodeVitals, float, int]] = {}  # with its arrival time and the reporting rank
        self._metrics: MetricsTable | None = None
        self.changes = 0  # counts urgent changes: progress of loops, ends of cells and of ranks
        self.remarks = Remarks(lambda: self.ranks, lambda: self._metrics)

    @property
    def metrics(self) -> MetricsTable:
        """Values that cells logged with ``log_metrics``."""
        from .metrics_table import MetricsTable  # noqa: PLC0415  (numpy takes a kernel 10 MB)

        with self._lock:
            if self._metrics is None:
                self._metrics = MetricsTable()
            return self._metrics

    @property
    def metrics_arrived(self) -> int:
        """Number of values of ``log_metrics`` that have arrived, including dropped ones; does not import numpy."""
        return 0 if self._metrics is None else self._metrics.arrived

    def read_metrics(self, run: Path) -> None:
        """Read what the ranks of a run have logged before this process subscribed."""
        if any(run.glob("*.metrics.jsonl")):
            self._store(lambda metrics: metrics.read(run))

    def take(self, rank: int, msg_type: str, data: bytes) -> None:
        """Take a message that a rank's nanny published on ``FIGURES_TOPIC``."""
        if msg_type == METRICS:
            self._store(lambda metrics: metrics.add(rank, unpack(data)))
        elif msg_type == NodeVitals.msg_type:
            node = NodeVitals.from_content(json.loads(data))
            with self._lock:
                self._nodes[node.host] = node, time.monotonic(), rank
        elif msg_type == RankVitals.msg_type:
            vitals = RankVitals.from_content(json.loads(data))
            with self._lock:
                self._keep(rank, vitals)

    def _store(self, store: Callable[[MetricsTable], object]) -> None:
        try:
            metrics = self.metrics
        except ImportError as error:
            self._note(f"values of log_metrics are lost, because numpy can't be imported: {error}")
        else:
            store(metrics)

    def take_first(self, rank: int, vitals: RankVitals) -> None:
        """Take figures that were requested of a rank, if it has any and has not published newer ones meanwhile."""
        with self._lock:
            if vitals.time_s and vitals.beat_s and rank not in self._ranks:
                self._keep(rank, vitals)

    def end_cell(self, rank: int) -> None:
        """Record that a rank has ended the cell in its latest figures; figures that arrive next may be older."""
        with self._lock:
            figures = self._ranks.get(rank)
            if figures is not None and figures.vitals.cell is not None:
                self._ended[rank] = figures.vitals.cell
                figures.vitals = _without_cell(figures.vitals)
                self.changes += 1

    def _keep(self, rank: int, vitals: RankVitals) -> None:
        """Keep figures; with the lock held."""
        if vitals.cell is not None and vitals.cell == self._ended.get(rank):
            vitals = _without_cell(vitals)
        figures = self._ranks.get(rank)
        if figures is None or _is_other_process(figures.vitals, vitals):
            figures = self._ranks[rank] = RankFigures(vitals, time.monotonic())
        before, figures.vitals, figures.arrived = figures.vitals, vitals, time.monotonic()
        self.changes += (before.cell, before.done, before.total) != (vitals.cell, vitals.done, vitals.total)
        # A rank without a heartbeat so far has no figures to compare with. Of figures that were measured together
        # the first are kept: they are repeated as a loop advances.
        if vitals.beat_s and not (figures.history and figures.history[-1].time_s == vitals.time_s):
            figures.history.append(vitals)

    def end_rank(self, rank: int, *, expected: bool) -> None:
        """Forget the figures of a rank whose process has ended; ``expected``: it was asked to end."""
        with self._lock:
            self._ranks.pop(rank, None)
            (self._asked_to_end.add if expected else self._asked_to_end.discard)(rank)
            self.changes += 1

    @property
    def ranks(self) -> dict[int, RankFigures]:
        """The figures of the ranks that have reported."""
        with self._lock:
            return dict(sorted(self._ranks.items()))

    @property
    def nodes(self) -> tuple[NodeVitals, ...]:
        """The nodes that report, in the order of their ranks, without nodes that stopped reporting."""
        since = time.monotonic() - SILENT_SAMPLES * self._sample_s - 1.0
        with self._lock:
            nodes = sorted(self._nodes.values(), key=lambda entry: entry[2])
        return tuple(node for node, arrived, _ in nodes if arrived > since)

    def state(self, rank: int, known: RankState) -> tuple[RankState | RankActivity, str]:
        """Return a rank's state, and its text for the user.

        ``known`` is the state that the cluster has recorded, which is newer than the rank's reports.
        """
        figures = self._ranks.get(rank)
        if known is RankState.DEAD and rank in self._asked_to_end:
            known = RankState.ENDED
        if known in (RankState.ENDED, RankState.DEAD) or figures is None or not self._sample_s:
            return known, known.value
        age_s = time.monotonic() - figures.arrived
        if age_s > SILENT_SAMPLES * self._sample_s + 1.0:
            return RankActivity.NOT_RESPONDING, f"no report for {age_s:.0f} s"
        vitals = figures.vitals
        if vitals.state == RankActivity.NOT_RESPONDING:
            return RankActivity.NOT_RESPONDING, f"not responding for {vitals.silent_s:.0f} s"
        if vitals.state == RankActivity.STOPPED:
            return RankActivity.NOT_RESPONDING, "stopped"
        if known is RankState.RUNNING and vitals.state == RankActivity.IN_COLLECTIVE:
            return RankActivity.IN_COLLECTIVE, f"in {vitals.call} for {vitals.waits_s:.0f} s"
        return known, known.value
