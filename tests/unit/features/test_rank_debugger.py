"""What a stopped rank does without a client.

Does not cover: requests of a client to a real rank (``tests/integration/features/debugger``).
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

from jupyter_disttrain.features.debugger.rank import debugger as module
from jupyter_disttrain.features.debugger.rank.debugger import RankDebugger
from jupyter_disttrain.rank.user_input.questions import Questions

if TYPE_CHECKING:
    import pytest

    from jupyter_disttrain.protocol.messages import Record

CELL = "/tmp/ipykernel_1/1.py"


class Stopping:
    """A debugger whose client sends these requests once the rank has stopped."""

    def __init__(self, *commands: str) -> None:
        self._commands = commands
        self.responses: dict[str, dict[str, Any]] = {}  # by command
        self.held: list[bool] = []
        questions = Questions(self._publish, lambda: True, lambda: 0)
        self.debugger = RankDebugger(questions, self._publish, lambda: None, dict, self.held.append, lambda: "/tmp")
        self.debugger.take({"command": "attach", "seq": 1})

    def _publish(self, record: Record) -> None:
        message: dict[str, Any] = record.message  # type: ignore[attr-defined]
        if message["type"] == "response":
            self.responses[message["command"]] = message
        if message.get("event") == "stopped":
            for number, command in enumerate(self._commands):
                self.debugger.take({"command": command, "seq": 2 + number})

    def run(self) -> None:
        """Stop in code that runs as IPython runs a cell."""

        def run_code() -> None:
            exec(compile("stop(frame())", CELL, "exec"), {"stop": self.debugger.stop_at, "frame": sys._getframe})

        run_code()


def test_stopped_rank_goes_on_if_no_client_notices_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "DEBUG_NOTICE_SECONDS", 0.01)
    stopping = Stopping()
    stopping.run()
    assert not stopping.debugger.is_attached
    assert stopping.held == [True, False]
    assert "this rank goes on and stops no more" in capsys.readouterr().err
    stopping.debugger.take({"command": "noticed", "seq": 9})
    assert not stopping.responses["noticed"]["success"]


def test_stopped_rank_waits_for_a_client_that_has_noticed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEBUG_NOTICE_SECONDS", 0.01)
    stopping = Stopping("noticed", "stackTrace", "continue")
    stopping.run()
    assert stopping.debugger.is_attached


def test_pause_that_follows_continue_at_once_is_kept() -> None:
    stopping = Stopping("continue", "pause")
    is_pausing = []

    def run_code() -> None:
        names = {"stop": stopping.debugger.stop_at, "frame": sys._getframe}
        exec(compile("stop(frame())", CELL, "exec"), names)
        is_pausing.append(stopping.debugger._tracer.is_pausing)

    before = sys.gettrace()
    sys.settrace(None)  # that of a coverage tool
    try:
        run_code()
    finally:
        stopping.debugger.end_cell()
        sys.settrace(before)
    for thread in threading.enumerate():
        if thread.name == "disttrain pause":
            thread.join()
    assert is_pausing == [True]
