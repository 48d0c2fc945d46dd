"""Define the debugger of cells on ranks.

Covers: where it differs from IPython's: it stops at once, steps from one statement of a cell to the next, shows no
frame outside the cell, and an interrupt ends it and the cell.
Does not cover: what starts it (``debugger_hooks``).
"""

from __future__ import annotations

import reprlib
import sys
from bdb import BdbQuit
from itertools import dropwhile
from typing import TYPE_CHECKING, Any, cast

from IPython.core.debugger import Pdb

from ..interrupts.deferral import is_statement, outwards
from ..kernel.error_chain import linked, walk
from ..kernel.tracebacks import is_of_user

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from .questions import Questions


class DebuggerInterrupt(BaseException):
    """An interrupt at the prompt; pdb and IPython catch KeyboardInterrupt and go on."""


class RankPdb(Pdb):
    """IPython's debugger, for code of cells."""

    def stop_at(self, frame: FrameType) -> None:
        """Stop in a frame at once, as pdb does since Python 3.13: a cell's statement may have no further line."""
        self.reset()
        for each in outwards(frame):  # not those of the kernel, which would hold on to this debugger
            each.f_trace = self.trace_dispatch
            self.botframe = each
            if is_statement(each):
                break
        self.set_step()
        self._interact(frame, None)
        if self.quitting:
            raise BdbQuit
        has_continued = self.stopframe is self.botframe and self.stoplineno == -1
        if self.breaks or not has_continued:
            sys.settrace(self.trace_dispatch)

    def look_at(self, trace: TracebackType) -> None:
        """Start after an error, in the innermost frame of the user's own code."""
        entries = list(dropwhile(lambda each: not is_of_user(each.tb_frame.f_code.co_filename), walk(trace)))
        self.reset()
        self._interact(None, linked(entries or list(walk(trace))))

    def _interact(self, frame: FrameType | None, trace: TracebackType | None) -> None:
        try:
            self.interaction(frame, trace)
        except DebuggerInterrupt:
            raise KeyboardInterrupt from None

    def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Handle an event of the traced code; an interrupt at a prompt interrupts the code."""
        try:
            return super().trace_dispatch(frame, event, arg)
        except DebuggerInterrupt:
            sys.settrace(None)
            raise KeyboardInterrupt from None

    # Where it stops

    def stop_here(self, frame: FrameType) -> bool:
        """Whether to stop in a frame: in code that the cell calls, not in IPython's between its statements."""
        if self.stopframe is not None and self.stopframe is not frame:
            return False
        return any(map(is_statement, outwards(frame))) and bool(super().stop_here(frame))  # type: ignore[no-untyped-call]

    def user_call(self, frame: FrameType, argument_list: Any) -> None:
        """Stop when a function is called; a statement of a cell has a line of its own to stop at."""
        if not is_statement(frame):
            super().user_call(frame, argument_list)

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        """Stop when a function returns; after a statement of a cell, at the next one."""
        if is_statement(frame):
            self.set_step()
        else:
            super().user_return(frame, return_value)

    # At the prompt

    @property
    def _questions(self) -> Questions:
        questions: Questions = cast("Any", self.shell).questions
        return questions

    def setup(self, f: Any, tb: Any) -> Any:
        """Choose the frame in which the debugger starts."""
        result = super().setup(f, tb)
        if f is None:
            own = [at for at, (frame, _) in enumerate(self.stack) if is_of_user(frame.f_code.co_filename)]
            self._choose(own[-1] if own else len(self.stack) - 1)
        return result

    def get_stack(self, f: Any, t: Any) -> Any:
        """Return the frames from the cell's statement on, and the place of the current one."""
        stack, at = super().get_stack(f, t)  # type: ignore[no-untyped-call]
        first = next((number for number, (frame, _) in enumerate(stack) if is_statement(frame)), 0)
        return stack[first:], max(0, at - first)

    def _choose(self, at: int) -> None:
        self.curindex = at
        self.curframe = self.stack[at][0]
        if sys.version_info < (3, 13):
            self.curframe_locals = self.curframe.f_locals
        self.lineno = None

    def interaction(self, frame: Any, tb_or_exc: Any) -> None:
        """Ask for commands until one lets the code go on."""
        questions = self._questions
        self._interrupts = questions.interrupts()
        super().interaction(frame, tb_or_exc)  # type: ignore[no-untyped-call]
        if questions.interrupts() != self._interrupts:  # before the prompt: IPython prints it and goes on
            raise DebuggerInterrupt

    def _cmdloop(self) -> None:
        try:
            self.cmdloop()
        except KeyboardInterrupt:
            raise DebuggerInterrupt from None

    def postcmd(self, stop: bool, line: str) -> bool:
        """End the debugger if a command was interrupted, which pdb only prints."""
        if self._questions.interrupts() != self._interrupts:
            raise DebuggerInterrupt
        return bool(super().postcmd(stop, line))

    def print_stack_entry(self, frame_lineno: Any, *_args: Any, **_options: Any) -> None:
        """Print a frame's place and source."""
        self.message(self.format_stack_entry(frame_lineno, "").rstrip())

    def format_stack_entry(self, frame_lineno: Any, *args: Any, **options: Any) -> Any:
        """Return a frame's place and source, with cells named as in tracebacks: their files differ by rank."""
        text = super().format_stack_entry(frame_lineno, *args, **options)
        file = frame_lineno[0].f_code.co_filename
        return text.replace(file, " ".join(self.shell.compile.format_code_name(file) or (file,)))

    def do_locals(self, _arg: str) -> None:
        """locals: list the frame's local variables and their values, shortened."""
        assert self.curframe is not None
        hidden = self.shell.user_ns_hidden if is_statement(self.curframe) else {}
        for name, value in self.curframe.f_locals.items():
            if not name.startswith("_") and hidden.get(name) is not value:
                self.message(f"{name} = {reprlib.repr(value)}")
