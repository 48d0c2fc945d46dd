"""Adapt IPython's shell to a rank.

Covers: the effect of ``exit``, which error a cell ended with, where tracebacks go, keeping the last value.
Does not cover: the report of an error (``tracebacks``), what asks the user (``rank.user_input``).
"""

from __future__ import annotations

import inspect
import os
import re
import signal
import sys
import time
from bdb import BdbQuit
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import ipykernel.zmqshell
from ipykernel.displayhook import ZMQShellDisplayHook
from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core import page
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.profiledir import ProfileDir
from traitlets import Type, observe

from ...features.scripts.errors import ScriptError
from ...protocol.time_limits import REPORT_ERROR_SECONDS
from ..output.output_widgets import RankDisplayPublisher, watch_outputs
from ..output.streams import flush_all
from ..process_group.errors import is_of_group
from ..user_input.questions import DebuggerRefusedError
from ..user_input.stdin import refuse_payload, refuse_stdin
from . import cell_errors, tracebacks
from .error_chain import has_group, walk
from .shell_commands import run_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from IPython.core.interactiveshell import ExecutionResult

    from ...features.checkpoints.rank import Checkpoints
    from ...features.debugger.rank.debugger import RankDebugger
    from ...features.reloading.rank import LocalModules
    from ...features.scripts.rank import Scripts
    from ...features.staging.rank import Staging
    from ..cell_started import CellStarted
    from ..user_input.questions import Questions
    from .tracebacks import Report

NO_VALUE = object()


# The lines above a cell's text: the notebook's magic, as a comment, and empty lines. IPython would drop the lines, and
# accepts no automagic and no indentation below a comment.
_ABOVE = re.compile(r"\A(?:#%%(?:distributed|rank)\b.*\n)?(?:[^\S\n]*\n)*")
_INTERRUPTED = compile("raise KeyboardInterrupt", "<interrupted>", "exec")


class RankProfile(ProfileDir):
    """The cluster's folder; the cluster makes and removes it, and a rank that starts late must not make it again."""

    @observe("location")
    def _location_changed(self, change: Any) -> None:
        for name in ("security", "log", "startup", "pid", "static"):
            setattr(self, f"{name}_dir", str(Path(change["new"]) / getattr(self, f"{name}_dir_name")))

    def check_dirs(self) -> None:
        """Make no folder, not even when one of the names is set."""

    check_log_dir = check_startup_dir = check_security_dir = check_pid_dir = check_dirs


class RankDisplayHook(ZMQShellDisplayHook):
    """Show the last expression, and keep its value for ``-o NAME``."""

    last_value: Any = NO_VALUE

    def __call__(self, result: Any = None) -> None:
        """Show ``result``."""
        self.last_value = result
        super().__call__(result)  # type: ignore[no-untyped-call]


class RankShell(ZMQInteractiveShell):
    """A shell that ends its cell, but never the rank's process."""

    displayhook_class = Type(RankDisplayHook)
    display_pub_class = Type(RankDisplayPublisher)

    is_rank = True
    displayhook: RankDisplayHook
    scripts: Scripts  # runs scripts
    staging: Staging
    local_modules: LocalModules
    questions: Questions
    rank_debugger: RankDebugger
    stops_at_errors = False  # %pdb: a debugger starts in the frame of each cell's error
    stops_at_error = False  # the same for the running cell, whose magic may have --pdb
    _kept_error: BaseException | None = None  # the last cell's error with its frames, for %debug
    _depth = 0  # nesting depth of cells that run cells
    _result: ExecutionResult | None = None  # result of the current or last cell
    _other_error: BaseException | None = None  # raised while a value is shown, or an interrupt outside the cell's code
    _report: Report | None = None  # report of the cell's error
    _early: list[tuple[BaseException, list[str]]]  # tracebacks shown before or after the cell's own code
    _reporting_since: float | None = None  # when reporting an error started
    _is_interrupted = False  # an interrupt arrived while an error is reported
    _has_begun = False  # whether the cell's own code has started
    given: Callable[[], dict[str, Any]] = staticmethod(dict)  # the names that every rank has
    is_late: Callable[[], bool]  # returns whether the cell was interrupted before its own code started

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """Saves and loads checkpoints."""
        from ...features.checkpoints.rank import Checkpoints  # noqa: PLC0415  (imports torch)

        return Checkpoints(lambda: self.user_ns)

    def __init__(self, **kwargs: Any) -> None:
        self._pid = os.getpid()
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
        refuse_stdin()
        self.set_hook("show_in_pager", page.as_hook(_print_page), 0)  # type: ignore[no-untyped-call]
        self.payload_manager.write_payload = refuse_payload  # type: ignore[union-attr]
        watch_outputs()

    def init_prompts(self) -> None:
        """Set no prompts: Lightning and others take ``sys.ps1`` to mean a session in which ranks can't be started."""

    def ask_exit(self) -> None:
        """End the cell, not the rank: ``exit()`` means the same as in a script."""
        raise SystemExit(0)

    def clear_state(self, cell: CellStarted) -> None:
        """Clear the state of the cell before."""
        self.execution_count = cell.execution_count
        self._has_begun = False
        self.forget_error()
        self._last_traceback_during_displayhook = False
        self.displayhook.last_value = NO_VALUE
        # What cells showed and the texts of their errors: IPython 9 keeps them for %notebook, of no use on a rank.
        for name in ("outputs", "exceptions"):
            getattr(self.history_manager, name, {}).clear()

    def transform_cell(self, raw_cell: str) -> str:
        """Transform a cell below the line with the notebook's magic."""
        above = _ABOVE.match(raw_cell)
        assert above is not None  # it also matches the empty string
        return above[0] + super().transform_cell(raw_cell[above.end() :])  # type: ignore[no-any-return,no-untyped-call]

    async def run_ast_nodes(self, *args: Any, **options: Any) -> bool:
        """Run the statements of a cell; a child that one of them has forked exits after the last."""
        try:
            return await super().run_ast_nodes(*args, **options)  # type: ignore[no-any-return]
        finally:
            if self._depth == 1 and os.getpid() != self._pid:  # not of a cell that another one runs
                self._end_child(sys.exc_info()[1] or options["result"].error_in_exec)

    def _end_child(self, error: BaseException | None) -> NoReturn:
        """End a forked process as a script would end, without what the rank does at its own end."""
        if isinstance(error, SystemExit):
            end_child(error.code)
        if error is not None:
            self._print_traceback(tracebacks.report(error, self).lines)
        end_child(0 if error is None else 1)

    def init_user_ns(self) -> None:
        """Set the names that a session starts with, also after ``%reset``: IPython's, and those that every rank has."""
        super().init_user_ns()  # type: ignore[no-untyped-call]
        self.give_names()

    def give_names(self) -> None:
        """Set the names that every rank has, e.g. after ``del rank``."""
        self.push(self.given(), interactive=False)  # type: ignore[no-untyped-call]

    def advice_on(self, error: BaseException) -> str:
        """Return how to restore a name that every rank has; empty for any other error."""
        if type(error) is not NameError or error.name in self.user_ns or error.name not in self.given():
            return ""
        return f"every rank has {error.name} until it is deleted; get_ipython().give_names() sets it again"

    @contextmanager
    def _tee(self, channel: str) -> Iterator[None]:  # noqa: ARG002
        """Keep no copy of what a cell prints: IPython's grows with every line, for days."""
        yield

    def init_traceback_handlers(self, custom_exceptions: Any) -> None:
        """Trim tracebacks, those that magics print included."""
        super().init_traceback_handlers(custom_exceptions)
        tracebacks.trim_all(self.InteractiveTB)

    # Errors

    @property
    def error(self) -> BaseException | None:
        """The error with which the cell, or a statement of it so far, has ended; None without one."""
        result = self._result
        if result is not None and result.error_before_exec is not None:
            return result.error_before_exec
        if result is not None and result.error_in_exec is not None:
            return result.error_in_exec
        return self._other_error

    @property
    def debugger_cls(self) -> Any:
        """The debugger that ``%debug`` starts with a statement."""
        from ..user_input.rank_pdb import RankPdb  # noqa: PLC0415  (imports a part of IPython that few cells need)

        return RankPdb

    def debugger(self, force: bool = False) -> None:
        """Start a debugger in the frame of the last cell's error, for ``%debug``."""
        if not force:
            return
        if self._kept_error is None:
            raise UsageError(
                "there is no error to debug on this rank: its frames are kept until the next cell starts, or until the "
                "process group is formed again; %%distributed --pdb stops in the frame of an error at once"
            )
        self._look_at(self._kept_error)

    def _look_at(self, error: BaseException) -> None:
        from ..user_input.rank_pdb import RankPdb  # noqa: PLC0415  (as above)

        assert error.__traceback__ is not None
        self.questions.is_after_error = True
        try:
            if reason := self.questions.refusal():
                raise DebuggerRefusedError(reason)
            RankPdb().look_at(error.__traceback__)
        finally:
            self.questions.is_after_error = False

    def _get_call_pdb(self) -> bool:
        return self.stops_at_errors

    def _set_call_pdb(self, val: Any) -> None:
        """Take the setting of ``%pdb``; that of a profile is ignored."""
        self.stops_at_errors = self.stops_at_error = bool(val) and self._depth > 0

    # IPython's own would start a debugger for errors that a cell only shows.
    call_pdb = property(_get_call_pdb, _set_call_pdb)

    def _stop_at(self, error: BaseException) -> None:
        """Start a debugger where the cell's error was raised; an interrupt ends the debugger."""
        is_remote = self.rank_debugger.is_attached
        is_wanted = self.stops_at_error or (is_remote and self.rank_debugger.stops_at_errors)
        if not is_wanted or self._depth != 1 or not _is_debuggable(error) or is_of_group(error):
            return
        if is_remote:
            with suppress(KeyboardInterrupt):  # it ends the debugger
                self.rank_debugger.stop_at_error(error, f"{type(error).__name__}: {tracebacks.text_of(error)}")
            return
        self._print_traceback([tracebacks.shorten(f"{type(error).__name__}: {tracebacks.text_of(error)}")])
        try:
            self._look_at(error)
        except KeyboardInterrupt:
            return
        except DebuggerRefusedError as refusal:  # the reply has the error itself
            self._print_traceback([str(refusal)])

    def let_go_later(self, error: BaseException, *, may_keep: bool) -> None:
        """Keep an error's frames for ``%debug`` until the next cell starts, or clear them now.

        Those of an interrupt, and of an error for lack of memory, are cleared now.
        """
        lacks_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # that of torch
        if may_keep and not lacks_memory and _is_debuggable(error):
            self._kept_error = error
        elif error is not self._kept_error:
            cell_errors.let_go(error, self.user_ns)

    def let_go(self) -> None:
        """Clear the frames that are kept for ``%debug``, and with them the tensors that only they hold."""
        error, self._kept_error = self._kept_error, None
        if error is not None:
            cell_errors.let_go(error, self.user_ns)

    def is_of_code(self, error: BaseException) -> bool:
        """Whether code that ran has raised an error, rather than the compiler that read the cell."""
        return self._result is None or error is not self._result.error_before_exec

    def forget_error(self) -> None:
        """Clear the errors of code that ran."""
        self._early = []
        self._depth, self._result, self._other_error, self._report = 0, None, None, None

    @property
    def any_error(self) -> BaseException | None:
        """The error of code that ran outside of cells, such as a startup file; None without one."""
        return self._early[-1][0] if self.error is None and self._early else self.error

    def end_with(self, error: BaseException) -> None:
        """Set the error with which the cell has ended."""
        self._result, self._other_error, self._report = None, error, None

    @property
    def has_report(self) -> bool:
        """Whether the report of the cell's error was made."""
        return self._report is not None and self._report.error is self.error

    def report(self) -> Report:
        """Return the report of the error with which the cell has ended."""
        assert self.error is not None
        if self._report is None or not self.has_report:
            self._report = tracebacks.report(self.error, self)
        return self._report

    def run_cell(self, *args: Any, **kwargs: Any) -> ExecutionResult:
        """Run a cell, and keep its result unless another cell runs it."""
        result = super().run_cell(*args, **kwargs)  # type: ignore[no-untyped-call]
        if not self._depth:
            self._result = result
        return result  # type: ignore[no-any-return]

    async def run_cell_async(self, *args: Any, **kwargs: Any) -> ExecutionResult:
        """Run a cell, and keep its result unless another cell runs it."""
        self._depth += 1
        try:
            result = await super().run_cell_async(*args, **kwargs)
        finally:
            self._depth -= 1
        if not self._depth:
            self._result = result
        return result

    async def run_code(self, code_obj: Any, result: Any = None, *, async_: bool = False) -> bool:
        """Run a statement, or raise if the cell was interrupted before: IPython's code there swallows interrupts."""
        if not self._has_begun and self.is_late():
            code_obj, async_ = _INTERRUPTED, False
        self._has_begun = True
        if self._depth == 1:
            self._result = result
            self._print_early()
        return await super().run_code(code_obj, result, async_=async_)  # type: ignore[no-any-return,no-untyped-call]

    def _format_exception_for_storage(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        """Keep no text of an error for %notebook: it would be made a second time, and take as long as the first."""
        return {}

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Make the report of the error that ends the cell, and show any other error at once."""
        error = sys.exc_info()[1] if exc_tuple is None else exc_tuple[1]
        if error is None and exc_tuple is None:
            error = getattr(sys, "last_value", None)
        is_of_cell = error is not None and error is self.error
        self._reporting_since, self._is_interrupted = time.monotonic(), False
        try:
            if error is None:
                super().showtraceback(exc_tuple, *args, **kwargs)  # prints that there is none
            elif is_of_cell:
                super()._get_exc_info((type(error), error, error.__traceback__))  # type: ignore[no-untyped-call]  # for %tb
                self.report()
            else:
                self._show(error, *args, **kwargs)
        except KeyboardInterrupt as interrupt:
            if not is_of_cell:
                raise
            self.end_with(interrupt)  # making its text never ends
        finally:
            self._reporting_since = None
            if self._is_interrupted and not is_of_cell:
                signal.raise_signal(signal.SIGINT)  # the cell continues, e.g. after %tb
        if is_of_cell and error is self.error and error is not None:
            self._stop_at(error)

    def _show(self, error: BaseException, *args: Any, **kwargs: Any) -> None:
        with tracebacks.trimmed(error):
            if has_group(error):  # IPython only prints it
                super()._get_exc_info((type(error), error, error.__traceback__))  # type: ignore[no-untyped-call]
                self._showtraceback(type(error), error, tracebacks.plain_lines(error, self))
            else:
                super().showtraceback((type(error), error, error.__traceback__), *args, **kwargs)

    def puts_off(self) -> bool:
        """Return whether an interrupt is deferred because an error is being reported, which would be lost.

        If the report takes too long, because the error's text never ends, it is interrupted.
        """
        self._is_interrupted = (
            self._reporting_since is not None and time.monotonic() - self._reporting_since < REPORT_ERROR_SECONDS
        )
        return self._is_interrupted

    def _showtraceback(self, _etype: Any, evalue: Any, stb: list[str]) -> None:
        """Print a traceback that the cell itself shows, e.g. by ``%tb``; the reply has that of the cell's own error."""
        self._last_traceback = stb
        if getattr(self.displayhook, "msg", None) is not None:
            self._last_traceback_during_displayhook = True  # ipykernel then takes the cell for failed
            self._other_error = evalue
        elif not self._has_begun or not self._depth:
            self._early.append((evalue, stb))  # may be the cell's own error: it can't be compiled
        elif evalue is not self.error:
            self._print_traceback(stb)

    def show_usage_error(self, exc: Any) -> None:
        """Print what is wrong with the use of a magic, unless the cell ends with that error."""
        if exc is not self.error:
            self._print_traceback([f"UsageError: {exc}"])

    def end_cell(self) -> None:
        """Print the tracebacks that were shown outside of the cell's code, e.g. by an event handler."""
        self._early = [(error, stb) for error, stb in self._early if error is not self.error]
        self._print_early()

    def _print_early(self) -> None:
        early, self._early = self._early, []
        for _, stb in early:
            self._print_traceback(stb)

    def _print_traceback(self, stb: list[str]) -> None:
        """Print to the cell's output, even if the cell captures or has replaced ``sys.stderr``, as a kernel does."""
        flush_all(sys.stdout, sys.stderr)
        print("\n".join(stb), file=sys.__stderr__)


# ipykernel asks for it before each cell, and reading it from the function takes as long as a reply.
RankShell.run_cell_async.__signature__ = inspect.signature(InteractiveShell.run_cell_async)  # type: ignore[attr-defined]
# In place of IPython's, with which a program that asks for input waits forever.
ipykernel.zmqshell.system = run_command  # type: ignore[attr-defined,assignment]
RankShell.__name__ = "ZMQInteractiveShell"  # rich and others detect a notebook by this name


def _is_debuggable(error: BaseException) -> bool:
    """Whether an error was raised in code of the user's that a debugger can show."""
    is_other = isinstance(error, (UsageError, SyntaxError, DebuggerRefusedError, BdbQuit, ScriptError))
    frames = (trace.tb_frame.f_code.co_filename for trace in walk(error.__traceback__))
    return isinstance(error, Exception) and not is_other and any(map(tracebacks.is_of_user, frames))


def is_debug(code: str) -> bool:
    """Whether a cell is ``%debug``, which looks at the frames of the cell before."""
    above = _ABOVE.match(code)
    assert above is not None  # it also matches the empty string
    return code[above.end() :].strip() == "%debug"


def end_child(code: Any) -> NoReturn:
    """Exit a process that was forked and has reached the end of the code: in a script it would exit here."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)  # noqa: T201  (as Python does)
        code = 1
    flush_all(sys.stdout, sys.stderr)
    os._exit(code or 0)


def _print_page(text: Any, *_args: Any, **_kwargs: Any) -> None:
    """Print what IPython would page, as for ``name?``: a rank has no pager."""
    sys.stdout.write((text["text/plain"] if isinstance(text, dict) else text).rstrip() + "\n")
