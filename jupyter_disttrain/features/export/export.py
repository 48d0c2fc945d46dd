"""Export the cells that ran in a notebook as a script.

Covers: choosing the script's contents, writing the files.
Does not cover: a cell's text (``cells``), the script's frame (``template``), the record of what ran
(``client.cells.history``).
"""

from __future__ import annotations

import ast
import os
import pickle
import pickletools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...client.cells.history import CellEntry, Copied, MagicEntry, Pushed, is_whole
from ...errors import UsageError
from ...protocol.ranks import format_ranks, label_ranks
from ...protocol.serialization import load_value
from .cells import RANK, Cell, read_cell
from .template import COPY, LAUNCHES, MARK, PUSHED, Frame, launch_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from ...client.cells.history import Entry
    from ...client.startup.launch import Launch

LITERAL = 200  # longest literal written into the script, in characters
MARKED_BYTES = 1000  # bytes at the start of a file that are searched for our mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The written files."""

    script: Path
    launch: Path
    values: Path | None  # the file of pushed variables
    notes: tuple[str, ...]  # remarks for the user
    command: str  # the command that runs the script


def export(path: Path, entries: Sequence[Entry], frame: Frame, launch: str, notes: Iterable[str] = ()) -> Exported:
    """Write a script that repeats what ran, and a file that launches it.

    Parameters
    ----------
    path
        The script's path; the other files are written beside it under its name.
    entries
        What ran, in order.
    frame
        The properties of the ranks.
    launch
        One of :data:`LAUNCHES`.
    notes
        Remarks for the user.

    Raises
    ------
    UsageError
        If nothing ran, or something that ran can't be part of a script; the message names it.
    """
    if launch not in LAUNCHES:
        raise UsageError(f"a script can't be launched by {launch!r}; choose one of {', '.join(LAUNCHES)}")
    name, content = launch_file(path.name, frame, launch)
    beside = path.with_name(name)
    if beside == path:
        raise UsageError(f"{path.name} is the name of the file that launches the script; choose e.g. {path.stem}.py")
    for file in (path, beside):
        _check_own(file)
    cells = {entry.number: read_cell(entry) for entry in entries if isinstance(entry, CellEntry)}
    if not cells:
        raise UsageError("no cell has succeeded on the ranks yet, so there is nothing to export")
    body = _Body(entries, cells, frame.world_size)
    values = path.with_name(f"{path.stem}_values.pkl") if body.saved else None
    if values is not None:
        _check_own(values)
    named = "" if values is None else values.name
    text = frame.script(body.parts, list(cells.values()), launch, named, copies=body.copies)
    _check_python(text, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if values is not None:
        values.write_bytes(pickle.dumps({"about": f"What {path.name} reads; {MARK}.", "values": body.saved}))
    path.write_text(text)
    beside.write_text(content)
    beside.chmod(0o755)
    command = f"sbatch {name}" if launch == "slurm" else f"./{name}"
    return Exported(script=path, launch=beside, values=values, notes=tuple(notes), command=command)


class _Body:
    """The parts of the script."""

    def __init__(self, entries: Sequence[Entry], cells: Mapping[int, Cell], world_size: int) -> None:
        used = set[str]().union(*(cell.names for cell in cells.values()))
        self.parts: list[str] = []
        self.copies = False
        self.saved: dict[int, dict[str, Any]] = {}  # pushed values that are not written as literals, by position
        for at, entry in enumerate(entries):
            names = [name for name in getattr(entry, "names", ()) if name in used]
            if isinstance(entry, CellEntry):
                self.parts.append(cells[entry.number].text(world_size))
            elif isinstance(entry, MagicEntry):
                self.parts.append(f"# {entry.magic} was here")
            elif isinstance(entry, Pushed) and names:
                self._push(entry, names, at, world_size)
            elif isinstance(entry, Copied) and names:
                self.copies = True
                title = f"# %dist_copy --from {entry.source} --to {format_ranks(entry.ranks)} {' '.join(names)}"
                self.parts.append(
                    f"{title}\n{COPY}({entry.source}, {list(entry.ranks)}, {', '.join(map(repr, names))})"
                )

    def _push(self, entry: Pushed, names: Sequence[str], at: int, world_size: int) -> None:
        if entry.pickled is None:
            raise UsageError(
                f"{', '.join(names)}: {entry.size_bytes / 2**20:.0f} MiB were pushed, which is too large for the "
                "export; save them to a file, load that in a %%distributed cell, then export again"
            )
        values = load_value(entry.pickled, entry.buffers)
        lines = []
        for name in names:
            literal = _literal(values[name])
            if literal is None:
                _check_portable(name, values[name])
                self.saved.setdefault(at, {})[name] = values[name]
                literal = f"{PUSHED}[{at}][{name!r}]"
            lines.append(f"{name} = {literal}")
        head = "# Pushed by the notebook"
        if len(entry.ranks) < world_size:
            head += f" to {label_ranks(entry.ranks)}\nif {RANK} in {set(entry.ranks)}:"
            lines = [f"    {line}" for line in lines]
        self.parts.append("\n".join([head, *lines]))


def _check_own(file: Path) -> None:
    """Raise an error if a file of the user would be overwritten."""
    if os.path.lexists(file) and not (file.is_file() and MARK.encode() in file.read_bytes()[:MARKED_BYTES]):
        raise UsageError(f"{file} exists and was not written by %dist_export; choose another name")


def _check_python(text: str, path: Path) -> None:
    try:
        compile(text, str(path), "exec")
    except SyntaxError as error:
        line = text.splitlines()[(error.lineno or 1) - 1].strip()
        raise UsageError(f"the cells together are not valid Python: {error.msg}: {line}") from None


def frame_of(launch: Launch) -> Frame:
    """Return the properties of a cluster's ranks."""
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
    """Describe cells and magics that are not in the script, or not as they ran."""
    cells = [entry for entry in done if isinstance(entry, CellEntry)]
    written = {entry.number for entry in entries if isinstance(entry, CellEntry)}
    failed = [entry for entry in cells if not is_whole(entry, endings)]
    earlier = [entry for entry in cells if entry.number not in written and is_whole(entry, endings)]
    interrupted = [entry for entry in cells if entry.number in written and endings[entry.number]]
    remarks = [
        f"cells {' '.join(f'[{cell.execution_count}]' for cell in which)} {remark}"
        for which, remark in (
            (failed, "failed or still run, and are left out"),
            (earlier, "ran again later: only the last run is in the script, in the place of the first"),
            (
                interrupted,
                "were interrupted; the script runs them to their end, or hangs where ranks waited for others",
            ),
        )
        if which
    ]
    magics = dict.fromkeys(entry.magic for entry in entries if isinstance(entry, MagicEntry))
    return remarks + [f"{magic} is not in the script: write it in Python" for magic in magics]


def _check_portable(name: str, value: Any) -> None:
    """Raise an error for a value that a script can't unpickle: one that uses a class or function of the notebook."""
    try:
        data = pickle.dumps(value, protocol=2)  # which has an operation of its own for the name of a class
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"{name} was pushed and can't be saved beside the script ({error}); create it in a cell"
        ) from None
    for operation, argument, _ in pickletools.genops(data) if b"c__main__\n" in data else ():
        module, _, attribute = str(argument).partition(" ") if operation.name == "GLOBAL" else ("", "", "")
        if module == "__main__":
            raise UsageError(
                f"{name} was pushed and uses {attribute} of the notebook, which a script does not have; "
                "create it in a cell"
            )


def _literal(value: Any) -> str | None:
    """Return a value as a Python literal; None if it has no short one."""
    text = repr(value)
    if len(text) > LITERAL:
        return None
    try:
        same = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
    return text if type(same) is type(value) and same == value else None
