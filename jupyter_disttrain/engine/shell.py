"""IPython on a rank, where it differs from IPython in a notebook.

Covers: what ``exit`` and ``breakpoint`` do, where tracebacks go, remembering the last value.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ipykernel.displayhook import ZMQShellDisplayHook
from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core import page
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.profiledir import ProfileDir
from traitlets import Type, observe

from . import cell_errors, own_code
from .output_widgets import RankDisplayPublisher, watch_outputs
from .sources import find_classes_in_cells
from .streams import flush_all
from .untimely import PACKAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from .checkpoints import Checkpoints
    from .local_modules import LocalModules
    from .scripts import Scripts
    from .staging import Staging

NO_VALUE = object()
TELL_SECONDS = 2.0  # for an error to be told, before an interrupt may cut that off


_INTERRUPTED = compile("raise KeyboardInterrupt", "<interrupted>", "exec")


class RankProfile(ProfileDir):
    """The folder of the cluster, which makes and removes it: a rank that comes up late must not make it again."""

    @observe("location")
    def _location_changed(self, change: Any) -> None:
        for name in ("security", "log", "startup", "pid", "static"):
            setattr(self, f"{name}_dir", str(Path(change["new"]) / getattr(self, f"{name}_dir_name")))

    def check_dirs(self) -> None:
        """Make nothing, nor when one of the names is set."""

    check_log_dir = check_startup_dir = check_security_dir = check_pid_dir = check_dirs


class RankDisplayHook(ZMQShellDisplayHook):
    """Show the last expression, and remember it for ``-o NAME``."""

    last_value: Any = NO_VALUE

    def __call__(self, result: Any = None) -> None:
        """Show ``result``."""
        self.last_value = result
        super().__call__(result)  # type: ignore[no-untyped-call]

    def write_format_data(self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None) -> None:
        """Take the result's forms; the text is written into the log, too."""
        self.pub_socket.log_display(format_dict)
        super().write_format_data(format_dict, md_dict)  # type: ignore[no-untyped-call]


class RankShell(ZMQInteractiveShell):
    """A shell whose end is not its own to decide."""

    displayhook_class = Type(RankDisplayHook)
    display_pub_class = Type(RankDisplayPublisher)

    displayhook: RankDisplayHook
    last_error: BaseException | None = None  # that the cell ended with
    scripts: Scripts  # what runs them
    checkpoints: Checkpoints
    staging: Staging
    local_modules: LocalModules
    _shown: list[list[str]]
    _tells_since: float | None = None  # of an error
    _is_interrupted = False  # meanwhile
    _has_begun = False  # the cell's own code
    _transformed: tuple[str | None, str] = (None, "")  # the cell's text, and what IPython makes of it
    is_late: Callable[[], bool]  # tells whether the cell was interrupted before its own code began

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
        sys.breakpointhook = _refuse_breakpoint
        self.set_hook("show_in_pager", page.as_hook(_print_page), 0)  # type: ignore[no-untyped-call]
        find_classes_in_cells()
        watch_outputs()

    def init_prompts(self) -> None:
        """Set no prompts: by ``sys.ps1`` Lightning and others tell a person's session, where ranks can't be started."""

    def ask_exit(self) -> None:
        """End the cell, not the rank: ``exit()`` means the same as in a script."""
        raise SystemExit(0)

    def begin_cell(self, *, is_typed: bool) -> None:
        """Forget what the cell before left."""
        self._shown, self._has_begun, self._transformed = [], False, (None, "")
        own_code.begin_cell(is_typed=is_typed)
        self.displayhook.last_value = NO_VALUE
        # What cells showed and the texts of their errors: IPython 9 keeps them for %notebook, of no use on a rank.
        for name in ("outputs", "exceptions"):
            getattr(self.history_manager, name, {}).clear()

    def transform_cell(self, raw_cell: str) -> str:
        """Transform a cell once: ipykernel does it to see whether the cell awaits, and has it done anew to run it."""
        raw, transformed = self._transformed
        if raw == raw_cell:
            self._transformed = None, ""
            return transformed
        self._transformed = raw_cell, super().transform_cell(raw_cell)  # type: ignore[no-untyped-call]
        return self._transformed[1]

    async def run_code(self, code_obj: Any, result: Any = None, *, async_: bool = False) -> bool:
        """Run a statement; none if the cell was interrupted before it: what IPython calls there swallows interrupts."""
        if not self._has_begun and self.is_late():
            code_obj, async_ = _INTERRUPTED, False
        self._has_begun = True
        return await super().run_code(code_obj, result, async_=async_)  # type: ignore[no-any-return,no-untyped-call]

    @contextmanager
    def _tee(self, channel: str) -> Iterator[None]:  # noqa: ARG002
        """Keep no copy of what a cell prints: IPython's grows with every line, for days."""
        yield

    def _format_exception_for_storage(self, exception: BaseException, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        """Keep no text of an error for %notebook: it would be made a second time, and take as long as the first."""
        str(exception)  # one that can't say what it is fails here, where IPython tells that as the cell's error
        return {}

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Treat exception groups like other errors; IPython only prints them."""
        error = sys.exc_info()[1] if exc_tuple is None else exc_tuple[1]
        lines = None if error is None else cell_errors.group_traceback(error)
        self._tells_since = time.monotonic()
        try:
            if lines is None:
                super().showtraceback(exc_tuple, *args, **kwargs)
            else:
                self._showtraceback(type(error), error, lines)
        finally:
            self._tells_since = None
            if self._is_interrupted and not kwargs.get("running_compiled_code"):
                signal.raise_signal(signal.SIGINT)  # there is more of the cell, e.g. after %tb

    def puts_off(self) -> bool:
        """Return whether an interrupt has to wait because an error is being told, which would be lost.

        One that can't be told, because its text never ends, is interrupted after a while.
        """
        self._is_interrupted = self._tells_since is not None and time.monotonic() - self._tells_since < TELL_SECONDS
        return self._is_interrupted

    @property
    def told(self) -> list[str] | None:
        """The traceback that the cell showed last; None if it has shown none."""
        return self._shown[-1] if self._shown else None

    def _showtraceback(self, _etype: Any, evalue: Any, stb: list[str]) -> None:
        """Keep the traceback: the reply carries the one the cell ends with, :meth:`show_other_tracebacks` the rest."""
        flush_all(sys.stdout, sys.stderr)
        if getattr(self.displayhook, "msg", None) is not None:
            self._last_traceback_during_displayhook = True
        self._last_traceback = stb
        self.last_error = evalue
        self._shown.append(stb)

    def _get_exc_info(self, exc_tuple: Any = None) -> tuple[Any, Any, TracebackType | None]:
        """Return the exception without the frames of this package, which tell a person nothing."""
        etype, value, trace = super()._get_exc_info(exc_tuple)  # type: ignore[no-untyped-call]
        if value is not None:
            cell_errors.leave_out_libraries(value)
        return etype, value, _without_our_frames(trace)

    def show_other_tracebacks(self, final: list[str] | None) -> None:
        """Print the tracebacks that were shown by the cell but did not end it, e.g. by ``%tb`` or an event handler."""
        for stb in self._shown:
            if stb is not final:
                print("\n".join(stb), file=sys.stderr or sys.__stderr__)
        self._shown = []


# ipykernel asks for it before each cell, and to read it from the function takes as long as to reply.
InteractiveShell.run_cell_async.__signature__ = inspect.signature(InteractiveShell.run_cell_async)  # type: ignore[attr-defined]
RankShell.__name__ = "ZMQInteractiveShell"  # rich and others tell a notebook by this name


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    if trace is not None and not own_code.is_typed():
        # Nobody has written what a magic has the ranks run, nor what lies between it and a script.
        own = _first_frame(trace.tb_next, own_code.is_own)
        # Before the script itself a package that it is in may have failed.
        trace.tb_next = own or _first_frame(trace.tb_next, _is_of_package)
    frame = trace
    while frame is not None:
        following = frame.tb_next
        while following is not None and following.tb_frame.f_code.co_filename.startswith(PACKAGE):
            following = following.tb_next
        frame.tb_next = following  # the first frame is IPython's own
        frame = following
    return trace


def _is_of_package(filename: str) -> bool:
    """Whether a file is one that a person has written, and no cell."""
    return cell_errors.is_of_person(filename) and not own_code.is_cell(filename)


def _first_frame(trace: TracebackType | None, is_wanted: Callable[[str], bool]) -> TracebackType | None:
    while trace is not None and not is_wanted(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _print_page(text: Any, *_args: Any, **_kwargs: Any) -> None:
    """Print what IPython would page, as for ``name?``: a rank has no pager."""
    sys.stdout.write((text["text/plain"] if isinstance(text, dict) else text).rstrip() + "\n")


def _refuse_breakpoint(*_args: Any, **_kwargs: Any) -> NoReturn:
    """Refuse, as ``input()`` is refused."""
    raise cell_errors.InputOnRankError("breakpoint()")
