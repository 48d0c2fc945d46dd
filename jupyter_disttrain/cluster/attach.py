"""Join a cluster that outlived its notebook.

Covers: reaching its ranks, taking up the cells whose end nobody saw, what was said meanwhile, who died meanwhile.
Does not cover: which clusters there are (``registry``), looking at one from outside (``visitor``).

What ranks say from now on arrives by itself, because the link has the name that the earlier one had. What they said
since the cell began, their nannies tell; a reply that nobody was there to take, the rank repeats.
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
from ..messages import NANNY_REQUEST, OPTIONS, RANK_REQUEST, NannyHello, RankDeath
from .arrivals import as_message
from .start import Launch

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from .cell_run import CellRun
    from .cells import Cells
    from .guardian import Guardian
    from .link import Message
    from .rank_table import RankEntry
    from .registry import ClusterFile

HEARD_SECONDS = 0.02  # between two requests for a word
ANSWER_SECONDS = 5.0  # for nannies, which never wait for anybody
BEGIN_SECONDS = 2.0  # for ranks to receive the cells that were sent last
REPLY_LOST = "the cell has ended here; how, only the notebook knew that ran it"
NEVER_CAME = "the cell was lost on its way here when the notebook ended, and did not begin; run it again"
RANK_SECONDS = 1.0  # for ranks, which may hold the GIL; what they say later is taken as well

log = logging.getLogger(__name__)


class Gate:
    """Holds back what arrives until what came before it is known."""

    def __init__(self, pass_on: Callable[[str, Message], None]) -> None:
        self._pass_on = pass_on
        self._lock = threading.Lock()
        self._held: list[tuple[str, Message]] | None = []
        self._known: set[str] = set()
        self.heard = threading.Event()  # a nanny's hello: whatever is published from then on arrives

    def __call__(self, channel: str, message: Message) -> None:
        """Take a message; called on the link's thread."""
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
        """Pass on what came earlier, then what was held back without what is the same; from now on hold nothing."""
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
    """Reach the ranks of a cluster.

    Raises
    ------
    UsageError
        If another process was faster.
    LaunchError
        If its nannies don't answer.
    """
    launch = Launch(there.load_config(), gate, on_lost, there)
    try:
        launch.join()
        _hear(launch, gate)
    except BaseException as error:  # an interrupt too: the cluster must be there for the next who asks
        launch.leave()
        if isinstance(error, BlockingIOError):
            raise UsageError(f"the cluster {there.name!r} was just taken by another process") from error
        raise
    return launch


def _hear(launch: Launch, gate: Gate) -> None:
    """Have nannies publish a word until one is heard: what is published before that, this client misses."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while not gate.heard.wait(HEARD_SECONDS):
        if time.monotonic() > deadline:
            cluster_id = launch.folders.cluster_id
            raise LaunchError(f"no rank of {cluster_id} answers; jupyter disttrain stop {cluster_id} ends the cluster")
        for entry in launch.table:
            launch.open_link.request(entry.nanny, NANNY_REQUEST, {"do": "hello"})


def take_up(
    launch: Launch, guardian: Guardian, cells: Cells, gate: Gate, interrupt: Callable[..., None]
) -> list[CellRun]:
    """Take up the cells whose end nobody saw, with all they have said; return them."""
    runs = [cells.adopt(cell, interrupt) for cell in cells.ledger.open_cells]
    table = launch.table
    deaths = _deaths(launch)
    asked = [entry for entry in table if entry.state == "running" and entry.engine not in deaths]
    told = {entry.engine: _ask_nanny(launch, entry) for entry in asked}
    earlier = [message for entry in asked for message in _said(launch, entry, told[entry.engine])]
    gate.open([*earlier, *deaths.values()], launch.open_link.take_reply)
    repeated = [_ask_reply(launch, entry) for entry in table if entry.engine not in deaths]
    wait(repeated, RANK_SECONDS)
    _mend(launch, guardian)
    return runs


def _ask_nanny(launch: Launch, entry: RankEntry) -> Future[Message]:
    return launch.open_link.request(entry.nanny, NANNY_REQUEST, {"do": "tell"})


def _said(launch: Launch, entry: RankEntry, told: Future[Message]) -> list[Message]:
    """Return what a rank has published since its cell began, as the messages that nobody may have heard."""
    if not wait([told], ANSWER_SECONDS).done or told.exception() is not None:
        return []  # it died meanwhile; all text is in its log
    reply = told.result()
    frames = iter(reply["buffers"])
    unpack = launch.open_link.session.unpack
    messages = [_lost(launch, entry)] if reply["content"]["lost"] else []
    for count in reply["content"]["counts"]:
        parts = [bytes(next(frames)) for _ in range(count)]
        start = parts.index(DELIM) + 2  # after the delimiter stands the signature
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
    """Say that a rank has said more than its nanny keeps."""
    text = f"... what it said before is in {launch.folders.rank_log(entry.info.rank)}\n"
    return {
        "header": {"msg_type": "stream"},
        "parent_header": {"msg_id": entry.request},
        "metadata": {"engine": entry.engine},
        "content": {"name": "stderr", "text": text},
    }


def _deaths(launch: Launch) -> dict[str, Message]:
    """Return the deaths that nannies have left word of, by engine."""
    found = {}
    for entry in launch.table:
        word = Path(launch.folders.profile) / f"death-{entry.engine}.json"
        if word.exists():
            found[entry.engine] = as_message(_read_death(word, entry))
    return found


def _read_death(word: Path, entry: RankEntry) -> RankDeath:
    """Return what a nanny has left word of; that there is a word says enough, whatever has become of it."""
    try:
        return RankDeath.from_content(json.loads(word.read_text()))
    except (OSError, ValueError, TypeError, AttributeError):
        log.warning("%s can't be read", word)
        return RankDeath(
            engine=entry.engine,
            pid=entry.info.pid,
            host=entry.info.host,
            exit_code=None,
            signal_number=None,
            crash="",
            stderr_tail="",
            expected=False,
        )


def _ask_reply(launch: Launch, entry: RankEntry, *, beside: bool = True) -> Future[Message]:
    """Ask a rank for the reply to its cell, which nobody may have been there to take.

    ``beside`` the cell that may run; otherwise behind all that was sent to the rank, so that a cell which has not ended
    by then is one whose reply was lost with the notebook.
    """
    link = launch.open_link
    future = link.request(entry.engine, RANK_REQUEST, {"do": "repeat", "cell": entry.request}, beside=beside)

    def on_answer(done: Future[Message]) -> None:
        if done.exception() is not None or done.result()["content"]["status"] != "ok":
            return  # the cluster was closed meanwhile
        answer = done.result()
        content: dict[str, Any] = answer["content"]
        launch.generation = max(launch.generation, content["generation"])
        if content["ended"]:
            _hand_in(launch, entry, content["reply"], content["told"], answer["buffers"])
        elif entry.state == "idle":
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
    """Wait until the cells that were sent have reached their ranks: what is on its way when sockets close may be lost.

    A rank that does not answer runs one that leaves nothing else a turn.
    """
    link = launch.open_link
    waiting = [entry for entry in launch.table if entry.state == "running"]
    deadline = time.monotonic() + BEGIN_SECONDS
    while waiting and time.monotonic() < deadline:
        asked = []
        for entry in waiting:
            request = {"do": "repeat", "cell": entry.request}
            asked.append((entry, link.request(entry.engine, RANK_REQUEST, request, beside=True)))
        wait([future for _, future in asked], RANK_SECONDS)
        waiting = [entry for entry, future in asked if _is_on_its_way(future)]
        time.sleep(HEARD_SECONDS if waiting else 0.0)


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
    """Have the group formed anew if the earlier notebook ended in the midst of that.

    Ranks that still wait for each other there are released first.
    """
    tags = {entry.group for entry in launch.table if entry.state != "dead"}
    formed = {tag for tag in tags if tag.startswith("session/")}
    if "broken" in tags or len(formed) > 1:
        guardian.release()
        for entry in launch.table:
            if entry.state == "idle":
                guardian.on_reply(entry.info.rank, failed=True, broken=True)
