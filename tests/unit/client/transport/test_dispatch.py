"""Routing of messages before and after the ranks of a launch are watched."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from jupyter_disttrain.client.startup.cluster_state import ClusterState
from jupyter_disttrain.client.startup.registration import Registration
from jupyter_disttrain.client.transport.dispatch import MessageDispatcher
from jupyter_disttrain.client.transport.link import FIGURES
from jupyter_disttrain.config.cluster import ClusterConfig
from jupyter_disttrain.protocol.rank_death import RankDeath

from ..recorded import RecordedLaunch, death

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_disttrain.client.lifecycle import Lifecycle


class Recorder:
    """Keep what is passed on."""

    def __init__(self) -> None:
        self.received: list[str] = []

    def on_message(self, channel: str, message: Any) -> None:
        self.received.append(f"{channel} {message['content']}")

    def on_lost(self) -> None:
        self.received.append("lost")


@pytest.fixture
def dispatcher() -> MessageDispatcher:
    state = ClusterState.before_start(ClusterConfig())
    state.is_started = True
    return MessageDispatcher(state, Registration(state))


def stream(text: str) -> dict[str, Any]:
    return {"header": {"msg_type": "stream", "msg_id": text}, "parent_header": {}, "content": text}


def test_messages_are_held_until_the_dispatcher_is_opened_and_passed_on_once(dispatcher: MessageDispatcher) -> None:
    recorder = Recorder()
    dispatcher.on_message("iopub", stream("second"))
    dispatcher.on_message("iopub", stream("third"))
    dispatcher.open(recorder, [stream("first"), stream("second")])
    dispatcher.on_message("iopub", stream("first"))
    dispatcher.on_message("iopub", stream("fourth"))
    assert recorder.received == ["iopub first", "iopub second", "iopub third", "iopub fourth"]


def test_reply_to_a_request_that_is_known_only_later_reaches_its_handler(dispatcher: MessageDispatcher) -> None:
    taken: list[str] = []
    recorder = Recorder()
    dispatcher._state.link = cast("Any", SimpleNamespace(take_reply=lambda message: taken.append(message["content"])))
    dispatcher.on_message("shell", stream("reply"))
    dispatcher.open(recorder)
    assert taken == ["reply"]
    assert recorder.received == []


def test_loss_of_the_controller_is_reported_once_whenever_it_comes(dispatcher: MessageDispatcher) -> None:
    early, late = Recorder(), Recorder()
    dispatcher.on_lost()
    dispatcher.open(early)
    assert early.received == ["lost"]
    other = MessageDispatcher(dispatcher._state, dispatcher._registration)
    other.open(late)
    other.on_lost()
    assert late.received == ["lost"]


def test_message_that_comes_while_others_are_passed_on_follows_them(dispatcher: MessageDispatcher) -> None:
    is_passed_on, may_return = threading.Event(), threading.Event()

    class Slow(Recorder):
        def on_message(self, channel: str, message: Any) -> None:
            is_passed_on.set()
            assert may_return.wait(60)
            super().on_message(channel, message)

    recorder = Slow()
    dispatcher.on_message("iopub", stream("first"))
    dispatcher.on_message("iopub", stream("second"))
    opening = threading.Thread(target=dispatcher.open, args=(recorder,))
    opening.start()
    assert is_passed_on.wait(60)
    live = threading.Thread(target=dispatcher.on_message, args=("iopub", stream("third")))
    live.start()
    may_return.set()
    live.join()
    opening.join()
    assert recorder.received == ["iopub first", "iopub second", "iopub third"]


def test_held_message_that_cannot_be_handled_does_not_end_the_start(
    dispatcher: MessageDispatcher, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    dispatcher.on_message("iopub", {"header": {"msg_type": "stream"}})
    dispatcher.on_message("iopub", stream("next"))
    dispatcher.open(recorder)
    assert recorder.received == ["iopub next"]
    assert "a message on iopub could not be handled" in caplog.text


def test_deaths_and_figures_of_starting_ranks_are_held_and_their_output_is_not(
    dispatcher: MessageDispatcher,
) -> None:
    record = RankDeath(engine="1", pid=1, host="vm", signal_number=9)
    dispatcher._state.is_started = False
    recorder = Recorder()
    dispatcher.on_message("iopub", stream("output of a startup file"))
    dispatcher.on_message(FIGURES, {"header": {"msg_type": "rank_vitals"}, "content": b"vitals"})
    dispatcher.on_message("iopub", {"header": {"msg_type": RankDeath.msg_type}, "content": record.to_content()})
    dispatcher.open(recorder)
    assert recorder.received == ["figures b'vitals'", f"iopub {record.to_content()}"]


def test_observer_that_only_asks_holds_no_messages(dispatcher: MessageDispatcher) -> None:
    dispatcher.open(None)
    dispatcher.on_message("iopub", stream("output"))
    dispatcher.on_lost()
    assert dispatcher._held == []


@pytest.mark.parametrize("again", [False, True], ids=["start", "reset"])
def test_death_before_the_ranks_are_watched_is_handled(
    again: bool, started: Callable[..., Lifecycle], monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced: list[int] = []
    start = RecordedLaunch.start

    def start_and_die(launch: RecordedLaunch) -> None:
        monkeypatch.setattr(launch.replacer, "replace", replaced.append)
        monkeypatch.setattr(launch, "write", lambda: None)
        start(launch)
        launch.dispatcher.on_message("iopub", death(launch, 1))

    if again:
        lifecycle = started()
        monkeypatch.setattr(RecordedLaunch, "start", start_and_die)
        lifecycle.reset()
    else:
        monkeypatch.setattr(RecordedLaunch, "start", start_and_die)
        lifecycle = started()
    supervisor = lifecycle.session.supervisor
    assert supervisor.wait_until_settled(60)
    assert replaced, "rank 1 was not replaced"
