"""Keep the values of ``log_metrics``, and aggregate them over ranks.

Covers: keeping the last million values, by name, step and rank; mean, minimum, maximum and spread over ranks; reading
what the ranks' nannies wrote beside the logs; CSV, TensorBoard's event files.
Does not cover: figures that ranks report by themselves (``client``), writing files (``telemetry.rank.metrics_writer``).

Columns are numpy arrays: a million values take 37 MB, and a reader copies only new rows.
"""

from __future__ import annotations

import csv
import json
import threading
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...protocol.metric_blocks import NO_STEP, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

    from ...protocol.metric_blocks import Samples

MOST_BYTES = 16 << 20  # read per file: some 150,000 values
ROWS = 1_000_000  # kept; older rows are dropped, or a session of days would fill the notebook's memory
NO_CELL = -1
_COLUMNS = np.dtype([("time_s", "f8"), ("cell", "i4"), ("step", "i8"), ("name", "i4"), ("rank", "i4"), ("value", "f8")])


class Metric(NamedTuple):
    """One value that one rank logged."""

    time_s: float  # seconds since the epoch, on the rank
    cell: int | None  # the number of the cell that logged it
    step: int | None
    rank: int
    name: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """One metric of one cell, by step and rank."""

    name: str
    steps: np.ndarray  # (steps,) int64, ascending; without steps, how often the rank had logged it before
    ranks: tuple[int, ...]
    values: np.ndarray  # (steps, ranks) float64; NaN where a rank did not log that step
    is_missing: np.ndarray  # (steps, ranks) bool: distinguishes a step that was not logged from a logged NaN

    @property
    def mean(self) -> np.ndarray:
        """The mean over the ranks that logged a step, (steps,)."""
        with _quiet():
            parts = self.values / (~self.is_missing).sum(axis=1, keepdims=True)  # divide first: the sum may overflow
            return np.asarray(np.where(self.is_missing, 0.0, parts).sum(axis=1))

    @property
    def minimum(self) -> np.ndarray:
        """The minimum over the ranks, (steps,); NaN if a rank logged NaN."""
        return np.asarray(np.where(self.is_missing, np.inf, self.values).min(axis=1))

    @property
    def maximum(self) -> np.ndarray:
        """The maximum over the ranks, (steps,); NaN if a rank logged NaN."""
        return np.asarray(np.where(self.is_missing, -np.inf, self.values).max(axis=1))

    @property
    def spread(self) -> np.ndarray:
        """Maximum minus minimum, (steps,); NaN where both are the same infinity."""
        with _quiet():
            return np.asarray(self.maximum - self.minimum)


def _quiet() -> np.errstate:
    """Silence numpy's warnings about infinities: a diverging metric already shows them in its values."""
    return np.errstate(invalid="ignore", over="ignore")


class MetricsTable:
    """The last million values that ranks logged, in the order of arrival."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows = np.empty(ROWS, _COLUMNS)  # the system gives memory to what is used of it
        self._count = 0  # rows in use
        self._gone = 0  # rows dropped so far
        self._names: dict[str, int] = {}
        self._read_until: dict[int, float] = {}  # by rank, the time up to which its file was read

    def __len__(self) -> int:
        """Return the number of values kept."""
        return self._count

    def __repr__(self) -> str:
        """Return the number of values and the names of the metrics."""
        return f"<{self._count:,} values of {', '.join(self.names) or 'no metric yet'}>"

    @property
    def arrived(self) -> int:
        """Number of values that have arrived, including dropped ones."""
        with self._lock:
            return self._gone + self._count

    def add(self, rank: int, samples: Samples) -> None:
        """Add a rank's message."""
        with self._lock:
            until = self._read_until.get(rank, -np.inf)
            for block in samples.blocks:
                matrix = block.matrix[-(ROWS // 2 // max(1, len(block.names))) :]
                self._add(rank, samples.cell, block.names, matrix[matrix[:, 0] > until])

    def _add(self, rank: int, cell: int | None, names: tuple[str, ...], matrix: np.ndarray) -> None:
        """Add samples with the same names, (samples, 2 + names): see ``metric_blocks.Block``."""
        values = matrix[:, 2:]
        if self._count + values.size > ROWS:
            kept = self._rows[ROWS // 4 + values.size : self._count].copy()
            self._gone += self._count - len(kept)
            self._rows[: len(kept)] = kept
            self._count = len(kept)
        rows = self._rows[self._count : self._count + values.size].reshape(values.shape)
        steps = matrix[:, 1:2]
        rows["time_s"] = matrix[:, :1]
        rows["cell"] = NO_CELL if cell is None else cell
        rows["step"] = np.where(np.isnan(steps), NO_STEP, np.nan_to_num(steps).astype("i8"))
        rows["name"] = [self._names.setdefault(name, len(self._names)) for name in names]
        rows["rank"] = rank
        rows["value"] = values
        self._count += values.size

    def read(self, run: Path) -> None:
        """Fill a new table with what the ranks of a run have logged before this process subscribed."""
        until = {}
        for rank, samples in _read_run(run):
            self.add(rank, samples)
            until[rank] = float(samples.blocks[-1].matrix[-1, 0])
        self._read_until = until

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics that were logged, in the order of their first value."""
        with self._lock:
            return tuple(self._names)

    def since(self, mark: int) -> tuple[int, np.ndarray]:
        """Return the rows that arrived after a mark, and the mark for the next call; the first mark is 0."""
        with self._lock:
            start = max(0, mark - self._gone)
            return self._gone + self._count, self._rows[start : self._count].copy()

    def last_number_before(self, row: np.void) -> np.void | None:
        """Return the last row of a rank's metric in the same cell whose value is not NaN, before ``row``."""
        size = 10_000  # it is likely among the last rows
        with self._lock:
            while True:
                start = max(0, self._count - size)
                rows = self._rows[start : self._count]
                is_older = rows["cell"][0] < row["cell"]  # then there are none of this cell before
                rows = rows[rows["name"] == row["name"]]
                is_same = (rows["cell"] == row["cell"]) & (rows["rank"] == row["rank"])
                rows = rows[is_same & (rows["time_s"] <= row["time_s"]) & ~np.isnan(rows["value"])]
                if len(rows) or is_older or not start:
                    return rows[-1] if len(rows) else None
                size *= 10

    def rows(self, name: str | None = None) -> list[Metric]:
        """Return the values of one metric, or of all."""
        _, rows = self.since(0)
        names = self.names
        if name is not None:
            rows = rows[rows["name"] == self._names.get(name, -1)]
        return [
            Metric(
                at, None if cell == NO_CELL else cell, None if step == NO_STEP else step, rank, names[name_at], value
            )
            for at, cell, step, name_at, rank, value in rows.tolist()
        ]

    def gather(self, name: str, cell: int | None = None) -> Gathered:
        """Return a metric by step and rank.

        Parameters
        ----------
        name
            The metric.
        cell
            The number of the cell that logged it; None for the last that did.

        Raises
        ------
        KeyError
            If no rank has logged such a metric, or not in that cell; the message lists those that exist.
        """
        _, rows = self.since(0)
        rows = rows[rows["name"] == self._names.get(name, -1)]
        if not len(rows):
            there = ", ".join(self.names)
            raise KeyError(
                f"no rank has logged {name!r}" + (f"; logged are: {there}" if there else ", or anything else")
            )
        cells = np.unique(rows["cell"]).tolist()
        if cell is not None and cell not in cells:
            raise KeyError(f"cell {cell} has not logged {name!r}; cells that have: {', '.join(map(str, cells))}")
        return gather(name, rows, cell)

    def gather_last(self, count: int) -> list[Gathered]:
        """Return the ``count`` metrics that were logged last, each from the cell that logged it last."""
        _, rows = self.since(0)
        numbers, last = np.unique(rows["name"][::-1], return_index=True)
        names, latest = self.names, sorted(numbers[np.argsort(last)][:count].tolist())
        return [gather(names[number], rows[rows["name"] == number]) for number in latest]

    def to_frame(self) -> pd.DataFrame:
        """Return all values as a pandas frame: time (UTC), cell, step, rank, name, value; needs pandas."""
        import pandas as pd  # noqa: PLC0415  (import pandas only on request)

        _, rows = self.since(0)
        step = pd.array(rows["step"], dtype="Int64")
        step[rows["step"] == NO_STEP] = pd.NA
        cell = pd.array(rows["cell"], dtype="Int64")
        cell[rows["cell"] == NO_CELL] = pd.NA
        return pd.DataFrame(
            {
                "time": pd.to_datetime(rows["time_s"], unit="s", utc=True),
                "cell": cell,
                "step": step,
                "rank": rows["rank"],
                "name": pd.Categorical.from_codes(rows["name"].tolist(), pd.Index(self.names)),
                "value": rows["value"],
            }
        )

    def to_csv(self, path: str | Path) -> None:
        """Write all values as comma-separated text, with the columns of :meth:`to_frame`."""
        with Path(path).open("w", newline="") as file:
            csv.writer(file).writerows([Metric._fields, *self.rows()])

    def to_tensorboard(self, folder: str | Path) -> None:
        """Write all values as TensorBoard's event files, one folder per rank; values without a step are numbered."""
        try:
            from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415
            from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415
            from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415
        except ImportError as error:
            raise ImportError("event files need the tensorboard package: pip install tensorboard") from error
        writers: dict[int, Any] = {}
        counts: Counter[tuple[int, str]] = Counter()
        try:
            for row in self.rows():
                if row.rank not in writers:
                    writers[row.rank] = EventFileWriter(str(Path(folder) / f"rank{row.rank}"))
                step = counts[row.rank, row.name] if row.step is None else row.step
                counts[row.rank, row.name] += 1
                summary = Summary(value=[Summary.Value(tag=row.name, simple_value=row.value)])
                writers[row.rank].add_event(Event(wall_time=row.time_s, step=step, summary=summary))
        finally:
            for writer in writers.values():
                writer.close()


def gather(name: str, rows: np.ndarray, cell: int | None = None) -> Gathered:
    """Arrange the rows of one metric by step and rank: those of one cell, by default of the last that logged it."""
    rows = rows[rows["cell"] == (rows["cell"][-1] if cell is None else cell)]
    steps = rows["step"].copy()
    for rank in np.unique(rows["rank"]):
        unnumbered = (rows["rank"] == rank) & (steps == NO_STEP)
        steps[unnumbered] = np.arange(np.count_nonzero(unnumbered))
    known_steps, row_at = np.unique(steps, return_inverse=True)
    ranks, column_at = np.unique(rows["rank"], return_inverse=True)
    values = np.full((len(known_steps), len(ranks)), np.nan)
    is_missing = np.ones(values.shape, bool)
    values[row_at, column_at] = rows["value"]  # the last value of a step that was logged twice
    is_missing[row_at, column_at] = False
    return Gathered(name=name, steps=known_steps, ranks=tuple(ranks.tolist()), values=values, is_missing=is_missing)


def _read_run(run: Path) -> Iterator[tuple[int, Samples]]:
    """Yield each rank of a run with what its cells have logged, the cells one by one."""
    for path in sorted(run.glob("rank[0-9]*.metrics.jsonl")):
        number = path.name.removeprefix("rank").partition(".")[0]
        if not number.isdecimal():
            continue  # e.g. a copy that a user has made
        for cell, records in groupby(_records(path), itemgetter("cell")):
            # JSON has no NaN or infinity, so the file has them as text.
            values = (
                (each["time_s"], each["step"], {name: float(value) for name, value in each["values"].items()})
                for each in records
            )
            yield int(number), unpack(pack(values, cell))


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the last records of a file, which may be growing."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - MOST_BYTES))
        for line in file.read(MOST_BYTES).splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue  # a partial line: the first, one that is being written or was cut off; or an empty one
