"""Completion and inspection know the ranks' variables, and leave these and the ranks alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ....support.process_tools import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jupyter_disttrain import Cluster

    from ....support.notebook_driver import Notebook

OBJECTS = """
import torch
calls = []
class Traps:
    plain = 1
    @property
    def value(self):
        calls.append("property")
        dist.barrier()
    def __getattr__(self, name):
        calls.append(name)
        raise AttributeError(name)
    def __dir__(self):
        calls.append("dir")
        return []
    def __repr__(self):
        calls.append("repr")
        return "traps"
traps = Traps()
weights = torch.arange(6.0).reshape(2, 3) + rank
model = torch.nn.Sequential(torch.nn.Linear(2, 3))
if rank == 1:
    only_on_one = 1
elif rank == 0:
    only_on_zero = 1
del calls[:]
"""
COUNTS = "get_ipython().kernel._request_handler.counts()['collectives']"


@pytest.fixture
def objects(three: Cluster) -> Iterator[Cluster]:
    """Ranks with variables, which are as before after the test, and have called no collective for it."""
    three.run(OBJECTS)
    counts = three.run(COUNTS).results
    yield three
    assert three.run(f"calls, float(weights.sum()) - 6 * rank, {COUNTS}").results == {
        rank: ([], 15.0, counts[rank]) for rank in range(3)
    }


def texts(cluster: Cluster, code: str, ranks: Any = (0, 1, 2)) -> dict[str, str]:
    return dict(cluster.introspection.complete(code, len(code), ranks).matches)


def test_names_are_completed_with_the_ranks_that_have_them(objects: Cluster) -> None:
    assert texts(objects, "wei") == {"weights": "instance"}
    assert texts(objects, "only_") == {
        "only_on_zero": "instance, only rank 0",
        "only_on_one": "instance, only rank 1",
    }
    assert not [text for text in texts(objects, "print(") if text.startswith("_")]
    assert texts(objects, "only_", [1]) == {"only_on_one": "instance"}
    assert texts(objects, "only_", [2]) == {}
    assert texts(objects, "model[0].weight.requires_g")["requires_grad"] == "property"


def test_nothing_is_evaluated(objects: Cluster) -> None:
    assert {"plain", "value"} <= texts(objects, "traps.").keys()
    assert texts(objects, "traps.value.") == {}
    for code in ("traps", "traps.value", "weights", "model"):
        found = objects.introspection.inspect(code, len(code), (0, 1, 2), with_source=True)
        assert "Type" in found or code == "traps.value"


@pytest.mark.parametrize(
    "code",
    ["while not ended: pass", "dist.barrier() if rank != 2 else wait_for_the_end()", "wait_for_the_end()"],
    ids=["loop", "collective", "sleep"],
)
def test_ranks_reply_while_they_run_a_cell(objects: Cluster, code: str) -> None:
    objects.run("import time\nended = []\ndef wait_for_the_end():\n    while not ended: time.sleep(0.01)")
    begin = "import threading; begun = threading.Event(); threading.Timer(0, begun.set).start(); begun.wait()\n"
    run = objects.run(begin + code, block=False)
    assert wait_until(lambda: "begun" in texts(objects, "beg"))
    assert wait_until(lambda: texts(objects, "wei") == {"weights": "instance"})
    assert wait_until(lambda: objects.introspection.inspect("weights", 7, (0, 1, 2)).get("Shape") == "(2, 3)")
    assert not run.done
    objects.interrupt()
    with pytest.raises(BaseException, match="KeyboardInterrupt"):
        run.wait()


def test_nothing_is_returned_while_a_rank_can_not_reply(three: Cluster) -> None:
    run = three.run("import ctypes; ctypes.PyDLL(None).usleep(3_000_000)", block=False)
    assert wait_until(lambda: texts(three, "thr") == {} and not run.done)
    assert three.introspection.inspect("rank", 4, (0, 1, 2)) == {}
    run.wait()
    assert texts(three, "worl") == {"world_size": "instance"}


def test_differences_between_ranks_are_shown(objects: Cluster) -> None:
    objects.run("kind = rank if rank < 2 else 'text'\nif rank == 0: alone = 1")
    found = objects.introspection.inspect("kind", 4, (0, 1, 2))
    assert (found["Type"], found["Value"]) == ("int", "0")
    assert found["Ranks"].splitlines() == ["rank 1: Value 1", "rank 2: Type str, Value 'text', Length 4"]
    assert objects.introspection.inspect("alone", 5, (0, 1, 2))["Ranks"] == "ranks 1-2: not defined"
    assert "Ranks" not in objects.introspection.inspect("weights", 7, (0, 1, 2))
    assert objects.introspection.inspect("no_such_name", 12, (0, 1, 2)) == {}


def test_requests_leave_no_thread(three: Cluster) -> None:
    code = "import threading; names = [each.name for each in threading.enumerate()]; 'disttrain completion' in names"
    for text in ("open('/", "import tor"):
        assert wait_until(lambda text=text: texts(three, text))
    assert wait_until(lambda: three.run(code, 0).results == {0: False})


def test_variables_are_listed_while_ranks_run(objects: Cluster) -> None:
    objects.run("import time\nended = []")
    run = objects.run("while not ended: time.sleep(0.01)", block=False)
    table = objects.introspection.variables()
    found = {(each.name, each.ranks): each for each in table.variables}
    assert (table.ranks, table.silent) == ((0, 1, 2), ())
    assert found["weights", (0, 1, 2)].size_bytes == 24
    assert found["weights", (0, 1, 2)].properties["Shape"] == "(2, 3)"
    assert found["only_on_one", (1,)].properties["Value"] == "1"
    assert found["traps", (0, 1, 2)].properties == {"Type": "__main__.Traps"}
    objects.interrupt()
    with pytest.raises(BaseException, match="KeyboardInterrupt"):
        run.wait()


def test_dtensor_is_described_without_a_collective(three: Cluster) -> None:
    three.run(
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.tensor import Shard, distribute_tensor\n"
        "mesh = init_device_mesh(device.type, (world_size,))\n"
        "sharded = distribute_tensor(torch.ones(7, 2), mesh, [Shard(0)])"
    )
    counts = three.run(COUNTS).results
    found = three.introspection.inspect("sharded", 7, (0, 1, 2))
    assert three.run(COUNTS).results == counts
    assert (found["Shape"], found["Placements"], found["Local shape"]) == ("(7, 2)", "(Shard(0))", "(3, 2)")
    assert found["Ranks"].splitlines() == ["rank 2: Local shape (1, 2)"]


def test_magic_lists_variables(notebook: Notebook) -> None:
    notebook.run("%%distributed\nof_ranks = torch.ones(5) * rank\nepoch = rank").check()
    lines = notebook.run("%dist_whos of_* epoch").check().lines
    assert lines[0].split() == ["name", "type", "value", "size", "ranks"]
    assert [line.split()[0] for line in lines[1:]] == ["epoch", "epoch", "of_ranks"]
    assert lines[3].split() == ["of_ranks", "Tensor", "(5,)", "float32", "cpu", "20", "B"]
    assert notebook.run("%dist_whos -r 1 epoch").check().lines[1].split() == ["epoch", "int", "1"]


def complete(notebook: Notebook, code: str, cursor: int | None = None) -> dict[str, Any]:
    reply: dict[str, Any] = notebook.client.complete(code, cursor, reply=True, timeout=30)["content"]
    return reply


def inspect(notebook: Notebook, code: str, cursor: int | None = None, level: int = 0) -> dict[str, Any]:
    reply: dict[str, Any] = notebook.client.inspect(code, cursor, level, reply=True, timeout=30)["content"]
    return reply


def test_kernel_completes_cells_for_ranks(notebook: Notebook) -> None:
    notebook.run("%%distributed\nof_ranks = [rank]\ndef train(epochs, lr=0.1): 'Train.'").check()
    notebook.run("of_notebook = 1").check()
    for magic in ("%%distributed\n", "%%rank 1\n", "%%rank[0-1]\n", "\n%%distributed --timeout 5\n"):
        reply = complete(notebook, f"{magic}of_")
        assert reply["matches"] == ["of_ranks"], magic
        assert (reply["cursor_start"], reply["cursor_end"]) == (len(magic), len(magic) + 3)
    assert complete(notebook, "%%distributed\ntrain(")["matches"][:2] == ["epochs=", "lr="]
    assert complete(notebook, "of_")["matches"] == ["of_notebook"]
    assert "--timeout" in complete(notebook, "%%distributed --ti")["matches"]
    found = inspect(notebook, "%%distributed\ntrain(1")
    assert found["found"]
    assert "train(epochs, lr=0.1)" in found["data"]["text/plain"]
    assert "Train." in found["data"]["text/plain"]
    assert "def train" in inspect(notebook, "%%distributed\ntrain", level=1)["data"]["text/plain"]
    assert not inspect(notebook, "%%distributed\nof_notebook")["found"]
    assert inspect(notebook, "of_notebook")["found"]


def test_kernel_completes_every_cell_after_dist_mode(notebook: Notebook) -> None:
    notebook.run("%%distributed\nof_ranks = 1").check()
    notebook.run("of_notebook = 1").check()
    notebook.run("%dist_mode -e").check()
    try:
        assert complete(notebook, "of_")["matches"] == ["of_ranks"]
        assert complete(notebook, "%%local\nof_")["matches"] == ["of_notebook"]
        assert inspect(notebook, "of_ranks")["found"]
    finally:
        notebook.run("%dist_mode -d").check()
    assert complete(notebook, "of_")["matches"] == ["of_notebook"]


def test_kernel_completes_while_ranks_run(notebook: Notebook) -> None:
    notebook.run("%%distributed --noblock\nimport time\nended = False\nwhile not ended: time.sleep(0.01)").check()
    try:
        assert wait_until(lambda: complete(notebook, "%%distributed\nende")["matches"] == ["ended"])
    finally:
        notebook.run("%dist_interrupt").check()
        notebook.run("%dist_wait")


def test_unloading_restores_completion(bare_notebook: Notebook) -> None:
    bare_notebook.run("%unload_ext jupyter_disttrain").check()
    bare_notebook.run("of_notebook = 1").check()
    assert complete(bare_notebook, "of_")["matches"] == ["of_notebook"]
    assert inspect(bare_notebook, "of_notebook")["found"]
