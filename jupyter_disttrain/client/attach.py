"""Attach to a cluster that outlived its notebook.

Covers: connecting to its ranks, taking over the cells that had not ended, the output and the deaths that were missed.
Does not cover: finding clusters (``client.registry.cluster_file``), observing one without the lease
(``client.registry.observer``).

Replies and output from now on arrive by themselves, because the link has the identity of the earlier one. Nannies
replay the output since the cell began, and ranks repeat a reply that no client received.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from concurrent.futures import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_client.session import DELIM

from ..errors import LaunchError, UsageError
from ..protocol.messages import OPTIONS, NannyHello, RankDeath
from ..protocol.requests import RepeatHello, RepeatReply, RepeatReplyInOrder, Replay
from ..protocol.states import RankState
from ..protocol.time_limits import ATTACH_ANSWER_SECONDS, ATTACH_HEARD_SECONDS, BEGIN_SECONDS, RANK_SECONDS
from .startup.launch import Launch
from .startup.registration import as_message

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from .cells.cell_run import CellRun
    from .cells.executor import Cells
    from .recovery.supervisor import Guardian
    from .registry.cluster_file import ClusterFile
    from .startup.rank_table import RankEntry
    from .transport.link import Message

REPLY_LOST = "the cell has ended here; how, only the notebook knew that ran it"
NEVER_CAME = "the cell was lost on its way here when the notebook ended, and did not begin; run it again"

log = logging.getLogger(__name__)


class Gate:
    """Hold messages back until the earlier ones are known."""

    def __init__(self, pass_on: Callable[[str, Message], None]) -> None:
        self._pass_on = pass_on
        self._lock = threading.Lock()
        self._held: list[tuple[str, Message]] | None = []
        self._known: set[str] = set()
        self.heard = threading.Event()  # set at a nanny's hello: the subscription is active from then on

    def __call__(self, channel: str, message: Message) -> None:
        """Handle a message; called on the link's thread."""
        if message["header"]["msg_type"] == NannyHello.msg_type:
            self.heard.set()
            return
        with self._lock:
            if self._held is not None:
                self._held.append((channel, message))
                return
            if message["header"].get("msg_id") in self._known:
                return
        self._pass_on(channel, message)

    def open(self, earlier: list[Message], on_reply: Callable[[Message], bool]) -> None:
        """Pass on the earlier messages, then those held back, without duplicates; hold back nothing from now on."""
        with self._lock:
            self._known = {message["header"]["msg_id"] for message in earlier if "msg_id" in message["header"]}
            held, self._held = self._held or [], None
            for message in earlier:
                self._pass_on("iopub", message)
            for channel, message in held:
                if channel == "shell":
                    on_reply(message)
                elif message["header"].get("msg_id") not in self._known:
                    self._pass_on(channel, message)


def join(there: ClusterFile, gate: Gate, on_lost: Callable[[], None]) -> Launch:
    """Connect to the ranks of a cluster and take its lease.

    Raises
    ------
    UsageError
        If another process has just taken the lease.
    LaunchError
        If its nannies don't reply.
    """
    launch = Launch(there.load_config(), gate, on_lost, there)
    try:
        launch.join()
        _hear(launch, gate)
    except BaseException as error:  # also a KeyboardInterrupt: the cluster must be left so that others can attach
        launch.leave()
        if isinstance(error, BlockingIOError):
            raise UsageError(f"the cluster {there.name!r} was just taken by another process") from error
        raise
    return launch


def _hear(launch: Launch, gate: Gate) -> None:
    """Ask nannies to publish until the subscription is active: this client misses anything published before."""
    deadline = time.monotonic() + ATTACH_ANSWER_SECONDS
    while not gate.heard.wait(ATTACH_HEARD_SECONDS):
        if time.monotonic() > deadline:
            cluster_id = launch.folders.cluster_id
            raise LaunchError(f"no rank of {cluster_id} answers; jupyter disttrain stop {cluster_id} ends the cluster")
        for entry in launch.table:
            launch.open_link.request(entry.nanny, RepeatHello())


def take_up(
    launch: Launch, guardian: Guardian, cells: Cells, gate: Gate, interrupt: Callable[..., None]
) -> list[CellRun]:
    """Take over the cells that had not ended when the earlier notebook left, with all their output; return them."""
    runs = [cells.adopt(cell, interrupt) for cell in cells.ledger.open_cells]
    table = launch.table
    deaths = _deaths(launch)
    asked = [entry for entry in table if entry.state == RankState.RUNNING and entry.engine not in deaths]
    told = {entry.engine: _ask_nanny(launch, entry) for entry in asked}
    earlier = [message for entry in asked for message in _said(launch, entry, told[entry.engine])]
    gate.open([*earlier, *deaths.values()], launch.open_link.take_reply)
    repeated = [_ask_reply(launch, entry) for entry in table if entry.engine not in deaths]
    wait(repeated, RANK_SECONDS)
    _mend(launch, guardian)
    return runs


def _ask_nanny(launch: Launch, entry: RankEntry) -> Future[Message]:
    return launch.open_link.request(entry.nanny, Replay())


def _said(launch: Launch, entry: RankEntry, told: Future[Message]) -> list[Message]:
    """Return the messages that a rank has published since its cell began, which no client may have received."""
    if not wait([told], ATTACH_ANSWER_SECONDS).done or told.exception() is not None:
        return []  # the rank died in the meantime; its log has all output
    reply = told.result()
    frames = iter(reply["buffers"])
    unpack = launch.open_link.session.unpack
    messages = [_lost(launch, entry)] if reply["content"]["lost"] else []
    for count in reply["content"]["counts"]:
        parts = [bytes(next(frames)) for _ in range(count)]
        start = parts.index(DELIM) + 2  # the signature follows the delimiter
        header, parent, metadata, content = map(unpack, parts[start : start + 4])
        buffers = parts[start + 4 :]
        messages.append(
            {
                "header": header,
                "parent_header": parent,
                "metadata": metadata,
                "content": content,
                "buffers": buffers,
            }
        )
    return messages


def _lost(launch: Launch, entry: RankEntry) -> Message:
    """Return a message for the user: the rank printed more than its nanny keeps."""
    text = f"... what it said before is in {launch.folders.rank_log(entry.info.rank)}\n"
    return {
        "header": {"msg_type": "stream"},
        "parent_header": {"msg_id": entry.request},
        "metadata": {"engine": entry.engine},
        "content": {"name": "stderr", "text": text},
    }


def _deaths(launch: Launch) -> dict[str, Message]:
    """Return the deaths that nannies have recorded in files, by engine."""
    found = {}
    for entry in launch.table:
        word = Path(launch.folders.profile) / f"death-{entry.engine}.json"
        if word.exists():
            found[entry.engine] = as_message(_read_death(word, entry))
    return found


def _read_death(word: Path, entry: RankEntry) -> RankDeath:
    """Return the death that a nanny has recorded; an unreadable file still means that the rank died."""
    try:
        return RankDeath.from_content(json.loads(word.read_text()))
    except (OSError, ValueError, TypeError, AttributeError):
        log.warning("%s can't be read", word)
        return RankDeath(engine=entry.engine, pid=entry.info.pid, host=entry.info.host)


def _ask_reply(launch: Launch, entry: RankEntry, *, beside: bool = True) -> Future[Message]:
    """Ask a rank to repeat the reply to its cell, which no client may have received.

    With ``beside`` the rank serves the request while a cell may run. Otherwise it serves it after all earlier requests:
    the reply of a cell that has not ended by then was lost with the notebook.
    """
    link = launch.open_link
    kind = RepeatReply if beside else RepeatReplyInOrder
    future = link.request(entry.engine, kind(cell=entry.request))

    def on_answer(done: Future[Message]) -> None:
        if done.exception() is not None or done.result()["content"]["status"] != "ok":
            return  # the cluster was closed in the meantime
        answer = done.result()
        content: dict[str, Any] = answer["content"]
        launch.generation = max(launch.generation, content["generation"])
        if content["ended"]:
            _hand_in(launch, entry, content["reply"], content["metadata"], answer["buffers"])
        elif entry.state == RankState.IDLE:
            entry.group = content["group"]
            launch.steps.replied(entry.info.rank, content["group"], content, failed=False)
        elif beside and not content["runs"]:
            _ask_reply(launch, entry, beside=False)
        elif not beside:
            words = REPLY_LOST if content["begun"] else NEVER_CAME
            reply = {"status": "error", "ename": "ReplyLost", "evalue": words, "traceback": []}
            _hand_in(launch, entry, reply, {"group": content["group"]}, [])

    future.add_done_callback(on_answer)
    return future


def let_begin(launch: Launch) -> None:
    """Wait until the cells that were sent have reached their ranks: closing the sockets may lose messages in transit.

    A rank that does not reply counts as running its cell: that cell lets no other thread run.
    """
    link = launch.open_link
    waiting = [entry for entry in launch.table if entry.state == RankState.RUNNING]
    deadline = time.monotonic() + BEGIN_SECONDS
    while waiting and time.monotonic() < deadline:
        asked = [(entry, link.request(entry.engine, RepeatReply(cell=entry.request))) for entry in waiting]
        wait([future for _, future in asked], RANK_SECONDS)
        waiting = [entry for entry, future in asked if _is_on_its_way(future)]
        time.sleep(ATTACH_HEARD_SECONDS if waiting else 0.0)


def _is_on_its_way(told: Future[Message]) -> bool:
    if not told.done() or told.exception() is not None:
        return False
    content = told.result()["content"]
    return content["status"] == "ok" and not content["begun"]


def _hand_in(launch: Launch, entry: RankEntry, reply: Message, told: Message, buffers: list[Any]) -> None:
    launch.open_link.take_reply(
        {
            "header": {"msg_type": "execute_reply"},
            "parent_header": {"msg_id": entry.request},
            "metadata": {OPTIONS: told},
            "content": reply,
            "buffers": buffers,
        }
    )


def _mend(launch: Launch, guardian: Guardian) -> None:
    """Form the process group again if the earlier notebook ended while it was being formed.

    Ranks that still wait for each other there are released first.
    """
    tags = {entry.group for entry in launch.table if entry.state != RankState.DEAD}
    formed = {tag for tag in tags if tag.startswith("session/")}
    if "broken" in tags or len(formed) > 1:
        guardian.release()
        for entry in launch.table:
            if entry.state == RankState.IDLE:
                guardian.on_reply(entry.info.rank, failed=True, broken=True)
