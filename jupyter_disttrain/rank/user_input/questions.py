"""Ask the user a question on behalf of a cell's code, and wait for the answer.

Covers: ``input()``, ``getpass()`` and the prompts of debuggers, on the main thread of a rank.
Does not cover: reading ``sys.stdin`` (``stdin``), the debuggers themselves (``rank_pdb``), how the notebook asks
(``client.cells.open_questions``).
"""

from __future__ import annotations

import cmd
import os
import queue
import sys
import threading
from bdb import Bdb
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...protocol.messages import Question, QuestionEnded
from ..interrupts.deferral import PACKAGE, is_statement, outwards
from ..output.streams import flush_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ...protocol.messages import Record
    from ...protocol.requests import AnswerQuestion


class InputOnRankError(EOFError):
    """A question to the user can't be answered; it is an EOFError for code that can do without an answer."""

    def __init__(self, question: str, reason: str) -> None:
        super().__init__(f"{question} can't be answered on a rank: {reason}")


class DebuggerRefusedError(Exception):
    """A debugger can't ask for commands; not an EOFError, which debuggers take for "quit"."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"a debugger can't stop here: {reason}")


class Questions:
    """The questions of one rank, one at a time.

    ``publish`` sends a record to the client, in its place among the output; ``is_running`` returns whether a cell runs,
    ``interrupts`` the number of interrupts that have reached the rank.
    """

    def __init__(
        self, publish: Callable[[Record], None], is_running: Callable[[], bool], interrupts: Callable[[], int]
    ) -> None:
        self._publish, self._is_running, self.interrupts = publish, is_running, interrupts
        self._pid = os.getpid()
        self._number = 0  # of the latest question
        self.asks = ""  # what waits for an answer: "a debugger", "input()" or "getpass()"; empty if nothing does
        self.is_after_error = False  # a debugger looks at a cell's error, when none of its statements runs any more
        self._answers: queue.SimpleQueue[AnswerQuestion] = queue.SimpleQueue()

    def ask(self, prompt: str, *, is_password: bool = False) -> str:
        """Ask the user and return the answer.

        Raises an InputOnRankError or a DebuggerRefusedError if it can't be answered, an EOFError if the user has ended
        the input.
        """
        is_debugger = _is_of_debugger()
        if reason := self.refusal():
            raise _refused(prompt, reason, is_password=is_password, is_debugger=is_debugger)
        self._number = number = self._number + 1
        flush_all(sys.stdout, sys.stderr)
        with self.waiting_for_user("a debugger" if is_debugger else "getpass()" if is_password else "input()"):
            try:
                self._publish(Question(number=number, prompt=prompt, is_password=is_password, is_debugger=is_debugger))
                answer = self._wait_for_answer(number)
            finally:
                self._publish(QuestionEnded(number=number))
        if answer.refusal:
            raise _refused(prompt, answer.refusal, is_password=is_password, is_debugger=is_debugger)
        if answer.is_end:
            raise EOFError
        return answer.text

    @contextmanager
    def waiting_for_user(self, what: str) -> Iterator[None]:
        """Report meanwhile that this waits for the user: such a rank does not hang."""
        outer, self.asks = self.asks, what
        try:
            yield
        finally:
            self.asks = outer  # of a question during which a signal's handler has asked this one

    def refusal(self) -> str:
        """Why code can't ask now; empty if it can."""
        if os.getpid() != self._pid:
            return "only the rank itself can ask, not a process that the cell has started"
        if threading.current_thread() is not threading.main_thread():
            return "only the main thread can ask"
        if not self._is_running():
            return "no cell runs"
        is_in_cell = self.is_after_error or any(map(is_statement, outwards(sys._getframe())))  # noqa: SLF001
        return "" if is_in_cell else "only code that the cell itself runs can ask, not a task or a callback"

    def _wait_for_answer(self, number: int) -> AnswerQuestion:
        """Wait on the main thread; an interrupt ends it (``interrupts.deferral``)."""
        while (answer := self._answers.get()).number != number:
            continue
        return answer

    def answer(self, answer: AnswerQuestion) -> None:
        """Pass on the user's answer; called on the control thread."""
        self._answers.put(answer)


def _refused(prompt: str, reason: str, *, is_password: bool, is_debugger: bool) -> Exception:
    if is_debugger:
        return DebuggerRefusedError(reason)
    what = "getpass" if is_password else "input"
    return InputOnRankError(f"{what}({prompt!r})" if prompt else f"{what}()", reason)


def _is_of_debugger() -> bool:
    """Whether a debugger's loop asks for its next command, rather than code of the user's."""
    caller: Any = next(
        (each for each in outwards(sys._getframe()) if not each.f_code.co_filename.startswith(PACKAGE)),  # noqa: SLF001
        None,
    )
    is_loop = caller is not None and caller.f_code is cmd.Cmd.cmdloop.__code__
    return is_loop and isinstance(caller.f_locals.get("self"), Bdb)
