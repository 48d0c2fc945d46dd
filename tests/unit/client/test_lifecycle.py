"""Start, reset and end of the ranks of a session, with ranks that are only records."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from jupyter_disttrain.client import attach, session
from jupyter_disttrain.client.startup.processes import Processes
from jupyter_disttrain.config.cluster import ClusterConfig
from jupyter_disttrain.errors import ClusterClosedError, LaunchError, RankFailure, UsageError
from jupyter_disttrain.process_table import start_time
from jupyter_disttrain.protocol.messages import Asked

from .recorded import RecordedLaunch, die, join_background

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_disttrain.client.cells.cell_run import CellRun
    from jupyter_disttrain.client.lifecycle import Lifecycle


class Ends:
    """A listener that counts the ends of its cell."""

    def __init__(self) -> None:
        self.ended = 0

    def on_events(self, _events: Any, _run: CellRun) -> None:
        pass

    def on_end(self, _run: CellRun) -> None:
        self.ended += 1

    def on_late(self, event: Any) -> Any:
        return event


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("end", ["reset", "shutdown"])
def test_cell_is_abandoned_before_its_ranks_end(
    end: str, started: Callable[..., Lifecycle], monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    lifecycle = started()
    run = lifecycle.session.run("1", block=False)

    def die_or_fail() -> None:
        if fails:
            raise LaunchError("scancel refused")
        for rank in range(2):
            die(lifecycle, rank)

    monkeypatch.setattr(lifecycle.session.launch, "stopping", die_or_fail)
    with pytest.raises(LaunchError, match="scancel refused") if fails else nullcontext():
        getattr(lifecycle, end)()
    with pytest.raises(
        ClusterClosedError,
        match=r"was (reset while the cell ran; run|shut down; start one)",
    ):
        run.wait()


def test_interrupt_of_a_cell_whose_cluster_has_ended_ends_the_cell(started: Callable[..., Lifecycle]) -> None:
    lifecycle, listener = started(), Ends()
    run = lifecycle.session.run("1", block=False, listener=listener)
    lifecycle.session.launch.state.link = None
    with pytest.raises(ClusterClosedError, match="was shut down"):
        run.wait(timeout_s=0.0)
    assert listener.ended == 1


def test_closed_cluster_starts_no_ranks_and_is_not_left(started: Callable[..., Lifecycle]) -> None:
    lifecycle = started(keep=False)
    lifecycle.shutdown()
    with pytest.raises(ClusterClosedError, match="was shut down"):
        lifecycle.reset()
    assert len(RecordedLaunch.started) == 1


def test_detach_waits_for_a_reset(started: Callable[..., Lifecycle], monkeypatch: pytest.MonkeyPatch) -> None:
    lifecycle = started()
    monkeypatch.setattr(
        lifecycle.session, "config", ClusterConfig(n=2, launcher="local", backend="none", name="recorded", keep=True)
    )
    monkeypatch.setattr(attach, "let_begin", lambda _launch: None)
    monkeypatch.setattr(lifecycle, "watch", lambda: None)
    is_starting, may_start, left = threading.Event(), threading.Event(), list[object]()

    def wait() -> None:
        is_starting.set()
        assert may_start.wait(60)

    monkeypatch.setattr(RecordedLaunch, "starting", staticmethod(wait))
    monkeypatch.setattr(RecordedLaunch, "leave", lambda launch, _because: left.append(launch))
    reset = threading.Thread(target=lifecycle.reset)
    reset.start()
    assert is_starting.wait(60)
    detach = threading.Thread(target=attach.detach, args=(lifecycle,))
    detach.start()
    may_start.set()
    reset.join()
    detach.join()
    assert left == RecordedLaunch.started[1:], "the new ranks are left, not the ended ones"


@pytest.mark.parametrize(
    ("policy", "after"),
    [
        ("reset", "all ranks are started again, with fresh variables (--on-rank-death reset)"),
        ("stop", "the cluster ends (--on-rank-death stop)"),
    ],
)
def test_end_of_the_other_ranks_is_reported_as_configured(
    policy: str, after: str, started: Callable[..., Lifecycle]
) -> None:
    lifecycle = started(on_rank_death=policy)
    session = lifecycle.session
    run = session.run("1", "1", block=False)
    session.supervisor.note("of before")
    die(lifecycle, 1)
    with pytest.raises(RankFailure) as caught:
        run.wait()
    assert after in "".join(caught.value._render_traceback_())
    cause = r"rank 1 on vm died: was killed by SIGKILL.*\(--on-rank-death"
    join_background()
    if policy == "stop":
        with pytest.raises(ClusterClosedError, match=rf"'recorded' was ended, because {cause} stop\); start one"):
            session.run("1")
    else:
        run = session.run("1", block=False)
        notes = session.supervisor.take_notes()
        assert "of before" in [*caught.value.notes, *notes]
        assert notes[-1].startswith("all ranks were started again, with fresh variables: rank 1 on vm died")


def test_notes_of_the_ended_ranks_are_returned(started: Callable[..., Lifecycle]) -> None:
    lifecycle = started()
    lifecycle.session.supervisor.note("of before")
    assert lifecycle.reset() == ["of before"]


@pytest.mark.parametrize(("what", "fails"), [("reset", "starting"), ("reset", "stopping"), ("stop", "stopping")])
def test_error_of_an_action_of_the_side_panel_is_reported(
    what: str, fails: str, started: Callable[..., Lifecycle], monkeypatch: pytest.MonkeyPatch
) -> None:
    lifecycle = started()
    session = lifecycle.session

    def fail() -> None:
        raise LaunchError("scancel refused")

    monkeypatch.setattr(RecordedLaunch, fails, staticmethod(fail))
    asked = Asked(what=what, token="1", until_s=float("inf"))
    metadata = {"engine": session.launch.table[0].engine}
    header = {"msg_type": Asked.msg_type}
    session.launch.dispatcher.on_message(
        "iopub", {"header": header, "metadata": metadata, "content": asked.to_content()}
    )
    join_background()
    with pytest.raises(ClusterClosedError, match="scancel refused; start one with %dist_init"):
        session.run("1")


def test_refused_reset_of_the_side_panel_is_noted(
    started: Callable[..., Lifecycle], monkeypatch: pytest.MonkeyPatch
) -> None:
    lifecycle = started()

    def refuse() -> None:
        raise UsageError("the ranks of a job")

    monkeypatch.setattr(lifecycle, "_check_restartable", refuse)
    lifecycle.reset_because("it was requested in the side panel")
    join_background()
    assert lifecycle.session.supervisor.take_notes() == ["reset failed: the ranks of a job"]


def test_cell_is_not_sent_to_the_ranks_of_a_reset_that_came_meanwhile(
    started: Callable[..., Lifecycle], monkeypatch: pytest.MonkeyPatch
) -> None:
    lifecycle = started()
    monkeypatch.setattr(session, "restore_group", lambda *_: lifecycle.reset())
    with pytest.raises(ClusterClosedError, match="was reset before the cell ran; run it again"):
        lifecycle.session.run("1")


def test_reason_of_the_first_end_is_kept(started: Callable[..., Lifecycle]) -> None:
    lifecycle = started()
    lifecycle.shutdown("has lost its nodes")
    lifecycle.leave_because("no reply")
    join_background()
    lifecycle.shutdown()
    with pytest.raises(ClusterClosedError, match="has lost its nodes"):
        lifecycle.reset()


def test_process_that_has_the_pid_of_an_ended_launcher_is_not_recorded() -> None:
    own = psutil.Process()
    processes = [SimpleNamespace(process=own), SimpleNamespace(process=SimpleNamespace(pid=own.pid))]
    for each, is_launcher in zip(processes, (True, False), strict=True):
        each.process.is_running = lambda is_launcher=is_launcher: is_launcher
        cluster = SimpleNamespace(
            _cluster=SimpleNamespace(controller=None), _engines=[each], _inherited=lambda _role: []
        )
        births = Processes.births.fget(cluster)  # type: ignore[attr-defined]
        assert births == {"controller": {}, "launcher": {str(own.pid): start_time(own.pid)} if is_launcher else {}}
