"""Execute examples/ddp_digits.ipynb without a browser and print its results.

Covers: ``make demo``. The executed notebook goes to examples/output/; its accuracy and its plot must be there, or the
exit status is 1.
Does not cover: installing (scripts/install.sh).
"""
# ruff: noqa: INP001, T201  (a script: it prints, and is not imported)

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
OUTPUT = EXAMPLES / "output"
NOTEBOOK = EXAMPLES / "ddp_digits.ipynb"
EXECUTED = OUTPUT / "ddp_digits.ipynb"
PLOT = OUTPUT / "ddp_digits_loss.png"
ACCURACY = re.compile(r"test accuracy: *(\d+(?:\.\d+)?) *%")
CELL_TIMEOUT_S = 600


def execute() -> nbformat.NotebookNode:
    """Run the notebook in its own folder, as JupyterLab does, and keep its outputs, also when a cell fails."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        resources={"metadata": {"path": str(EXAMPLES)}},
        extra_arguments=["--IPKernelApp.log_level=ERROR"],  # or it warns that loopback is not encrypted
    )
    try:
        client.execute()
    finally:
        nbformat.write(notebook, EXECUTED)
    return notebook


def find_accuracy(notebook: nbformat.NotebookNode) -> float | None:
    """Return the last accuracy that the notebook printed, in percent, or None where it printed none."""
    found = [match for text in output_texts(notebook) for match in ACCURACY.findall(text)]
    return float(found[-1]) if found else None


def output_texts(notebook: nbformat.NotebookNode) -> list[str]:
    """Return the text of every output: of streams, and the plain form of displays and results."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]


def main() -> int:
    """Execute the notebook and print accuracy, plot and time."""
    OUTPUT.mkdir(exist_ok=True)
    PLOT.unlink(missing_ok=True)  # else a plot of an earlier run would be taken for this one's
    shown = {path: path.relative_to(EXAMPLES.parent) for path in (NOTEBOOK, EXECUTED, PLOT)}
    print(f"Executing {shown[NOTEBOOK]}", flush=True)
    started = time.monotonic()
    try:
        notebook = execute()
    except CellExecutionError as failure:
        print(f"{failure}\nA cell failed; the notebook up to there is {shown[EXECUTED]}.", file=sys.stderr)
        return 1
    accuracy = find_accuracy(notebook)
    if accuracy is None:
        print(f"{shown[EXECUTED]} has no line 'test accuracy: ... %'.", file=sys.stderr)
        return 1
    if not PLOT.is_file():
        print(f"The notebook saved no {shown[PLOT]}.", file=sys.stderr)
        return 1
    print(f"test accuracy: {accuracy} %\nloss plot: {shown[PLOT]}\nnotebook: {shown[EXECUTED]}")
    print(f"time: {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
