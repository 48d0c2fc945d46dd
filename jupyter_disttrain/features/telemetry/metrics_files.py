"""Read and write metrics on disk.

Covers: reading what the ranks' nannies wrote beside the logs; CSV; TensorBoard's event files.
Does not cover: writing beside the logs (``features.telemetry.rank.metrics_writer``).
"""

from __future__ import annotations

import csv
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_FILE = re.compile(r"rank(\d+)\.metrics\.jsonl")
MOST_BYTES = 16 << 20  # read per file: some 150,000 values
Sample = tuple[float, "int | None", "int | None", "dict[str, Any]"]  # time, cell, step, values by name
COLUMNS = ("time_s", "cell", "step", "rank", "name", "value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One value that one rank logged."""

    rank: int
    time_s: float  # seconds since the epoch, on the rank
    cell: int | None  # the number of the cell that logged it
    step: int | None
    name: str
    value: float


def read_run(run: Path) -> Iterator[tuple[int, list[Sample]]]:
    """Yield each rank of a run with the samples it has logged."""
    for path in sorted(run.glob("rank*.metrics.jsonl")):
        match = _FILE.fullmatch(path.name)
        if match:
            yield int(match[1]), list(_samples(path))


def _samples(path: Path) -> Iterator[Sample]:
    """Yield the last samples of a file, which may be growing."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            file.seek(size - MOST_BYTES)
            file.readline()  # the rest of a partial line
        for line in file.read(size - file.tell()).splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue  # a partial line, which is being written or was cut off, or the empty line after one
            yield record["time_s"], record["cell"], record["step"], record["values"]


def write_csv(path: str | Path, rows: Iterable[Metric]) -> None:
    """Write values as comma-separated text."""
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows([getattr(row, column) for column in COLUMNS] for row in rows)


def write_tensorboard(folder: str | Path, rows: Iterable[Metric]) -> None:
    """Write values as TensorBoard's event files, one folder per rank; values without a step are numbered.

    Raises
    ------
    ImportError
        If TensorBoard is not installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("event files need the tensorboard package: pip install tensorboard") from error
    writers: dict[int, Any] = {}
    counts: dict[tuple[int, str], int] = {}
    try:
        for row in rows:
            if row.rank not in writers:
                writers[row.rank] = EventFileWriter(str(Path(folder) / f"rank{row.rank}"))
            count = counts.get((row.rank, row.name), 0)
            counts[row.rank, row.name] = count + 1
            summary = Summary(value=[Summary.Value(tag=row.name, simple_value=row.value)])
            step = count if row.step is None else row.step
            writers[row.rank].add_event(Event(wall_time=row.time_s, step=step, summary=summary))
    finally:
        for writer in writers.values():
            writer.close()
