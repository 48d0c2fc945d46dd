"""Rough handling and long sessions."""

from __future__ import annotations

import gc
import os
import queue
import re
import signal
import threading
import time
import weakref
from typing import TYPE_CHECKING

import psutil
import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.client import lifecycle, session
from jupyter_disttrain.client.cells import cell_run
from jupyter_disttrain.errors import GivenUpError, LaunchError, RankFailure
from jupyter_disttrain.launchers.folders import KEPT_RUNS, Folders
from jupyter_disttrain.sigint import PATIENT_INTERRUPTS

from ...support.listeners import IgnoringListener, Interrupter
from ...support.process_tools import wait_until
from ...support.recovery_tools import IGNORE_INTERRUPTS, send_signal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from jupyter_disttrain.client.cells.cell_run import CellRun
    from jupyter_disttrain.client.cells.events import Event


def nanny_of(cluster: Cluster, rank: int) -> psutil.Process:
    parent = psutil.Process(cluster.table[rank].info.pid).parent()
    assert parent is not None
    return parent


def test_interrupt_during_a_large_message_keeps_the_rank_usable(torchless: Cluster) -> None:
    endless = "from IPython.display import display\nwhile True:\n    display({'text/html': 'x' * 5_000_000}, raw=True)"

    class InterruptOnDisplay(IgnoringListener):
        """Interrupts at the first display, while the rank sends the next."""

        def on_events(self, events: Sequence[Event], run: CellRun) -> None:  # noqa: ARG002
            if events:
                torchless.interrupt()

    for _ in range(20):
        with pytest.raises(RankFailure, match="KeyboardInterrupt"):
            torchless.run(endless, 0, timeout_s=20, listener=InterruptOnDisplay())
        assert torchless.run("rank", timeout_s=20).results == {0: 0, 1: 1}


def test_orphaned_processes_of_a_rank_are_reaped(torchless: Cluster) -> None:
    torchless.run("import subprocess\nfor _ in range(5): subprocess.run(['sh', '-c', 'true >/dev/null 2>&1 &'])", 0)
    assert wait_until(
        lambda: [child.pid for child in nanny_of(torchless, 0).children()] == [torchless.table[0].info.pid]
    )


def test_unknown_request_to_a_nanny_has_no_effect(torchless: Cluster) -> None:
    assert send_signal(torchless, 0, 9999)["status"] == "error"
    assert send_signal(torchless, 0, 0) == {"status": "ok"}
    assert torchless.run("rank", 0).results == {0: 0}


def test_ended_cells_are_freed(torchless: Cluster) -> None:
    ended = [weakref.ref(torchless.run(f"print({number}); {number}")) for number in range(5)]
    torchless.run("pass")
    torchless.run("pass")
    gc.collect()
    assert [run() for run in ended] == [None] * 5
    link = torchless._session.launch.link
    assert link is not None
    assert link._pending == {}


def test_interrupt_during_an_event_loses_nothing(torchless: Cluster) -> None:
    class InterruptedListener(IgnoringListener):
        """Is interrupted while it handles the rank's first output."""

        def __init__(self) -> None:
            self.taken: list[Event] = []

        def on_events(self, events: Sequence[Event], run: CellRun) -> None:  # noqa: ARG002
            if events and not self.taken:
                os.kill(os.getpid(), signal.SIGINT)
            self.taken += events

    slow = InterruptedListener()
    with pytest.raises(RankFailure, match="KeyboardInterrupt"):
        torchless.run("import time\nprint('said')\ntime.sleep(1000)", 0, listener=slow)
    assert any(getattr(event, "text", "") == "said\n" for event in slow.taken)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_repeated_interrupts_return_control_even_if_a_listener_hangs(torchless: Cluster) -> None:
    hanging: queue.Queue[CellRun] = queue.Queue()

    class HungListener(IgnoringListener):
        def on_events(self, events: Sequence[Event], run: CellRun) -> None:  # noqa: ARG002
            hanging.put(run)
            while True:  # in pieces: a signal that comes just before a sleep would be handled after it
                time.sleep(0.05)

    # To the sleeping thread: the system may deliver a signal of the process to any other, which would not wake it.
    main = threading.main_thread().ident or 0

    def interrupt_repeatedly() -> None:
        run = hanging.get(timeout=60)
        for number in range(1, PATIENT_INTERRUPTS + 1):
            signal.pthread_kill(main, signal.SIGINT)
            assert wait_until(lambda number=number: run._held.pressed == number)  # type: ignore[misc]
        while not ended.wait(0.1):  # as an impatient user does
            signal.pthread_kill(main, signal.SIGINT)

    class EndRecorder(HungListener):
        def on_end(self, run: CellRun) -> None:  # noqa: ARG002
            ended.set()

    ended = threading.Event()
    thread = threading.Thread(target=interrupt_repeatedly)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        torchless.run("import time; time.sleep(5)", 0, listener=EndRecorder())
    thread.join()
    assert wait_until(lambda: torchless.table[0].state == "idle")


@pytest.mark.parametrize("stream", ["None", "type('Tee', (), {'write': lambda self, text: None})()"])
def test_cell_may_replace_a_stream_by_any_object(torchless: Cluster, stream: str) -> None:
    run = torchless.run(f"import sys; sys.stderr = sys.stdout = {stream}\nx = 2", 0)
    assert "after this cell, which has no write() and flush(); it was restored" in run.stderr[0]
    with pytest.raises(RankFailure, match="ZeroDivisionError"):
        torchless.run("1 / 0", 0)
    assert torchless.run("print('back', x)", 0).stdout[0] == "back 2\n"
    with pytest.raises(RankFailure, match="AttributeError"):
        torchless.run(f"import sys; sys.stdout = {stream}\n2", 0)  # IPython shows the value there
    assert torchless.run("print('again')", 0).stdout[0] == "again\n"


def test_child_process_exits_as_in_a_script(torchless: Cluster) -> None:
    code = (
        "import multiprocessing, time\n"
        "codes = []\n"
        "for _ in range(20):\n"
        "    child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(9,))\n"
        "    child.start(); child.terminate(); child.join(); codes.append(child.exitcode)\n"
        "set(codes)"
    )
    assert torchless.run(code, 0).results == {0: {-signal.SIGTERM}}


def test_ranks_start_inside_a_job_and_with_a_python_built_for_an_old_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PMIX_RANK", "0")  # Jupyter's own number, as under srun
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        "for module, name in (os, 'memfd_create'), (os, 'pidfd_open'), (signal, 'pidfd_send_signal'):\n"
        "    if hasattr(module, name): delattr(module, name)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    with Cluster(n=2, launcher="local", backend="none", name="old") as cluster:
        assert cluster.run("import os; rank, hasattr(os, 'pidfd_open')").results == {0: (0, False), 1: (1, False)}


def test_logs_of_a_running_cluster_are_kept(torchless: Cluster) -> None:
    torchless.run("print('in the log')")
    others = [Folders.make("other") for _ in range(KEPT_RUNS + 1)]
    try:
        assert "in the log" in torchless._session.launch.folders.rank_log(0).read_text()
    finally:
        for folders in others:
            folders.remove()


def test_abandoned_cell_ends_once_and_its_rank_may_return(
    torchless: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell_run, "GIVE_UP_SECONDS", 0.0)
    interrupter = Interrupter(lambda run: any(run.stdout.values()) and run.interrupts < 3)
    path = tmp_path / "let-go"
    code = f"{IGNORE_INTERRUPTS}kept = 'as it was'\nstay({str(path)!r})"
    with pytest.raises(GivenUpError, match=r"rank 1 has not ended the cell: .* the last resort, which loses variables"):
        torchless.run(code, 1, listener=interrupter)
    assert interrupter.ends == 1
    (left,) = torchless.running_cells
    assert left.running_now == {1}
    assert torchless.run("rank", 0).results == {0: 0}
    path.touch()
    assert wait_until(lambda: torchless.table[1].state == "idle")
    run = torchless.run("kept", 1)
    assert run.results == {1: "as it was"}
    (note,) = run.notes
    assert re.fullmatch(r"rank 1 has ended cell \d+ and kept its variables", note)
    assert torchless.running_cells == []


def test_ranks_that_are_not_killed_are_not_reported_as_replaced(
    torchless: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "CLUSTER_END_SECONDS", 0.1)
    monkeypatch.setattr(lifecycle, "CLUSTER_SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(session, "CLUSTER_SETTLE_SECONDS", 0.1)
    nannies = [psutil.Process(entry.nanny_pid) for entry in torchless.table]
    pids = [entry.info.pid for entry in torchless.table]
    for nanny in nannies:
        nanny.suspend()
    torchless._session.supervisor.note("of another rank")
    try:
        with pytest.raises(LaunchError, match="ranks 0-1 did not end: the nanny of a rank"):
            torchless.replace([0, 1])
    finally:
        for nanny in nannies:
            nanny.resume()
    monkeypatch.undo()
    assert wait_until(lambda: not {entry.info.pid for entry in torchless.table} & set(pids))
    run = torchless.run("rank")
    assert run.results == {0: 0, 1: 1}
    assert "of another rank" in run.notes
