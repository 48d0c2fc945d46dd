"""Attach to a cluster that outlived its notebook, or to the ranks of a job; detach from them.

Covers: connecting to the ranks, taking over the cells that had not ended, the output and the deaths that were missed.
Does not cover: finding clusters (``client.registry.cluster_file``), the file of a job and identifying its ranks
(``features.batch_jobs.client``), observing a cluster without the lease (``client.registry.observer``).

Replies and output from now on arrive by themselves, because the link has the identity of the earlier one. Nannies
replay the output since the cell began, and ranks repeat a reply that no client received.
"""

from __future__ import annotations

import json
import logging
import time
from concurrent.futures import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_client.session import DELIM

from ..errors import LaunchError, UsageError
from ..features.batch_jobs import client as batch_jobs
from ..launchers.folders import BROUGHT_METRICS
from ..protocol.messages import OPTIONS
from ..protocol.rank_death import RankDeath
from ..protocol.requests import RepeatHello, RepeatReply, RepeatReplyInOrder, Replay
from ..protocol.states import RankState
from ..protocol.time_limits import ATTACH_ANSWER_SECONDS, ATTACH_REPEAT_SECONDS, BEGIN_SECONDS, RANK_SECONDS
from ..sigint import deferred_interrupts
from .lifecycle import Lifecycle
from .registry.cluster_file import ClusterFile, find
from .session import Session
from .startup.launch import Launch
from .startup.registration import as_message
from .transport.ssh_tunnel import tunnel_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from ..protocol.connection_file import JobFile
    from .cells.cell_run import CellRun
    from .recovery.supervisor import Supervisor
    from .session_messages import SessionMessages
    from .startup.rank_table import RankEntry
    from .transport.link import Message

REPLY_LOST = "the cell has ended on this rank; its result was lost with the notebook that ran it"
NEVER_CAME = "the cell did not reach this rank before the notebook ended, and did not start; run it again"

log = logging.getLogger(__name__)


def attach(which: str | None, ssh: str, unless: Callable[[str], None]) -> Lifecycle:
    """Attach to a cluster; see :meth:`jupyter_disttrain.Cluster.attach`."""
    is_job = which is not None and batch_jobs.is_file(which)
    there = batch_jobs.find(str(which), ssh) if is_job else find(which, free=True)
    try:
        unless(there.name)
        lifecycle = _join_and_watch(there, str(which))
    except BaseException:  # also a KeyboardInterrupt must leave no tunnel open
        batch_jobs.let_go(there)
        raise
    lifecycle.keep_until_exit()
    return lifecycle


def _join_and_watch(there: ClusterFile | JobFile, which: str) -> Lifecycle:
    """Join a cluster that an earlier notebook has left, or a job whose ranks have not been identified yet."""
    started = time.monotonic()
    if isinstance(there, ClusterFile):
        session = Session(there.load_config())
        session.launch = join(there)
    else:
        session = Session(batch_jobs.config_of(there, batch_jobs.full_path(which)))
        session.launch = batch_jobs.JobLaunch(there, session.config)
        session.launch.decide()
        session.launch.start()
        session.is_first = True
    lifecycle = Lifecycle(session)
    try:
        with deferred_interrupts():
            lifecycle.watch()
        if session.is_first:
            session.launch.dispatcher.open(lifecycle.messages)
        else:
            _read_metrics(session)
            session.missed = _take_up(session, lifecycle.messages)
    except BaseException:  # also a KeyboardInterrupt: the cluster must be left so that others can attach
        lifecycle.stop_watching()
        session.launch.leave()
        raise
    session.start_seconds = time.monotonic() - started
    return lifecycle


def _read_metrics(session: Session) -> None:
    folders = session.launch.folders
    tunnel = tunnel_of(folders.profile)
    if tunnel is not None:
        try:
            tunnel.bring_metrics(str(folders.run), folders.profile / BROUGHT_METRICS)
        except LaunchError as error:
            session.supervisor.note(str(error))
    session.telemetry.read_metrics(folders.metrics)


def detach(lifecycle: Lifecycle) -> None:
    """Close a cluster here and leave its ranks running; see :meth:`jupyter_disttrain.Cluster.detach`."""
    session = lifecycle.session
    if not session.config.keep:
        name = session.config.name
        raise UsageError(f"the cluster {name!r} ends with its notebook; start it with %dist_init --keep")
    with session.restarting:
        session.check_not_closed()
        session.launch.check_open()
        try:
            session.is_closed = True
            lifecycle.stop_watching()
            let_begin(session.launch)
        finally:  # also after a KeyboardInterrupt: a half detached cluster could be neither attached to nor ended
            lifecycle.leave("was detached")
            session.open_cells.abandon("the cluster was detached while the cell ran; %dist_attach resumes the cell")


def join(there: ClusterFile) -> Launch:
    """Connect to the ranks of a cluster and take its lease; raises a LaunchError if its nannies don't reply."""
    launch = Launch(there.load_config(), there)
    try:
        launch.join()
        _wait_until_subscribed(launch)
    except BaseException:  # also a KeyboardInterrupt: the cluster must be left so that others can attach
        launch.leave()
        raise
    return launch


def _wait_until_subscribed(launch: Launch) -> None:
    """Ask nannies to publish until the subscription is active: this client misses anything published before."""
    deadline = time.monotonic() + ATTACH_ANSWER_SECONDS
    while not launch.dispatcher.is_subscribed.wait(ATTACH_REPEAT_SECONDS):
        if time.monotonic() > deadline:
            cluster_id = launch.folders.cluster_id
            raise LaunchError(f"no rank of {cluster_id} replies; jupyter disttrain stop {cluster_id} ends the cluster")
        for entry in launch.table:
            launch.open_link.request(entry.nanny, RepeatHello())


def _take_up(session: Session, messages: SessionMessages) -> list[CellRun]:
    """Take over the cells that had not ended when the earlier notebook left, with all their output; return them."""
    launch, cells, table = session.launch, session.open_cells, session.launch.table
    runs = [cells.adopt(cell) for cell in cells.cell_log.open_cells]
    deaths = _deaths(launch)
    asked = [entry for entry in table if entry.state == RankState.RUNNING and entry.engine not in deaths]
    replays = {entry.engine: launch.open_link.request(entry.nanny, Replay()) for entry in asked}
    earlier = [message for entry in asked for message in _published_messages(launch, entry, replays[entry.engine])]
    launch.dispatcher.open(messages, [*earlier, *deaths.values()])
    alive = [entry for entry in table if entry.engine not in deaths]
    session.debugger.release(alive)  # the earlier notebook may debug them, and have stopped some
    repeated = [_ask_reply(launch, entry) for entry in alive]
    wait(repeated, RANK_SECONDS)
    _restore_group(launch, session.supervisor)
    return runs


def _published_messages(launch: Launch, entry: RankEntry, future: Future[Message]) -> list[Message]:
    """Return the messages that a rank has published since its cell began, which no client may have received."""
    if not wait([future], ATTACH_ANSWER_SECONDS).done or future.exception() is not None:
        return []  # the rank died in the meantime; its log has all output
    reply = future.result()
    frames = iter(reply["buffers"])
    unpack = launch.open_link.session.unpack
    messages = [_lost(launch, entry)] if reply["content"]["lost"] else []
    for count in reply["content"]["counts"]:
        parts = [bytes(next(frames)) for _ in range(count)]
        start = parts.index(DELIM) + 2  # the signature follows the delimiter
        names = ("header", "parent_header", "metadata", "content")
        message = dict(zip(names, map(unpack, parts[start : start + 4]), strict=True))
        messages.append(message | {"buffers": parts[start + 4 :]})
    return messages


def _lost(launch: Launch, entry: RankEntry) -> Message:
    """Return a message for the user: the rank printed more than its nanny keeps."""
    text = f"... its earlier output is in {launch.folders.rank_log(entry.info.rank)}\n"
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
        path = Path(launch.folders.profile) / f"death-{entry.engine}.json"
        if path.exists():
            found[entry.engine] = as_message(_read_death(path, entry))
    return found


def _read_death(path: Path, entry: RankEntry) -> RankDeath:
    """Return the death that a nanny has recorded; an unreadable file still means that the rank died."""
    try:
        return RankDeath.from_content(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, AttributeError):
        log.warning("%s can't be read", path)
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
        launch.state.generation = max(launch.state.generation, content["generation"])
        if content["ended"]:
            _hand_in(launch, entry, content["reply"], content["metadata"], answer["buffers"])
        elif entry.state == RankState.IDLE:
            entry.group = content["group"]
            launch.steps.replied(entry.info.rank, content["group"], content, failed=False)
        elif beside and not content["runs"]:
            _ask_reply(launch, entry, beside=False)
        elif not beside:
            text = REPLY_LOST if content["begun"] else NEVER_CAME
            reply = {"status": "error", "ename": "ReplyLost", "evalue": text, "traceback": []}
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
        time.sleep(ATTACH_REPEAT_SECONDS if waiting else 0.0)


def _is_on_its_way(future: Future[Message]) -> bool:
    if not future.done() or future.exception() is not None:
        return False
    content = future.result()["content"]
    return content["status"] == "ok" and not content["begun"]


def _hand_in(launch: Launch, entry: RankEntry, reply: Message, options: Message, buffers: list[Any]) -> None:
    launch.open_link.take_reply(
        {
            "header": {"msg_type": "execute_reply"},
            "parent_header": {"msg_id": entry.request},
            "metadata": {OPTIONS: options},
            "content": reply,
            "buffers": buffers,
        }
    )


def _restore_group(launch: Launch, supervisor: Supervisor) -> None:
    """Form the process group again if the earlier notebook ended while it was being formed.

    Ranks that still wait for each other there are released first.
    """
    tags = {entry.group for entry in launch.table if entry.state != RankState.DEAD}
    formed = {tag for tag in tags if tag.startswith("session/")}
    if "broken" in tags or len(formed) > 1:
        supervisor.release()
        with supervisor.changing() as state:
            state.on_group_ended()
