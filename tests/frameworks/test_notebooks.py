"""The notebooks of the frameworks, executed as a user would; each checks its own result."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from ..integration.notebook.test_examples import CELL_TIMEOUT_S, EXAMPLES, code_cells, run, text_of

FOLDER = EXAMPLES / "frameworks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_notebook_reaches_its_result(name: str, tmp_path: Path) -> None:
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.outputs or cell.execution_count for cell in code_cells(notebook))
    # DeepSpeed compiles a part of itself: 45 s where nothing else runs, as long as the machine takes where others do.
    run(notebook, tmp_path, timeout_s=600 if name == "deepspeed" else CELL_TIMEOUT_S)
    text = "\n".join(text_of(cell) for cell in code_cells(notebook))
    assert "is the same on ranks 0-1" in text
