"""Read and write metrics on disk.

Covers: reading what the ranks' nannies wrote beside the logs; TensorBoard's event files.
Does not cover: writing beside the logs (``features.telemetry.rank.metrics_writer``).
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...protocol.metric_blocks import pack, unpack

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ...protocol.metric_blocks import Samples

MOST_BYTES = 16 << 20  # read per file: some 150,000 values


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One value that one rank logged."""

    time_s: float  # seconds since the epoch, on the rank
    cell: int | None  # the number of the cell that logged it
    step: int | None
    rank: int
    name: str
    value: float


def read_run(run: Path) -> Iterator[tuple[int, Samples]]:
    """Yield each rank of a run with what its cells have logged, the cells one by one."""
    for path in sorted(run.glob("rank[0-9]*.metrics.jsonl")):
        rank = int(path.name.removeprefix("rank").partition(".")[0])
        for cell, records in groupby(_records(path), itemgetter("cell")):
            # JSON has no NaN or infinity, so the file has them as text.
            values = (
                (each["time_s"], each["step"], {name: float(value) for name, value in each["values"].items()})
                for each in records
            )
            yield rank, unpack(pack(values, cell))


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
    counts: Counter[tuple[int, str]] = Counter()
    try:
        for row in rows:
            if row.rank not in writers:
                writers[row.rank] = EventFileWriter(str(Path(folder) / f"rank{row.rank}"))
            step = counts[row.rank, row.name] if row.step is None else row.step
            counts[row.rank, row.name] += 1
            summary = Summary(value=[Summary.Value(tag=row.name, simple_value=row.value)])
            writers[row.rank].add_event(Event(wall_time=row.time_s, step=step, summary=summary))
    finally:
        for writer in writers.values():
            writer.close()
