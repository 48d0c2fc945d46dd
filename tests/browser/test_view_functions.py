"""What the view computes before it draws: axes, log lines, filters, orders, common curves; run by Node.js."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BUILT = Path(__file__).parents[2] / "labextension" / "lib" / "view"


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that evaluates an expression with the modules' functions in scope."""
    node = shutil.which("node")
    if node is None or not (BUILT / "scales.js").exists():
        pytest.skip("the JupyterLab extension was not built here; run 'make labextension'")
    folder = tmp_path_factory.mktemp("view")
    names = ("scales", "terminal", "order", "series")
    for name in names:
        (folder / f"{name}.mjs").write_bytes((BUILT / f"{name}.js").read_bytes())
    imports = "".join(f"import * as {name} from './{name}.mjs';" for name in names)

    def evaluate(expression: str) -> Any:
        script = f"{imports} console.log(JSON.stringify({expression}))"
        command = [node, "--input-type=module", "--eval", script]
        return json.loads(subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout)

    return evaluate


def test_axes_do_not_magnify_noise_and_count_time_back(view: Any) -> None:
    low, high = view("scales.rangeOf('bytes', 0.2446, 0.2448)")
    assert high - low > 0.02
    assert view("scales.rangeOf('percent', 3, 4)") == [0, 100]
    assert view("scales.rangeOf('rate', 38, 39)")[0] == 0
    assert view("scales.rangeOf('metric', 0, 0)") == [0, 1]
    low, high = view("scales.rangeOf('metric', 2.3025, 2.3026)")
    assert low < 2.29
    assert high > 2.31
    assert view("scales.rangeOf('metric', -5, 5)")[0] < -5
    assert view("scales.secondsBetween(99.5, 100)") == [90, 100]
    assert view("scales.ticksBefore(1000, 900, 1000, 4)") == [910, 940, 970, 1000]
    labels = view("[0, 30, 60, 90, 300, 3600, 5400, 7200].map(scales.before)")
    assert labels == ["now", "-30 s", "-1 min", "-90 s", "-5 min", "-1 h", "-90 min", "-2 h"]


def test_bytes_are_drawn_in_the_unit_of_the_largest(view: Any) -> None:
    units = view("[46 * 2 ** 20, 2 ** 30 - 1, 2 ** 30, 80 * 2 ** 30].map(most => scales.unitOf(most).name)")
    assert units == ["MiB", "MiB", "GiB", "GiB"]


def test_log_is_rendered_as_in_a_terminal(view: Any) -> None:
    parts = [
        {"stream": "stderr", "text": "\r  0%|   |\r 50%|## |"},
        {"stream": "stdout", "text": "epoch 1\n\x1b[31mred\x1b[0m and "},
        {"stream": "stderr", "text": "\r100%|###|\n"},
        {"stream": "stdout", "text": "more\nab\bc\n"},
        # Two bars, as tqdm draws them: down, back up, over the first.
        {"stream": "stderr", "text": "outer 0\ninner 0\x1b[A\router 1\n\x1b[Kend\n"},
    ]
    lines = view(f"terminal.linesOf({json.dumps(parts)})")
    assert [(line["text"], line["isError"]) for line in lines] == [
        ("100%|###|", True),
        ("epoch 1", False),
        ("red and more", False),
        ("ac", False),
        ("outer 1", True),
        ("end", True),
    ]
    far = [{"stream": "stdout", "text": "a\x1b[100000Bb\nc"}]  # as for undecodable bytes
    assert len(view(f"terminal.linesOf({json.dumps(far)})")) == 3


def test_ranks_are_filtered_by_number_state_and_host_and_sorted_by_figures(view: Any) -> None:
    ranks = [
        {"rank": 0, "state": "running", "text": "running", "host": "node1", "device": "cuda:0", "steps_per_s": 9},
        {"rank": 1, "state": "in collective", "text": "in all_reduce for 3 s", "host": "node1", "device": "cuda:1"},
        {"rank": 12, "state": "dead", "text": "dead", "host": "node2", "device": "cuda:0", "steps_per_s": 2},
    ]

    def passing(text: str) -> list[int]:
        chosen = f"{json.dumps(ranks)}.filter(rank => order.passes(rank, {json.dumps(text)}))"
        return [rank["rank"] for rank in view(chosen)]

    assert passing("") == [0, 1, 12]
    assert passing("0-1,7") == [0, 1]
    assert passing("12") == passing("DEAD") == passing("node2 cuda:0") == [12]
    assert passing("in collective") == passing("all_reduce") == [1]
    assert passing("node1 dead") == []
    assert [rank["rank"] for rank in view(f"order.sorted({json.dumps(ranks)}, 'slowest')")] == [12, 0, 1]


def test_curves_equal_on_all_ranks_are_one(view: Any) -> None:
    assert view("series.commonOf([[1, 2, 3, null], [1, 2, 3, 4]])") == [1, 2, 3, 4]
    assert view("series.commonOf([[1, 2, 3], [1, 2, 4]])") is None
    assert view("series.commonOf([[1, null, null, null], [1, 2, 3, 4]])") is None
    assert view("series.commonOf([[null, null], [1, 2]])") is None
