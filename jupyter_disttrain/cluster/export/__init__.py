"""What grew in the notebook, as a script.

Covers: choosing what goes into it, writing the files.
Does not cover: a cell's text (``cells``), the script's frame (``frame``), what was done (``cluster.journal``).
"""

from __future__ import annotations

import ast
import os
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ...ranks import label_ranks
from ...values import load_value
from ..journal import Copied, Did, Pushed, Ran, is_whole
from .cells import Cell, read_cell
from .frame import LAUNCHES, MARK, Frame, launch_file

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence
    from pathlib import Path

    from ..journal import Entry
    from ..start import Launch

LITERAL = 200  # characters of a value that is written into the script


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written."""

    script: Path
    launch: Path
    values: Path | None  # the file of pushed variables
    notes: tuple[str, ...]  # what a person should know of it
    command: str  # that runs it


def export(
    path: Path,
    entries: Sequence[Entry],
    frame: Frame,
    launch: str,
    notes: Iterable[str] = (),
    without_group: Container[int] = (),
) -> Exported:
    """Write a script that does what was done, and a file that launches it.

    Parameters
    ----------
    path
        Of the script; the other files stand beside it under its name.
    entries
        What was done, in order.
    frame
        What the ranks were.
    launch
        One of :data:`LAUNCHES`.
    notes
        What is known of it already.
    without_group
        The cells, by number, that left the ranks no process group.

    Raises
    ------
    UsageError
        If nothing ran, or something that ran can't stand in a script; the message names it.
    """
    if launch not in LAUNCHES:
        raise UsageError(f"a script can't be launched by {launch!r}; choose one of {', '.join(LAUNCHES)}")
    name, content = launch_file(path.name, frame, launch)
    beside = path.with_name(name)
    _check(path, beside, entries)
    cells = {
        entry.number: read_cell(entry, ends_group=entry.number in without_group)
        for entry in entries
        if isinstance(entry, Ran)
    }
    notes = [
        *notes,
        *(f"{entry.magic} is not in the script: write it in Python" for entry in entries if isinstance(entry, Did)),
    ]
    used = set().union(*(cell.names for cell in cells.values()))
    values = path.with_name(f"{path.stem}_values.pkl")
    saved: dict[int, dict[str, Any]] = {}
    parts: list[str] = []
    for at, entry in enumerate(entries):
        if isinstance(entry, Ran):
            parts.append(cells[entry.number].text(frame.world_size))
        elif isinstance(entry, Pushed):
            parts += _pushed(entry, used, saved.setdefault(at, {}), at, frame.world_size)
        elif isinstance(entry, Copied) and used & set(entry.names):
            parts.append(_copied(entry))
        elif isinstance(entry, Did):
            parts.append(f"# {entry.magic} stood here")
    saved = {at: named for at, named in saved.items() if named}
    text = frame.script(parts, [cells[number] for number in cells], launch, values.name if saved else "")
    _check_python(text, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if saved:
        values.write_bytes(pickle.dumps(saved))
    path.write_text(text)
    beside.write_text(content)
    beside.chmod(0o755)
    command = f"sbatch {name}" if launch == "slurm" else f"./{name}"
    return Exported(script=path, launch=beside, values=values if saved else None, notes=tuple(notes), command=command)


def _check(path: Path, beside: Path, entries: Iterable[Entry]) -> None:
    """Refuse what can't be written, or would take the place of a person's own."""
    if beside == path:
        raise UsageError(f"{path.name} is what the file is called that launches the script; write e.g. {path.stem}.py")
    for file in (path, beside):
        if file.exists() and MARK not in file.read_text(errors="replace")[:400]:
            raise UsageError(f"{file} is there already, and %dist_export has not written it; choose another name")
    if not any(isinstance(entry, Ran) for entry in entries):
        raise UsageError("no cell has ended well on the ranks yet, so there is nothing to export")


def _check_python(text: str, path: Path) -> None:
    try:
        compile(text, str(path), "exec")
    except SyntaxError as error:
        line = text.splitlines()[(error.lineno or 1) - 1].strip()
        raise UsageError(f"together the cells are no Python: {error.msg}: {line}") from None


def frame_of(launch: Launch) -> Frame:
    """Return what the ranks of a cluster are."""
    infos = [entry.info for entry in launch.table]
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // len(infos)))
    return Frame(
        world_size=len(infos),
        nodes=len({info.node_rank for info in infos}),
        backend=infos[0].backend,
        on_gpus=infos[0].device.startswith("cuda"),
        threads=threads,
        timeout_s=launch.config.timeout_s,
    )


def remarks_on(done: Iterable[Entry], entries: Sequence[Entry], endings: dict[int, str]) -> list[str]:
    """Say which of the cells that ran are not in the script, or not as they ran."""
    cells = [entry for entry in done if isinstance(entry, Ran)]
    written = {entry.number for entry in entries if isinstance(entry, Ran)}
    failed = [entry for entry in cells if not is_whole(entry, endings)]
    earlier = [entry for entry in cells if entry.number not in written and is_whole(entry, endings)]
    interrupted = [entry for entry in cells if entry.number in written and endings[entry.number]]
    return [
        f"{_prompts(which)} {words}"
        for which, words in (
            (failed, "failed or still run, and are left out"),
            (earlier, "ran again later: only the last run is in the script, in the place of the first"),
            (interrupted, "were interrupted; the script runs them to their end"),
        )
        if which
    ]


def _prompts(cells: Iterable[Ran]) -> str:
    return "cells " + " ".join(f"[{cell.execution_count}]" for cell in cells)


def _pushed(entry: Pushed, used: set[str], saved: dict[str, Any], at: int, world_size: int) -> list[str]:
    """Return the lines that set pushed variables, and put what is no literal into ``saved``."""
    needed = [name for name in entry.names if name in used]
    if not needed:
        return []
    if entry.pickled is None:
        raise UsageError(
            f"{', '.join(needed)}: {entry.size_bytes / 2**20:.0f} MiB were pushed, which is too much to be kept; "
            "save them to a file and load that in a %%distributed cell, then export again"
        )
    values = load_value(entry.pickled, entry.buffers)
    lines = []
    for name in needed:
        literal = _literal(values[name])
        if literal is None:
            _check_portable(name, values[name])
            saved[name] = values[name]
            literal = f"pushed[{at}][{name!r}]"
        lines.append(f"{name} = {literal}")
    head = "# Pushed by the notebook"
    if len(entry.ranks) == world_size:
        return ["\n".join([head, *lines])]
    body = "\n".join(f"    {line}" for line in lines)
    return [f"{head} to {label_ranks(entry.ranks)}\nif rank in {set(entry.ranks)}:\n{body}"]


def _check_portable(name: str, value: Any) -> None:
    """Refuse a value that a script can't unpickle."""
    try:
        data = pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"{name} was pushed and can't be saved beside the script ({error}); make it in a cell"
        ) from None
    if b"__main__" in data:
        raise UsageError(
            f"{name} was pushed and is made of a class of the notebook, which a script has not; make it in a cell"
        )


def _literal(value: Any) -> str | None:
    """Return a value as it is written in Python; None if it is no short literal."""
    text = repr(value)
    if len(text) > LITERAL:
        return None
    try:
        same = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
    return text if type(same) is type(value) and same == value else None


def _copied(entry: Copied) -> str:
    names = ", ".join(entry.names)
    some = f"if rank in {set(entry.ranks) | {entry.source}}:\n    " if entry.ranks else ""
    return "\n".join(
        [
            f"# Copied from rank {entry.source} to {label_ranks(entry.ranks)}",
            f"copied = [{names}] if rank == {entry.source} else [None] * {len(entry.names)}",
            f"dist.broadcast_object_list(copied, src={entry.source})",
            f"{some}{names}{',' if len(entry.names) == 1 else ''} = copied",
        ]
    )


__all__ = ["LAUNCHES", "Cell", "Exported", "Frame", "export", "frame_of", "remarks_on"]
