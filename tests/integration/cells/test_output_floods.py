"""Large output: complete in the log, bounded on the screen, linear in cost."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ...support.notebook_driver import Notebook, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator


def run(notebook: Notebook, *lines: str, **options: Any) -> Outcome:
    return notebook.run("\n".join(["%%distributed", "import ctypes, os, subprocess, sys", *lines]), **options)


@pytest.fixture
def bounded_notebook(notebook: Notebook) -> Iterator[Notebook]:
    """A notebook that shows at most 100 lines."""
    notebook.run("%config DistributedMagics.max_output_lines = 100").check()
    yield notebook
    notebook.run("%config DistributedMagics.max_output_lines = 50_000").check()


def logs_of(outcome: Outcome) -> list[Path]:
    """Return the logs named by the line about hidden output."""
    found = re.search(r"everything is in (\S+)/rank\*\.log", outcome.text)
    assert found is not None, outcome.text[-3000:]
    return [Path(found[1]) / f"rank{rank}.log" for rank in (0, 1)]


def lines_of_all_ranks(outcome: Outcome) -> int:
    """Return how many lines are shown or counted; a line that several ranks printed counts once for each."""
    above, below = outcome.text.split("\n… ")
    hidden = int(below.split()[0].replace(",", ""))
    return hidden + sum(2 if line.startswith("ranks 0-1") else 1 for line in above.splitlines())


def test_ten_thousand_lines_of_each_rank(notebook: Notebook) -> None:
    outcome = run(notebook, "for i in range(10_000): print('line', i, 'of', rank)").check()
    for rank in (0, 1):
        own = [line for line in outcome.lines if line.startswith(f"rank {rank} │")]
        assert own == [f"rank {rank} │ line {i} of {rank}" for i in range(10_000)]
    assert len(outcome.lines) == 20_000


def test_last_lines_are_shown_beyond_the_limit_and_the_log_has_all(bounded_notebook: Notebook) -> None:
    outcome = run(bounded_notebook, "print('begin of bound')", "for i in range(5000): print('number', i)").check()
    shown = outcome.lines
    assert [line.split(" │ ")[1] for line in shown[:100]] == ["begin of bound", *(f"number {i}" for i in range(99))]
    assert lines_of_all_ranks(outcome) == 2 * 5001
    note = r"… 9,8\d\d more lines \(\d+\.\d kB\); everything is in \S+/rank\*\.log; the last ones:"
    assert re.fullmatch(note, shown[100])
    assert shown[101:] == [f"ranks 0-1 │ number {i}" for i in range(4990, 5000)]
    for log in logs_of(outcome):
        expected = "begin of bound\n" + "".join(f"number {i}\n" for i in range(5000))
        assert log.read_bytes().endswith(expected.encode())
        assert log.stat().st_mode & 0o777 == 0o600


def test_large_output_of_a_child_process_is_complete_in_the_log(bounded_notebook: Notebook) -> None:
    outcome = run(bounded_notebook, "_ = subprocess.run(['seq', '1000000'])", "print('after the flood')").check()
    assert outcome.lines[-1] == "ranks 0-1 │ after the flood"
    expected = subprocess.run(["seq", "1000000"], capture_output=True, check=True).stdout + b"after the flood\n"
    for log in logs_of(outcome):
        assert log.read_bytes().endswith(expected)


def test_output_beyond_the_rank_limit_is_counted_and_in_the_log(notebook: Notebook) -> None:
    outcome = run(notebook, "line = 'y' * 99_999", "for i in range(400): print(line)", "print('the last line')").check()
    assert outcome.lines[-1] == "ranks 0-1 │ the last line"
    assert lines_of_all_ranks(outcome) == 2 * 401
    for log in logs_of(outcome):
        assert log.read_bytes().endswith((b"y" * 99_999 + b"\n") * 400 + b"the last line\n")


def test_displays_and_results_are_in_the_log_as_text(bounded_notebook: Notebook) -> None:
    outcome = run(
        bounded_notebook,
        "from IPython.display import HTML, display",
        "class Table:",
        "    def _repr_html_(self): return '<b>1</b>'",
        "    def __repr__(self): return 'a table as text'",
        "for i in range(200): print('number', i)",
        "print('before'); display(Table()); print('between')",
        "{'result': rank}",
    ).check()
    for rank, log in enumerate(logs_of(outcome)):
        text = log.read_bytes().decode(errors="replace")  # an earlier test prints undecodable bytes
        assert text.endswith(f"before\na table as text\nbetween\n{{'result': {rank}}}\n")


def test_c_code_that_holds_the_gil_does_not_block(bounded_notebook: Notebook) -> None:
    text = "text = b'three megabytes of this\\n' * 131_072"
    outcome = run(bounded_notebook, text, "_ = ctypes.PyDLL(None).printf(b'%s', text)", "print('went on')").check()
    assert outcome.lines[-1] == "ranks 0-1 │ went on"
    assert outcome.lines[0] == "ranks 0-1 │ three megabytes of this"
    assert lines_of_all_ranks(outcome) == 2 * 131_073


def test_cost_is_linear_in_the_output(notebook: Notebook) -> None:
    def cost(lines: int) -> tuple[int, int]:
        sizes: list[int] = []
        run(
            notebook,
            f"for i in range({lines}): print('step', i, 'rank', rank, flush=True)",
            on_message=lambda message, _: sizes.append(len(json.dumps(message["content"]))),
        ).check()
        return len(sizes), sum(sizes)

    (messages, size), (messages_of_4, size_of_4) = cost(2000), cost(8000)
    assert messages_of_4 < 6 * messages + 20
    assert size_of_4 < 6 * size + 1_000_000
    assert size_of_4 < 5 * 16_000 * len("rank 0    │ step 1000 rank 0 with its colours")


@pytest.fixture
def full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for logs with room for 64 kB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"root may not mount here: {mounted.stderr.decode()}")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(disk))
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_full_disk_affects_only_the_log(full_disk: Path) -> None:
    with Notebook() as notebook:
        notebook.run("%dist_init -n 2 --launcher local --backend none").check()
        outcome = run(notebook, "if rank == 1:", "    for i in range(20_000): print('line', i)").check()
        shown = [line for line in outcome.lines if line.startswith("rank 1 │")]
        assert shown == [f"rank 1 │ line {i}" for i in range(20_000)]
        (note,) = [line for line in outcome.lines if "can't write its log" in line]
        assert re.fullmatch(
            rf"rank 1 on \S+ can't write its log {full_disk}/\S+/rank1\.log: No space left on device; "
            r"its output is still shown here; free the disk, then %dist_reset",
            note,
        )
        assert run(notebook, "print('on', rank)").check().lines[:2] == ["rank 0 │ on 0", "rank 1 │ on 1"]
        assert run(notebook, "print('said once')").check().lines == ["ranks 0-1 │ said once"]
        notebook.run("%dist_shutdown").check()
