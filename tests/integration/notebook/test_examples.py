"""The example notebooks, executed in a real kernel, with their output read as a user would.

Covers: the figures and labels that each notebook shows; that the first runs again in the same session.
Does not cover: how it looks in JupyterLab.

Each runs as a copy, from the parent folder or from its own; either way it saves its files beside the copy.
"""

from __future__ import annotations

import asyncio
import copy
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from jupyter_disttrain.notebook.output.renderer import RANKS_MIME

from ...support.notebook_driver import plain

EXAMPLES = Path(__file__).parents[3] / "examples"
NAMES = ("first_steps", "ddp_digits", "model_parallel")
CELL_TIMEOUT_S = 90
LABELLED = re.compile(r"(?P<label>ranks? [\d,-]+|) *[│┃] (?P<text>.*)")
PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, slots=True)
class Executed:
    """A notebook that ran, and its folder."""

    folder: Path
    notebook: nbformat.NotebookNode
    again: nbformat.NotebookNode  # the same cells, run once more in the same session; none if not requested

    def lines(self, cell_id: str) -> list[str]:
        """Return a cell's visible lines, each label followed by one blank."""
        cell = next(cell for cell in self.notebook.cells if cell.id == cell_id)
        return [re.sub(r" +([│┃]) ", r" \1 ", line) for line in text_of(cell).splitlines()]

    def number(self, pattern: str, cell_id: str) -> float:
        """Return the only number that the cell shows in this way."""
        found = re.findall(pattern, "\n".join(self.lines(cell_id)))
        assert len(found) == 1, self.lines(cell_id)
        return float(found[0])


@pytest.fixture(scope="module")
def first_steps(tmp_path_factory: pytest.TempPathFactory) -> Executed:
    return execute("first_steps", tmp_path_factory.mktemp("first_steps"), twice=True)


@pytest.fixture(scope="module")
def ddp_digits(tmp_path_factory: pytest.TempPathFactory) -> Executed:
    return execute("ddp_digits", tmp_path_factory.mktemp("ddp_digits"), from_above=True)


@pytest.fixture(scope="module")
def model_parallel(tmp_path_factory: pytest.TempPathFactory) -> Executed:
    return execute("model_parallel", tmp_path_factory.mktemp("model_parallel"))


@pytest.fixture(params=NAMES)
def executed(request: pytest.FixtureRequest) -> Executed:
    """Each of the notebooks."""
    return request.getfixturevalue(request.param)


def test_every_cell_ran_and_only_the_tagged_one_failed(executed: Executed) -> None:
    for cell in code_cells(executed.notebook):
        failed = any(output.output_type == "error" for output in cell.outputs)
        assert failed == ("raises-exception" in cell.metadata.get("tags", ())), text_of(cell)
        assert cell.execution_count


def test_every_line_of_a_cell_on_all_ranks_is_labelled_and_none_is_repeated(executed: Executed) -> None:
    labelled = 0
    for cell in code_cells(executed.notebook):
        if not cell.source.startswith("%%distributed") or "raises-exception" in cell.metadata.get("tags", ()):
            continue
        lines = [LABELLED.fullmatch(line) for line in text_of(cell).splitlines()]
        assert None not in lines, text_of(cell)
        texts = [line["text"] for line in lines if line]
        assert len(texts) == len(set(texts)), text_of(cell)
        labelled += len(texts)
    assert labelled >= 5


def test_first_steps_merges_equal_output(first_steps: Executed) -> None:
    who = first_steps.lines("who")
    assert re.fullmatch(r"ranks 0-1 │ PyTorch [\d.]+\S*, gloo, 2 ranks", who[0])
    assert [re.sub(r"\d+$", "…", line) for line in sorted(who[1:])] == [
        "rank 0 │ rank 0 runs on cpu in process …",
        "rank 1 │ rank 1 runs on cpu in process …",
    ]
    assert first_steps.lines("tensor") == ["rank 0 │ tensor([0, 1, 2])", "rank 1 │ tensor([10, 11, 12])"]
    assert first_steps.lines("all-reduce") == ["ranks 0-1 │ tensor([10, 12, 14])"]


def test_first_steps_moves_values(first_steps: Executed) -> None:
    assert first_steps.number(r"pi is about (3\.\d+)", "out-used") == pytest.approx(3.14, abs=0.01)
    assert first_steps.lines("pull") == ["{0: 0.1, 1: 0.05}"]
    assert first_steps.lines("python") == ["{0: 3, 1: 3}"]


def test_first_steps_shows_an_error_once_and_continues(first_steps: Executed) -> None:
    lines = first_steps.lines("error")
    assert lines[0].startswith("ranks 0-1 (")
    assert sum(line.startswith("RuntimeError: mat1 and mat2") for line in lines) == 1
    assert first_steps.lines("after-error") == ["ranks 0-1 │ x is still [10, 12, 14]"]


def test_first_steps_shows_the_plot_of_a_rank(first_steps: Executed) -> None:
    cell = next(cell for cell in first_steps.notebook.cells if cell.id == "plot")
    assert [output for output in cell.outputs if "image/png" in output.get("data", {})]


def test_ddp_digits_reaches_its_accuracy(ddp_digits: Executed) -> None:
    assert ddp_digits.number(r"test accuracy: (\d+\.\d) %", "test") >= 97


def test_ddp_digits_has_the_loss_of_one_process(ddp_digits: Executed) -> None:
    assert ddp_digits.lines("one") == ["330 steps with batches of 64"]
    assert ddp_digits.number(r"largest difference over 330 steps: (\S+)", "compare") <= 1e-5


def test_ddp_digits_saves_its_plot_beside_itself_and_shows_it(ddp_digits: Executed) -> None:
    assert (ddp_digits.folder / "output" / "ddp_digits_loss.png").read_bytes().startswith(PNG)
    cell = next(cell for cell in ddp_digits.notebook.cells if cell.id == "plot")
    assert "image/png" in cell.outputs[-1].data


@pytest.mark.parametrize(
    ("cell", "shards"),
    [
        ("tensor-parallel", ["(128, 64)", "(128,)", "(10, 128)", "(10,)"]),
        ("fsdp", ["(128, 64)", "(128,)", "(5, 256)", "(5,)"]),
    ],
)
def test_model_parallel_ends_with_the_weights_of_the_whole_model(
    model_parallel: Executed, cell: str, shards: list[str]
) -> None:
    assert [re.findall(r"local (\([\d, ]+\))", line)[0] for line in model_parallel.lines(cell)] == shards
    assert (
        model_parallel.number(r"a weight moved by up to (\S+)", "alone") >= 0.01
    )  # otherwise equal weights would prove nothing
    assert model_parallel.number(r"largest difference to the whole model (\S+)", f"{cell}-check") <= 1e-6


def test_first_steps_run_again_in_the_same_session(first_steps: Executed) -> None:
    assert code_cells(first_steps.again)
    test_every_cell_ran_and_only_the_tagged_one_failed(
        Executed(first_steps.folder, first_steps.again, first_steps.again)
    )


@pytest.mark.parametrize("name", NAMES)
def test_notebook_is_stored_without_outputs(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    assert not any(cell.outputs or cell.execution_count for cell in code_cells(notebook))


def execute(name: str, above: Path, *, from_above: bool = False, twice: bool = False) -> Executed:
    folder = above / "examples"
    folder.mkdir()
    shutil.copy(EXAMPLES / f"{name}.ipynb", folder)
    notebook = read(name)
    again = copy.deepcopy(notebook)
    again.cells = again.cells if twice else []
    for cell in again.cells:
        cell.id += "-again"
    both = copy.copy(notebook)
    both.cells = notebook.cells + again.cells
    run(both, above if from_above else folder)
    return Executed(folder, notebook, again)


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)


def run(notebook: nbformat.NotebookNode, folder: Path, timeout_s: float = CELL_TIMEOUT_S) -> None:
    """Execute a notebook in a kernel that starts in ``folder``; a cell that fails is an error, unless it is tagged."""
    client = NotebookClient(notebook, timeout=timeout_s, resources={"metadata": {"path": str(folder)}})
    asyncio.run(client.async_execute())  # its own execute() leaves an event loop open


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(cell: nbformat.NotebookNode) -> str:
    """Return the visible text below a cell, without colours."""
    parts = []
    for output in cell.outputs:
        if output.output_type == "stream":
            parts.append(output.text)
        elif output.output_type == "error":
            parts.append("\n".join(output.traceback))
        elif set(output.data) <= {"text/plain", RANKS_MIME}:
            parts.append(output.data["text/plain"])
    return plain("\n".join(part.rstrip("\n") for part in parts if part))
