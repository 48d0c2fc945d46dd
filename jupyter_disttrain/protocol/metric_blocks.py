"""Pack the values of ``log_metrics`` as bytes.

Covers: packing them on a rank; reading them, by sample or as a matrix.
Does not cover: when they are sent (``features.telemetry.rank.log_metrics``), keeping them
(``features.telemetry.metrics_table``).

A message is the length of a JSON header, the header, and 64-bit floats: for each run of samples with the same names a
row per sample, which holds its time in seconds since the epoch, its step (NaN without one) and the values. So NaN and
infinity are preserved, and the notebook, which receives the samples of many ranks, needs no conversion.
"""

from __future__ import annotations

import json
import math
import struct
from array import array
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import numpy as np

    Sample = tuple[float, "int | None", Mapping[str, float]]  # time, step, values by name

NO_STEP = -(2**63)  # in an int64 column of steps: logged without a step
_LENGTH = struct.Struct("=I")
_BESIDE = 2  # numbers in a row beside the values


@dataclass(frozen=True, slots=True)
class Block:
    """Samples with the same names."""

    names: tuple[str, ...]
    data: memoryview  # the rows, one behind the other

    @property
    def matrix(self) -> np.ndarray:
        """The rows, (samples, 2 + names) float64: time, step or NaN, values."""
        import numpy as np  # noqa: PLC0415  (a rank and its nanny don't need it)

        return np.frombuffer(self.data, np.float64).reshape(-1, _BESIDE + len(self.names))


@dataclass(frozen=True, slots=True)
class Samples:
    """One message of a rank."""

    cell: int | None  # the number of the cell that logged them
    blocks: tuple[Block, ...]

    def rows(self) -> Iterator[Sample]:
        """Yield all samples in the order in which they were logged."""
        for block in self.blocks:
            numbers = array("d")
            numbers.frombytes(block.data)
            width = _BESIDE + len(block.names)
            for at in range(0, len(numbers), width):
                time_s, step, *values = numbers[at : at + width]
                yield time_s, None if math.isnan(step) else int(step), dict(zip(block.names, values, strict=True))


def pack(samples: Iterable[Sample], cell: int | None) -> bytes:
    """Return samples as bytes."""
    heads: list[dict[str, Any]] = []
    numbers = array("d")
    for names, run in groupby(samples, key=lambda sample: tuple(sample[2])):
        count = 0
        for time_s, step, values in run:
            numbers.extend((time_s, math.nan if step is None else step, *values.values()))
            count += 1
        heads.append({"names": names, "count": count})
    head = json.dumps({"cell": cell, "blocks": heads}).encode()
    head += b" " * (-(_LENGTH.size + len(head)) % numbers.itemsize)  # so that the numbers are aligned
    return _LENGTH.pack(len(head)) + head + numbers.tobytes()


def unpack(data: bytes) -> Samples:
    """Read what :func:`pack` made; the numbers are not copied.

    Raises a ValueError if it is something else.
    """
    view = memoryview(data)
    try:
        (length,) = _LENGTH.unpack_from(view)
        at = _LENGTH.size + length
        head = json.loads(bytes(view[_LENGTH.size : at]))
        blocks = []
        for each in head["blocks"]:
            names = tuple(each["names"])
            end = at + 8 * each["count"] * (_BESIDE + len(names))
            blocks.append(Block(names, view[at:end]))
            at = end
        if at != len(data):
            raise ValueError(f"it should have {at} bytes, and has {len(data)}")
        return Samples(head["cell"], tuple(blocks))
    except (struct.error, KeyError, TypeError) as error:
        raise ValueError(f"these bytes are not samples: {error!r}") from error
