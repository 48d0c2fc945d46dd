"""Training libraries in scripts: their state is the script's own, and they find no notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain.errors import RankFailure

from .test_scripts import lines_of, write

if TYPE_CHECKING:
    from pathlib import Path

    from jupyter_disttrain import Cluster

ACCELERATE = """
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState, GradientState, PartialState
states = PartialState, AcceleratorState, GradientState
before = [len(state._shared_state) for state in states]
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=3)
get_logger("train").warning_once("once", main_process_only=False)
print(before, accelerator.num_processes, accelerator.gradient_accumulation_steps)
"""
FORGET = (
    "import sys\nfor name in [each for each in sys.modules if each.startswith('accelerate')]: del sys.modules[name]"
)
DEVICE_PROBE = """
from accelerate.state import AcceleratorState, GradientState, PartialState
[*map(len, (PartialState._shared_state, AcceleratorState._shared_state, GradientState._shared_state))] == [0, 0, 0]
"""


def test_every_script_initializes_accelerate_itself(cluster: Cluster, folder: Path) -> None:
    pytest.importorskip("accelerate")
    script = write(folder, "train.py", ACCELERATE)
    cluster.run(FORGET)
    for _ in range(2):
        run = cluster.scripts.run(script)
        assert run.stdout == dict.fromkeys(range(2), "[0, 0, 0] 2 3\n")
        assert all("once" in text for text in run.stderr.values()), "as in a new process"
        assert cluster.run(DEVICE_PROBE).results == {0: True, 1: True}


def test_session_accelerator_is_unchanged_after_a_script(cluster: Cluster, folder: Path) -> None:
    pytest.importorskip("accelerate")
    script = write(folder, "train.py", ACCELERATE)
    cluster.run("from accelerate import Accelerator; from accelerate.state import AcceleratorState")
    cluster.run("accelerator = Accelerator(gradient_accumulation_steps=5)")
    sample = (
        "accelerator.mixed_precision, accelerator.gradient_accumulation_steps, accelerator.num_processes, "
        "AcceleratorState().__dict__ is accelerator.state.__dict__"
    )
    expected = dict.fromkeys(range(2), ("no", 5, 2, True))
    assert cluster.run(sample).results == expected
    try:
        assert lines_of(cluster.scripts.run(script))[0] == ["[0, 0, 0] 2 3"]
        assert cluster.run(sample).results == expected
        with pytest.raises(RankFailure, match="boom"):
            cluster.scripts.run(write(folder, "fails.py", ACCELERATE + "raise RuntimeError('boom')"))
        assert cluster.run(sample).results == expected
    finally:
        cluster.run("accelerator.free_memory(); accelerator.state._reset_state(reset_partial_state=True)")
        cluster.run("from accelerate.state import GradientState; GradientState._reset_state()")


def test_tqdm_finds_no_notebook(cluster: Cluster, folder: Path) -> None:
    pytest.importorskip("tqdm")
    code = "import tqdm.autonotebook as auto, tqdm\nprint(auto.tqdm is tqdm.tqdm)"
    assert cluster.scripts.run(write(folder, "bars.py", code)).stdout == {0: "True\n", 1: "True\n"}
