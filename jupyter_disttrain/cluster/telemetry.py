"""What ranks and nodes tell of themselves, over time.

Covers: the last figures of each, rates, histories for plots, the metrics table; whose silence shows.
Does not cover: drawing (``notebook``), serving (``server``), what it means that ranks differ (``stragglers``).

Used by the notebook's kernel and by the server alike, each from its own subscription.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..messages import METRICS, NodeVitals, RankVitals
from ..samples import unpack
from .remarks import Remarks

if TYPE_CHECKING:
    from .metrics_table import MetricsTable

KEPT = 600  # figures of each rank: ten minutes at one a second
RATE_SECONDS = 5.0  # over which rates are taken
SILENT_SAMPLES = 4  # that did not come, before a rank's nanny or host counts as not responding

STATES = ("starting", "idle", "running", "in collective", "not responding", "dead")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast a rank went between two of its figures; None where there is nothing to count."""

    seconds: float  # between the two
    steps: int
    steps_per_s: float | None
    samples_per_s: float | None
    waiting: float | None  # for other ranks: the part of the time, 0 to 1
    waiting_for_data: float | None  # the part of the time, 0 to 1
    looks: int  # on which ``waiting`` is founded


@dataclass(slots=True)
class RankFigures:
    """One rank, as it told last."""

    vitals: RankVitals
    arrived: float  # of ``time.monotonic``, here
    history: deque[RankVitals] = field(default_factory=lambda: deque(maxlen=KEPT))

    def recent(self) -> tuple[RankVitals, ...]:
        """Return the history as it is now; another thread adds to it."""
        while True:
            try:
                return tuple(self.history)
            except RuntimeError:
                continue  # it was added to meanwhile

    def rates(self, seconds: float = RATE_SECONDS) -> Rates | None:
        """Return how fast it went in the last seconds of the cell that runs; None while none does."""
        if not self.history or self.vitals.cell is None:
            return None
        last = earlier = self.vitals
        for each in reversed(self.recent()):
            if each.cell != last.cell or last.beat_s - earlier.beat_s >= seconds:
                break
            earlier = each
        return rates_between(earlier, last)


def rates_between(earlier: RankVitals, later: RankVitals) -> Rates | None:
    """Return how fast a rank went between two of its figures; None if they are of one moment, or of two processes."""
    seconds = later.beat_s - earlier.beat_s
    steps, samples, looks = (
        later.steps - earlier.steps,
        later.samples - earlier.samples,
        later.looks - earlier.looks,
    )
    if seconds <= 0 or min(steps, samples, looks) < 0:
        return None
    waited_for_data = later.data_wait_s - earlier.data_wait_s
    return Rates(
        seconds=seconds,
        steps=steps,
        steps_per_s=steps / seconds if steps else None,
        samples_per_s=samples / seconds if samples else None,
        waiting=(later.waits - earlier.waits) / looks if looks else None,
        waiting_for_data=min(1.0, waited_for_data / seconds) if samples else None,
        looks=later.seen - earlier.seen,
    )


def _without_cell(vitals: RankVitals) -> RankVitals:
    """Return the figures of a rank as they are once its cell has ended."""
    state = "idle" if vitals.state in ("running", "in collective") else vitals.state
    return replace(
        vitals,
        state=state,
        cell=None,
        execution_count=None,
        line=None,
        call="",
        waits_s=0.0,
        done=0,
        total=0,
        left_s=None,
    )


def _is_other_process(before: RankVitals, now: RankVitals) -> bool:
    """Whether a rank counts from zero again."""
    return now.steps < before.steps or now.looks < before.looks or now.samples < before.samples


class Telemetry:
    """Figures and metrics of one cluster.

    Parameters
    ----------
    sample_s
        Seconds between two figures of a rank, as the cluster was started with; 0 if there are none.
    """

    def __init__(self, sample_s: float) -> None:
        self._lock = threading.Lock()
        self._sample_s = sample_s
        self._ranks: dict[int, RankFigures] = {}
        self._ended: dict[int, int] = {}  # by rank, the cell whose end was seen before the rank's figures show it
        self._nodes: dict[str, tuple[NodeVitals, float, int]] = {}  # with when it came, and from which rank
        self._metrics: MetricsTable | None = None
        self.remarks = Remarks(self)

    @property
    def metrics(self) -> MetricsTable:
        """What cells logged with ``log_metrics``."""
        with self._lock:
            if self._metrics is None:
                from .metrics_table import MetricsTable  # noqa: PLC0415  (numpy: only who has metrics pays for it)

                self._metrics = MetricsTable()
            return self._metrics

    @property
    def has_metrics(self) -> bool:
        """Whether anything was logged."""
        return self._metrics is not None

    def take(self, rank: int, msg_type: str, data: bytes) -> None:
        """Take a message of a rank's nanny, as it comes on ``FIGURES_TOPIC``."""
        if msg_type == METRICS:
            samples = unpack(data)
            self.metrics.add(rank, samples)
            self.remarks.take(rank, samples)
        elif msg_type == NodeVitals.msg_type:
            node = NodeVitals.from_content(json.loads(data))
            with self._lock:
                self._nodes[node.host] = node, time.monotonic(), rank
        elif msg_type == RankVitals.msg_type:
            self._take_vitals(rank, RankVitals.from_content(json.loads(data)))

    def end_cell(self, rank: int) -> None:
        """Note that a rank has ended the cell that its last figures show; the next figures may be older than that."""
        with self._lock:
            figures = self._ranks.get(rank)
            if figures is not None and figures.vitals.cell is not None:
                self._ended[rank] = figures.vitals.cell
                figures.vitals = _without_cell(figures.vitals)

    def _take_vitals(self, rank: int, vitals: RankVitals) -> None:
        with self._lock:
            if vitals.cell is not None and vitals.cell == self._ended.get(rank):
                vitals = _without_cell(vitals)
            figures = self._ranks.get(rank)
            if figures is None or _is_other_process(figures.vitals, vitals):
                figures = RankFigures(vitals, time.monotonic())
                self._ranks[rank] = figures
            figures.vitals, figures.arrived = vitals, time.monotonic()
            if vitals.beat_s:  # before its first beat a rank has shown nothing to compare with
                figures.history.append(vitals)

    def forget(self, rank: int) -> None:
        """Forget a rank whose process has ended."""
        with self._lock:
            self._ranks.pop(rank, None)

    @property
    def ranks(self) -> dict[int, RankFigures]:
        """The ranks that have told of themselves."""
        with self._lock:
            return dict(sorted(self._ranks.items()))

    @property
    def nodes(self) -> tuple[NodeVitals, ...]:
        """The nodes that tell of themselves, in the order of their ranks; not one that fell silent."""
        since = time.monotonic() - SILENT_SAMPLES * self._sample_s - 1.0
        with self._lock:
            nodes = sorted(self._nodes.values(), key=lambda told: told[2])
        return tuple(node for node, arrived, _ in nodes if arrived > since)

    def state(self, rank: int, known: str) -> tuple[str, str]:
        """Return a rank's state: one word of ``STATES``, and what a person reads.

        Parameters
        ----------
        rank
            The rank.
        known
            What the cluster knows: ``"idle"``, ``"running"`` or ``"dead"``. It is ahead of what the rank tells.
        """
        figures = self._ranks.get(rank)
        if known == "dead" or figures is None or not self._sample_s:
            return known, known
        unheard_s = time.monotonic() - figures.arrived
        if unheard_s > SILENT_SAMPLES * self._sample_s + 1.0:
            return "not responding", f"not heard of for {unheard_s:.0f} s"
        told = figures.vitals
        if told.state == "not responding":
            return told.state, f"not responding for {told.silent_s:.0f} s"
        if told.state == "stopped":
            return "not responding", "stopped"
        if known == "running" and told.state == "in collective":
            return told.state, f"in {told.call} for {told.waits_s:.0f} s"
        return known, known
