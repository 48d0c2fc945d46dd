"""Process-wide state of training libraries: a script sees none of the session's, and leaves none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain.errors import RankFailure

from .test_scripts import lines_of, write

if TYPE_CHECKING:
    from collections.abc import Iterator
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


# As DeepSpeed keeps it: module variables, some of them its own objects, and dictionaries that are filled in place.
COMM = """
class Logger:
    def __init__(self):
        self.enabled, self.calls = False, {}

cdb = None
comms_logger = Logger()

def init_distributed():
    global cdb
    cdb = object()
    comms_logger.enabled = True
    comms_logger.calls["init"] = comms_logger.calls.get("init", 0) + 1
"""
GROUPS = """
_EXPERT_PARALLEL_GROUP = {}
mpu = None
"""
DEEPSPEED = """
from deepspeed.comm import comm
from deepspeed.utils import groups
logger = comm.comms_logger
print(comm.cdb, logger.enabled, logger.calls, groups._EXPERT_PARALLEL_GROUP, groups.mpu)
comm.init_distributed()
groups._EXPERT_PARALLEL_GROUP["ep_size_2"] = groups.mpu = "the script's"
"""
BEGIN = "None False {} {} None\n"


@pytest.fixture
def like_deepspeed(cluster: Cluster, tmp_path: Path) -> Iterator[None]:
    """A library that keeps its state as DeepSpeed does, installed on the ranks."""
    site = tmp_path / "site-packages"
    for name, code in {"comm/comm": COMM, "utils/groups": GROUPS}.items():
        write(site, f"deepspeed/{name}.py", code)
        write(site, f"deepspeed/{name.split('/')[0]}/__init__.py", "")
    write(site, "deepspeed/__init__.py", "__version__ = '0.19.0'")
    cluster.run(f"import sys; sys.path.insert(0, {str(site)!r})")
    yield
    cluster.run(f"sys.path.remove({str(site)!r})\n{FORGET.replace('accelerate', 'deepspeed')}")


@pytest.mark.usefixtures("like_deepspeed")
def test_deepspeed_state_is_fresh_in_a_script(cluster: Cluster, folder: Path) -> None:
    script = write(folder, "train.py", DEEPSPEED)
    sample = (
        "from deepspeed.comm import comm; from deepspeed.utils import groups; "
        "comm.cdb, comm.comms_logger.calls, groups._EXPERT_PARALLEL_GROUP, groups.mpu"
    )
    for _ in range(2):
        assert cluster.scripts.run(script).stdout == {0: BEGIN, 1: BEGIN}
        assert cluster.run(sample).results == dict.fromkeys(range(2), (None, {}, {}, None))
    cluster.run(
        "comm.init_distributed(); ours = comm.cdb, comm.comms_logger; groups._EXPERT_PARALLEL_GROUP[1] = 'ours'"
    )
    assert cluster.scripts.run(script).stdout == {0: BEGIN, 1: BEGIN}
    found = "ours == (comm.cdb, comm.comms_logger), comm.comms_logger.calls, groups._EXPERT_PARALLEL_GROUP, groups.mpu"
    assert cluster.run(found).results == dict.fromkeys(range(2), (True, {"init": 1}, {1: "ours"}, None))
