"""A rank's exit while a cell has left something else in place of the rank's streams."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

from jupyter_disttrain.protocol import time_limits
from jupyter_disttrain.rank import rank_exit
from jupyter_disttrain.rank.startup import app

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_closed_streams_cost_no_exit_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    closed = (tmp_path / "log").open("w")
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    monkeypatch.setattr(sys, "stderr", closed)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "kill", lambda _pid, number: done.append(number))
    monkeypatch.setattr(app, "_exit", SimpleNamespace(run=lambda: done.append("exit functions")))
    app._end(signal.SIGTERM, None)
    assert done == ["exit functions", signal.SIGTERM]


def test_thread_that_never_ends_is_listed_in_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_exit, "THREADS_SECONDS", time_limits.THREADS_SECONDS / 100)
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    log, closed = sys.stderr, io.StringIO()
    closed.close()
    the_exit, end = rank_exit.RankExit(), threading.Event()
    thread = threading.Thread(target=end.wait, name="waits")
    thread.start()
    monkeypatch.setattr(sys, "stderr", closed)
    try:
        the_exit._wait_for_threads()
    finally:
        end.set()
        monkeypatch.setattr(sys, "stderr", log)
    assert capsys.readouterr().err == "ended by the rank's exit before they finished: waits\n"
