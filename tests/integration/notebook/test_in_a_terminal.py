"""IPython in a terminal shows a cell while it runs, as a notebook does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pexpect
import pytest

from ...support.notebook_driver import plain

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WAIT_S = 90
BLOCKS = """%%distributed
import sys, time
from pathlib import Path
print("alike")
print("own", rank)
sys.stderr.write(f"\\r{rank}0 percent"); sys.stderr.flush()
while not Path(GO).exists(): time.sleep(0.01)
for line in range(60): print("many", line)
print("last")
"""
HANGS = """%%distributed
x = torch.ones(1)
if rank == 0: dist.all_reduce(x)
else: import time; time.sleep(1000)
"""


def enter(terminal: pexpect.spawn[str], source: str) -> None:
    """Type a cell, as one paste."""
    terminal.send(f"\x1b[200~{source.strip()}\x1b[201~")
    terminal.send("\x1b\r")  # runs a cell of several lines


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "IPYTHONDIR": str(tmp_path / "ipython"), "TERM": "xterm"}


@pytest.fixture
def terminal(environment: dict[str, str]) -> Iterator[pexpect.spawn[str]]:
    arguments = ["-m", "IPython", "--no-banner", "--colors=NoColor", "--no-confirm-exit", "--ext=jupyter_disttrain"]
    terminal = pexpect.spawn(
        sys.executable, arguments, env=environment, encoding="utf-8", timeout=WAIT_S, dimensions=(30, 100)
    )
    yield terminal
    terminal.close(force=True)


def test_lines_bars_and_a_hang_are_shown_while_the_cell_runs(terminal: pexpect.spawn[str], tmp_path: Path) -> None:
    terminal.expect("In \\[1\\]")
    enter(terminal, "%dist_init -n 2 --launcher local --hang-after 1")
    for text in ("starting 2 ranks", "starting: 2 ranks, forming the process group", "ranks 0-1 ready in "):
        terminal.expect_exact(f"\r\x1b[K{text}")  # on one line
    terminal.expect("gloo\r\n")
    terminal.expect("In \\[2\\]")
    go = tmp_path / "go"
    enter(terminal, BLOCKS.replace("GO", repr(str(go))))
    terminal.expect("alike")
    terminal.expect("00 percent")
    terminal.expect("10 percent")
    terminal.expect("ranks 0-1 running")
    go.touch()
    terminal.expect("last")
    terminal.expect("In \\[3\\]")
    enter(terminal, HANGS)
    terminal.expect("rank 0: waits in all_reduce")
    terminal.sendintr()
    terminal.expect("KeyboardInterrupt")
    terminal.expect("In \\[4\\]")
    enter(terminal, "%dist_shutdown")
    terminal.expect("ranks 0-1 ended")
    terminal.sendline("exit")
    terminal.expect(pexpect.EOF)


def test_output_to_a_file_has_lines_and_no_control_characters(environment: dict[str, str], tmp_path: Path) -> None:
    go = tmp_path / "go"
    go.touch()
    script = tmp_path / "cells.ipy"
    cell = BLOCKS.replace("GO", repr(str(go))).strip().removeprefix("%%distributed\n")
    source = (
        "%load_ext jupyter_disttrain\n%dist_init -n 2 --launcher local --backend none\n"
        f"get_ipython().run_cell_magic('distributed', '', {cell!r})\n%dist_shutdown\n"
    )
    script.write_text(source)
    ran = subprocess.run(
        [sys.executable, "-m", "IPython", "--colors=NoColor", str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    lines = plain(ran.stdout).splitlines()
    assert not any("\x1b" in line or "\r" in line for line in lines)
    shown = [re.sub(r"\s+([│┃]) ?", r" \1 ", line) for line in lines if " │ " in line or " ┃ " in line]
    own = [(f"rank {rank} │ own {rank}", f"rank {rank} ┃ {rank}0 percent") for rank in (0, 1)]
    many = [f"ranks 0-1 │ many {line}" for line in range(60)]
    assert shown == ["ranks 0-1 │ alike", *own[0], *own[1], *many, "ranks 0-1 │ last"]
