"""Values keep their content on the way between a rank and the notebook."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jupyter_disttrain.protocol import shared_memory
from jupyter_disttrain.protocol.serialization import dump_value, load_value
from jupyter_disttrain.protocol.shared_memory import fetch, lend
from jupyter_disttrain.rank.kernel.digests import digests


@pytest.mark.parametrize(
    "array",
    [np.empty((0, 3)), np.empty(0), np.asfortranarray(np.arange(12.0).reshape(3, 4)), np.array(5.0)],
    ids=["no rows", "empty", "columns first", "scalar"],
)
@pytest.mark.parametrize("threshold", [0, 1 << 20], ids=["shelf", "frames"])
def test_array_of_any_shape_is_transported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, array: Any, threshold: int
) -> None:
    monkeypatch.setattr(shared_memory, "THRESHOLD", threshold)
    pickled, buffers = dump_value([array, np.ones(3)])
    note, frames = lend(str(tmp_path), buffers)
    assert (note is None) == bool(threshold)
    received, ones = load_value(pickled, fetch(str(tmp_path), note, frames))
    np.testing.assert_array_equal(received, array)
    assert received.shape == array.shape
    assert ones.tolist() == [1, 1, 1]


def test_interrupted_copy_leaves_no_file_in_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shared_memory, "_write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        lend(str(tmp_path), [bytes(shared_memory.THRESHOLD)])
    assert not list(tmp_path.iterdir())


@dataclasses.dataclass
class Batch:
    """Holds an array in an object that is no container."""

    images: Any


def test_digest_of_a_value_with_any_content(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    with path.open("w") as file:  # has a method detach(), as tensors have
        batch, opened = digests([Batch(np.empty((0, 3))), file])
    assert batch["kind"] == "Batch"
    assert batch["digest"]
    assert opened["digest"] is None
