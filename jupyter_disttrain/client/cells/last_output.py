"""Extract the cause of a rank's death from its last output.

Covers: the last lines of its stderr, faulthandler's report of a crash in C code, the cell's or the script's line in it.
Does not cover: how the process ended (``messages.RankDeath``).
"""

from __future__ import annotations

import re

LINES = 12
_NO_NEWS = "Extension modules:"  # start of a line that lists all loaded extension modules
_GLOO_MISMATCH = "Received data size doesn't match expected size"
_RUNS_SCRIPT = "/jupyter_disttrain/features/scripts/in_process.py"  # file of the frame that calls a script
_WATCHDOG = re.compile(r"[Ww]atchdog (caught|thread terminated)|can't be released")
_FRAME = re.compile(r'File "(.*)", line (\d+)')
_CELL = re.compile(r'File ".*ipykernel_\d+/\d+\.py", line (\d+)')


def root_line(stderr_tail: str) -> str:
    """Return the line of stderr on why CUDA or NCCL ended the process; empty if there is none."""
    lines = [line.strip() for line in stderr_tail.splitlines()]
    found = next((line for line in lines if "CUDA error:" in line), "")
    return found or next((line for line in lines if _WATCHDOG.search(line)), "")


def death_lines(stderr_tail: str, crash: str) -> tuple[tuple[str, ...], str, int | None]:
    """Return the lines to show, and from the crash report the script's file (empty for a cell) and its line."""
    last_lines = stderr_tail.strip().splitlines()[-LINES:]
    reported, file, line = _up_to_own(crash)
    shown = (["Its last lines on stderr:", *last_lines] if last_lines else []) + reported
    if _GLOO_MISMATCH in stderr_tail:
        shown.append(
            "Gloo aborts a process that receives more than its tensor holds: ranks passed tensors of different"
        )
        shown.append("sizes or types to one collective, or to a send and its recv; compare the shapes on all ranks")
    return tuple(shown), file, line


def _up_to_own(crash: str) -> tuple[list[str], str, int | None]:
    """Return the report's lines up to the frame of the cell or script, with the file and line of that frame.

    Frames are listed from the innermost on; those that called the cell or the script are left out.
    """
    lines = [line for line in crash.splitlines() if line and not line.startswith(_NO_NEWS)]
    for index, line in enumerate(lines):
        match = _CELL.search(line)
        if match:
            return [*lines[:index], _CELL.sub(r"Cell, line \1", line)], "", int(match[1])
        script = _FRAME.search(lines[index - 1]) if index and _RUNS_SCRIPT in line else None
        if script:
            return lines[:index], script[1].rpartition("/")[2], int(script[2])
    return lines[:LINES], "", None
