"""Route every message of one launch, from the first hello on.

Covers: hellos and deaths of processes that start, messages that arrive before the ranks are watched.
Does not cover: replies to requests (``link``), what the messages mean (``client.session_messages``).

Messages are handled on the link's thread; those held back, on the thread that opens the dispatcher.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Protocol

from ...protocol.messages import NannyHello, RankHello
from ...protocol.rank_death import RankDeath
from .link import FIGURES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..startup.cluster_state import ClusterState
    from ..startup.registration import Registration
    from .link import Message

log = logging.getLogger(__name__)

_RECORDS = {record.msg_type: record for record in (RankHello, NannyHello, RankDeath)}


class Receiver(Protocol):
    """Receives the messages of ranks that are watched; see the module's docstring on threads."""

    def on_message(self, channel: str, message: Message) -> None:
        """Handle a message."""

    def on_lost(self) -> None:
        """Handle the loss of the controller: the ranks can't be reached any more."""


class MessageDispatcher:
    """Routes the messages of one launch.

    Hellos and deaths go to the registration. Once the ranks have started, all messages are held back until
    :meth:`open`. While they start, deaths, vitals and metrics are; output goes to the ranks' logs alone.
    """

    def __init__(self, state: ClusterState, registration: Registration) -> None:
        self._state = state
        self._registration = registration
        self._lock = threading.Lock()
        self._is_open = self._is_lost = False
        self._receiver: Receiver | None = None
        self._held: list[tuple[str, Message]] = []
        self._known: set[str] = set()  # IDs of messages that were passed on already
        self.is_subscribed = threading.Event()  # set at a nanny's hello: the subscription is active from then on

    def on_message(self, channel: str, message: Message) -> None:
        """Route a message that no request waits for; called on the link's thread."""
        record = _RECORDS.get(message["header"]["msg_type"])
        if record is not None:
            self._registration.on_record(record.from_content(message["content"]))
            if record is NannyHello:
                self.is_subscribed.set()
        if not self._is_open:
            with self._lock:
                if not self._is_open:
                    if self._state.is_started or channel == FIGURES or record is RankDeath:
                        self._held.append((channel, message))
                    return
        self._pass_on(channel, message)

    def on_lost(self) -> None:
        """Report the loss of the controller, at once or when the dispatcher is opened; called on the link's thread."""
        with self._lock:
            self._is_lost, receiver = True, self._receiver
        if receiver is not None:
            receiver.on_lost()

    def open(self, receiver: Receiver | None, earlier: Sequence[Message] = ()) -> None:
        """Pass on the earlier messages, those held back, without duplicates, and then each message at once.

        ``earlier`` were published before this process subscribed. Without a receiver, messages are dropped.
        """
        with self._lock:
            self._receiver = receiver
            for message in earlier:
                self._pass_on("iopub", message)
            self._known = {message["header"]["msg_id"] for message in earlier if "msg_id" in message["header"]}
            for channel, message in self._held:
                try:
                    if channel == "shell" and self._state.link is not None:
                        self._state.link.take_reply(message)  # the request may be known by now
                    else:
                        self._pass_on(channel, message)
                except Exception:
                    # One message that can't be read must not end the start, as on the link's thread.
                    log.exception("a message on %s could not be handled", channel)
            self._held.clear()
            self._is_open = True
            is_lost = self._is_lost
        if is_lost and receiver is not None:
            receiver.on_lost()

    def _pass_on(self, channel: str, message: Message) -> None:
        if self._receiver is not None and message["header"].get("msg_id") not in self._known:
            self._receiver.on_message(channel, message)
