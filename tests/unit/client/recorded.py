"""Ranks that are only records: a launch without processes, and a link without sockets."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, cast

from jupyter_disttrain.client.startup.launch import Launch
from jupyter_disttrain.client.startup.rank_table import RankEntry
from jupyter_disttrain.client.startup.registration import as_message
from jupyter_disttrain.launchers.placement import Placement
from jupyter_disttrain.protocol.rank_death import RankDeath

from ..records import rank_info

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_disttrain.client.lifecycle import Lifecycle
    from jupyter_disttrain.client.transport.link import Message
    from jupyter_disttrain.protocol.requests import Request


class RecordedLink:
    """Keep what is sent in place of sockets; ``replies`` are the handlers of the ranks' replies."""

    def __init__(self) -> None:
        self.session = cast("Any", type("Packer", (), {"pack": staticmethod(lambda content: content)}))
        self.replies: dict[str, Callable[[Message], None]] = {}
        self.count = 0

    def make(self, msg_type: str, content: Any, metadata: Any = None) -> Message:
        self.count += 1
        header = {"msg_type": msg_type, "msg_id": str(self.count)}
        return {"header": header, "content": content, "metadata": metadata}

    def post(self, target: str, _message: Message, *, on_reply: Callable[[Message], None]) -> None:
        self.replies[target] = on_reply

    def request(self, _target: str, _request: Request) -> Future[Message]:
        future: Future[Message] = Future()
        future.set_result({"content": {"status": "ok"}})
        return future


class RecordedLaunch(Launch):
    """Two ranks without processes; ``stopping`` is called where the processes would end."""

    def decide(self) -> None:
        self.state.placement, self.state.n, self.state.is_decided = Placement(), 2, True
        self.state.folders = cast("Any", type("Folders", (), {"stop_mark": type("Mark", (), {"exists": bool})}))

    def start(self) -> None:
        self.started.append(self)
        self.starting()
        self.table[:] = [
            RankEntry(
                info=rank_info(rank, 2), engine=f"{id(self)}-{rank}", nanny=f"nanny{rank}", nanny_pid=1, group="none"
            )
            for rank in range(2)
        ]
        self.state.link, self.state.is_started = cast("Any", RecordedLink()), True
        self.state.steps.formed({rank: {} for rank in range(2)}, "1")

    def stop(self) -> None:
        link, self.state.link = self.state.link, None
        if link is not None:
            self.stopping()

    def leave(self, because: str = "") -> None:
        self.state.link, self.state.closed_because = None, because

    starting: Callable[[], None] = staticmethod(lambda: None)
    stopping: Callable[[], None] = staticmethod(lambda: None)
    started: list[RecordedLaunch]


def death(launch: Launch, rank: int) -> Message:
    entry = launch.table[rank]
    return as_message(RankDeath(engine=entry.engine, pid=entry.info.pid, host=entry.info.host, signal_number=9))


def die(lifecycle: Lifecycle, rank: int) -> None:
    launch = lifecycle.session.launch
    launch.dispatcher.on_message("iopub", death(launch, rank))


def join_background() -> None:
    """Wait for the actions that run on threads of their own."""
    for thread in threading.enumerate():
        if thread.name in ("disttrain end", "disttrain leave", "disttrain reset", "disttrain recovery"):
            thread.join()
