"""Make the traceback of an error on a rank.

Covers: which frames are shown, bounds on their number and on the length of texts, parts in which ranks may differ.
Does not cover: which error a cell ended with (``shell``), its line, the reply (``cell_errors``).
"""

from __future__ import annotations

import inspect
import linecache
import re
import sys
import tokenize
import traceback
from bdb import BdbQuit
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import dropwhile
from typing import TYPE_CHECKING, Any

from IPython.core import ultratb
from IPython.core.error import UsageError
from stack_data.core import RepeatedFrames

from .. import user_code
from ..interrupts.deferral import INSTALLED, PACKAGE, STANDARD_LIBRARY
from ..process_group.errors import is_of_group
from ..user_code import is_own
from ..user_input.questions import DebuggerRefusedError
from .error_chain import chain, has_group, line_of, linked, tree, walk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType, TracebackType


TEXT_LIMIT = 20_000  # characters of an error's text, and of each part of its traceback
DETAIL_LIMIT = 2_000  # characters of a note, or of the text of an error that led to this one
FIRST_FRAMES, LAST_FRAMES = 10, 20  # frames of a traceback; those between are counted
LONGEST_CYCLE = 8  # functions that call each other in turn
SHOWN_ROUNDS = 2  # rounds shown of a recursion, besides its last one
CHAINED = 5  # errors that led to this one

_OF_LIBRARY = re.compile(r"/(torch|horovod)/")  # frames that add no information to an error of a group
_OF_IPYTHON = "/IPython/core/"
_CODE_FILE = re.compile(r'File "([^"]+)"')


@dataclass(frozen=True, slots=True)
class Report:
    """What is shown of an error."""

    error: BaseException
    text: str
    lines: list[str]  # the traceback
    details: list[str]  # beyond its text: notes, and the texts of the errors that led to it or are in it
    raised_at: str  # the innermost frame shown; empty without one


def report(error: BaseException, shell: Any) -> Report:
    """Return what is shown of an error."""
    with trimmed(error) as left_out:
        text = text_of(error)
        lines = [shorten(line) for line in _lines(error, shell)]
        if left_out:
            lines.insert(0, f"[... {left_out} earlier errors that led to these are not shown]")
        return Report(error, shorten(text), lines, _details(error), _innermost(error, shell))


def _lines(error: BaseException, shell: Any) -> list[str]:
    if type(error) is UsageError:
        return [f"UsageError: {error}"]
    try:
        return _ipython_lines(error, shell)
    except Exception:  # noqa: BLE001  (IPython fails on notes that are no text, and on many other errors)
        return plain_lines(error, shell)


def plain_lines(error: BaseException, shell: Any) -> list[str]:
    """Return the traceback as the standard library formats it, with cells named as IPython does."""
    lines = "".join(traceback.format_exception(type(error), error, _below_ipython(error))).splitlines()
    return [_CODE_FILE.sub(lambda found: _cell_name(found[1], shell) or found[0], line) for line in lines]


def _below_ipython(error: BaseException) -> TracebackType | None:
    """Return the error's traceback from the cell on."""
    return linked(list(dropwhile(lambda trace: _OF_IPYTHON in _file(trace), walk(error.__traceback__))))


def _cell_name(filename: str, shell: Any) -> str:
    """Return ``Cell In[3]`` for the name under which a cell is compiled; empty for any other file."""
    return " ".join(shell.compile.format_code_name(filename) or ())


def _ipython_lines(error: BaseException, shell: Any) -> list[str]:
    made: Any
    if isinstance(error, SyntaxError):
        frames: Any = traceback.extract_tb(_below_ipython(error)) if shell.is_of_code(error) else []
        made = shell.SyntaxTB.structured_traceback(type(error), error, frames)
    elif hasattr(error, "_render_traceback_"):
        made = error._render_traceback_()
    elif isinstance(error, SystemExit):
        made = shell.InteractiveTB.get_exception_only(type(error), error)
    elif has_group(error):
        made = plain_lines(error, shell)  # IPython shows no members
    else:
        str(error)  # raises if the text can't be made; IPython would show something odd
        made = shell.InteractiveTB.structured_traceback(type(error), error, error.__traceback__)
    *lines, last = map(str, made)
    return [*lines, last.rstrip("\n")]


# Texts


def text_of(error: BaseException) -> str:
    """Return the error's text; an error that has none must not cost the reply."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # noqa: BLE001  (the user's own __str__ may raise anything)
        return f"<its __str__ raised {type(failure).__name__}>"


def shorten(text: str, limit: int = TEXT_LIMIT) -> str:
    """Leave out the middle of a text that is too long to read."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} … {len(text) - 2 * half:,} characters left out … {text[-half:]}"


def _details(error: BaseException) -> list[str]:
    details = []
    for link in tree(error):
        if link is not error:
            details.append(f"{type(link).__name__}: {text_of(link)}")
        notes = getattr(link, "__notes__", None)
        details += [f"note: {note}" for note in notes if isinstance(note, str)] if isinstance(notes, list) else []
    return [shorten(detail, DETAIL_LIMIT) for detail in details]


def _innermost(error: BaseException, shell: Any) -> str:
    frames = list(walk(error.__traceback__))
    if not frames:
        return ""
    trace = frames[-1]
    code = trace.tb_frame.f_code
    name = _cell_name(code.co_filename, shell) or code.co_filename
    return f"{name}, line {line_of(trace)}, in {_name(trace.tb_frame)}"


def is_of_user(filename: str) -> bool:
    """Whether a file is the user's: a cell, the script that it runs, or a module of the user's."""
    if is_own(filename):
        return True
    return not filename.startswith(("<frozen", STANDARD_LIBRARY, PACKAGE)) and not INSTALLED.search(filename)


# Which frames are shown

_KEPT = ("__traceback__", "__cause__", "__context__", "__suppress_context__")
_gaps: dict[int, str] = {}  # by the id of a frame: text for the frames left out after it


def _set(error: BaseException, name: str, value: Any) -> None:
    getattr(BaseException, name).__set__(error, value)  # its class may refuse, e.g. a frozen dataclass or a property


@contextmanager
def trimmed(error: BaseException) -> Iterator[int]:
    """Trim the tracebacks for the duration of the block; yields how many errors are left out of the chain.

    No frame of this package is shown. Of an interrupt, and of the end of a debugger, no frame below the user's own code
    is shown, and of an error of a
    process group none of the library: these show only how a rank was stopped or released. They are also slow to show:
    IPython parses each file that a frame is in and colours its whole scope.
    """
    links = list(tree(error, hidden=True))
    before = [(link, [getattr(BaseException, name).__get__(link) for name in _KEPT]) for link in links]
    gaps = dict(_gaps)
    try:
        left_out = _cut_chain(error)
        _cut_below_own(error)
        is_group = has_group(error)
        for link in tree(error):
            frames = list(walk(link.__traceback__))
            if is_group:
                frames = _from_first(frames, is_own) or frames
            elif link is error and (isinstance(error, KeyboardInterrupt) or not user_code.is_typed()):
                frames = _without_wrapper(frames)
            _set(link, "__traceback__", _joined(frames))
        yield left_out
    finally:
        for link, values in before:
            for name, value in zip(_KEPT, values, strict=True):
                _set(link, name, value)
        _gaps.clear()
        _gaps.update(gaps)


def _cut_chain(error: BaseException) -> int:
    """Drop the errors that are too far back in the chain; returns how many."""
    links = list(chain(error))
    if len(links) <= CHAINED + 1:
        return 0
    _set(links[CHAINED], "__cause__", None)
    _set(links[CHAINED], "__context__", None)
    return len(links) - CHAINED - 1


def _cut_below_own(error: BaseException) -> None:
    if isinstance(error, (KeyboardInterrupt, BdbQuit, DebuggerRefusedError)):
        _cut_below_last(error, is_of_user)
    elif "torch.distributed" in sys.modules and is_of_group(error):
        _cut_below_last(error, lambda filename: not _OF_LIBRARY.search(filename))


def _cut_below_last(error: BaseException, keep: Callable[[str], bool]) -> None:
    for link in list(chain(error)):
        frames = list(walk(link.__traceback__))
        last = max((at for at, trace in enumerate(frames) if keep(_file(trace))), default=None)
        if last is not None:
            _set(link, "__traceback__", linked(frames[: last + 1]))
        elif link is not error:
            _set(error, "__cause__", None)  # an error that a library was handling
            _set(error, "__suppress_context__", True)


def _without_wrapper(frames: list[TracebackType]) -> list[TracebackType]:
    """Leave out what comes before the user's code, e.g. that of a magic; the first frame, IPython's, is kept."""
    # A package that contains the script may have failed before the script itself.
    inner = _from_first(frames[1:], is_own) or _from_first(frames[1:], _is_module_of_user)
    return [*frames[:1], *inner]


def _is_module_of_user(filename: str) -> bool:
    return is_of_user(filename) and not user_code.is_cell(filename)


def _from_first(frames: list[TracebackType], is_wanted: Callable[[str], bool]) -> list[TracebackType]:
    return list(dropwhile(lambda trace: not is_wanted(_file(trace)), frames))


def _file(trace: TracebackType) -> str:
    return trace.tb_frame.f_code.co_filename


def _name(frame: FrameType) -> str:
    return str(getattr(frame.f_code, "co_qualname", frame.f_code.co_name))  # Python 3.10 has no co_qualname


def _joined(frames: list[TracebackType]) -> TracebackType | None:
    """Make a traceback of the frames that are shown, and record where frames are left out."""
    frames = [trace for trace in frames if not _file(trace).startswith(PACKAGE)]
    shown, at = [], 0
    keys = [(trace.tb_frame.f_code, line_of(trace)) for trace in frames]
    while at < len(frames):
        length, rounds = _cycle(keys, at)
        if rounds <= SHOWN_ROUNDS + 1:
            shown.append(frames[at])
            at += 1
            continue
        left_out = rounds - SHOWN_ROUNDS - 1
        shown += frames[at : at + SHOWN_ROUNDS * length]
        names = (f"{_name(trace.tb_frame)} at line {line_of(trace)}" for trace in frames[at : at + length])
        _gaps[id(shown[-1].tb_frame)] = f"similar frames: {', '.join(f'{name} ({left_out} times)' for name in names)}"
        shown += frames[at + (rounds - 1) * length : at + rounds * length]
        at += rounds * length
    if len(shown) > FIRST_FRAMES + LAST_FRAMES:
        between = len(shown) - FIRST_FRAMES - LAST_FRAMES
        shown = [*shown[:FIRST_FRAMES], *shown[-LAST_FRAMES:]]
        _gaps[id(shown[FIRST_FRAMES - 1].tb_frame)] = f"{between} frames"
    return linked(shown)


def _cycle(keys: list[Any], at: int) -> tuple[int, int]:
    """Return how many frames, from this one on, are repeated, and how often they occur."""
    for length in range(1, LONGEST_CYCLE + 1):
        rounds, cycle = 1, keys[at : at + length]
        while keys[at + rounds * length : at + (rounds + 1) * length] == cycle:
            rounds += 1
        if rounds > SHOWN_ROUNDS + 1:
            return length, rounds
    return 1, 1


class _Gap(RepeatedFrames):
    """Stands for left-out frames among those that IPython formats."""

    def __init__(self, text: str) -> None:
        super().__init__([], [])
        self.text = text


def _source_of(frame: FrameType) -> list[str]:
    """Return the source of a frame's code from its first line on; empty if it is not available.

    ``inspect.getsourcelines`` returns the beginning of the file for a comprehension or a class.
    """
    first = frame.f_code.co_firstlineno
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)[max(first - 1, 0) :]
    if frame.f_code.co_name == "<module>":
        return lines
    try:
        return inspect.getblock(lines)
    except (SyntaxError, tokenize.TokenError):  # the code begins within a statement
        return lines


def trim_all(formatter: Any) -> None:
    """Make IPython's traceback formatter trim what it formats, and note where frames are left out."""
    get_records, format_record = formatter.get_records, formatter.format_record
    structured_traceback = formatter.structured_traceback

    def trim(kind: Any = None, error: Any = None, trace: Any = None, *args: Any, **options: Any) -> Any:
        if error is None or trace is not error.__traceback__:
            return structured_traceback(kind, error, trace, *args, **options)
        with trimmed(error):
            return structured_traceback(kind, error, error.__traceback__, *args, **options)

    def with_gaps(trace: TracebackType, *args: Any, **options: Any) -> list[Any]:
        entries, records = iter(list(walk(trace))), []
        for record in get_records(trace, *args, **options):
            if record._sd is None and record.frame is not None:  # noqa: SLF001  (its line is the frame's current one)
                line = next(line_of(entry) for entry in entries if entry.tb_frame is record.frame)
                record.lineno = (line,) if isinstance(record.lineno, tuple) else line  # a tuple in IPython 8
                record.raw_lines = _source_of(record.frame) or record.raw_lines
            records.append(record)
            text = _gaps.get(id(record.frame))
            if text is not None and record.frame is not None:
                records.append(ultratb.FrameInfo("", "", 0, None, None, sd=_Gap(text)))  # type: ignore[attr-defined]
        return records

    def format_gap(record: Any) -> str:
        if isinstance(record._sd, _Gap):  # noqa: SLF001
            return f"    [... skipping {record._sd.text}]\n"  # noqa: SLF001
        return str(format_record(record))

    formatter.structured_traceback, formatter.get_records, formatter.format_record = trim, with_gaps, format_gap
