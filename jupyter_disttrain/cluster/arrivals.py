"""Ranks that come, and ranks that go.

Covers: hearing from processes that were just started, refusing those that can't be ranks, deaths that nobody
could tell.
Does not cover: telling ranks who they are (``start``), what follows a death (``guardian``).
"""

from __future__ import annotations

import queue
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

from ..errors import LaunchError
from ..messages import NANNY_REQUEST, RANK_REQUEST, NannyHello, RankDeath, RankHello
from ..ranks import label_ranks
from .processes import tail

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from .link import Link, Message
    from .rank_table import RankEntry

MISSED_LOOKS = 3  # for a nanny that is gone: what it said last may be on its way
QUIET_SECONDS = 0.2  # without a word, before it is asked whether there is still something to wait for


class Arrivals:
    """What processes say of themselves until they are known."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._buried: set[tuple[str, int]] = set()  # processes whose death was heard: host and pid

    def take(self, message: Message) -> None:
        """Take a message, if it is one of a rank that comes or goes; called on the link's thread."""
        for record in (RankHello, NannyHello, RankDeath):
            if message["header"]["msg_type"] == record.msg_type:
                self._queue.put(record.from_content(message["content"]))

    def hear_from_all(
        self,
        n: int,
        on_silence: Callable[[int], None],
        on_arrival: Callable[[int], None] = lambda _ranks: None,
    ) -> tuple[list[RankHello], dict[str, NannyHello]]:
        """Wait for ``n`` ranks and their nannies; return the ranks' words, and those of the nannies by engine.

        Called with the number of ranks so far: ``on_silence`` when nothing is heard for a moment, ``on_arrival`` after
        each message.
        """
        hellos: dict[str, RankHello] = {}
        nannies: dict[str, NannyHello] = {}
        while not (len(hellos) == n and hellos.keys() <= nannies.keys()):
            try:
                arrival = self._queue.get(timeout=QUIET_SECONDS)
            except queue.Empty:
                on_silence(len(hellos))
                continue
            if isinstance(arrival, RankHello):
                _check_hello(arrival)
                hellos[arrival.engine] = arrival
            elif isinstance(arrival, NannyHello):
                nannies[arrival.engine] = arrival
            elif isinstance(arrival, RankDeath):
                _fail_dead(arrival, ())
            on_arrival(len(hellos))
        return list(hellos.values()), nannies

    def hear_from_one(
        self,
        known: Collection[str],
        timeout_s: float,
        on_silence: Callable[[], None] = lambda: None,
        *,
        in_mpi: bool = False,
    ) -> tuple[RankHello, NannyHello]:
        """Wait for a rank that is not among the known engines; return its words and its nanny's.

        ``in_mpi``: one that was started within the MPI job; otherwise one beside it. One of an attempt before that
        failed may still come up, or tell again and again that it has died.
        """
        launcher = "mpi" if in_mpi else "local"
        hello: RankHello | None = None
        nannies: dict[str, NannyHello] = {}
        deadline = time.monotonic() + timeout_s
        while hello is None or hello.engine not in nannies:
            try:
                arrival = self._queue.get(timeout=QUIET_SECONDS)
            except queue.Empty:
                on_silence()
                if time.monotonic() > deadline:
                    raise LaunchError(f"no new process came up within {timeout_s:g} s") from None
                continue
            if isinstance(arrival, NannyHello):
                nannies[arrival.engine] = arrival
            elif arrival.engine in known or arrival.launcher != launcher:
                continue
            elif isinstance(arrival, RankHello):
                _check_hello(arrival)
                hello = arrival
            else:
                self._heed_untaken(arrival)
        return hello, nannies[hello.engine]

    def _heed_untaken(self, death: RankDeath) -> None:
        """Fail at the first word of the death of a process that is no rank yet."""
        process = death.host, death.pid
        if process not in self._buried:
            self._buried.add(process)
            _fail_dead(death, ())

    def heed_deaths(self, table: Sequence[RankEntry], *, others: bool) -> None:
        """Fail if one of these ranks has died while starting; ``others``: or any other process."""
        engines = {entry.engine for entry in table}
        while not self._queue.empty():
            arrival = self._queue.get()
            if isinstance(arrival, RankDeath) and (others or arrival.engine in engines):
                _fail_dead(arrival, table)


def answer(link: Link, message: Message) -> None:
    """Tell who says hello that it was heard, so that it need not be said again and again."""
    msg_type, content = message["header"]["msg_type"], message["content"]
    if msg_type == RankHello.msg_type:
        link.request(content["engine"], RANK_REQUEST, {"do": "heard"}, beside=True)
    elif msg_type == NannyHello.msg_type:
        link.request(content["nanny"], NANNY_REQUEST, {"do": "heard"})


def _check_hello(hello: RankHello) -> None:
    if hello.failure is None:
        return
    remedies = {
        "torch": "install torch for the Python that runs there, or start without it: --backend none",
        "mpi4py": "install it for the Python that runs there, or start without MPI: --launcher local",
    }
    module = hello.failure.split(" ", 1)[0]
    remedy = remedies.get(module, "jupyter disttrain doctor checks the installation")
    raise LaunchError(f"a rank on {hello.host} can't start: {hello.failure}; {remedy}")


def _fail_dead(death: RankDeath, table: Sequence[RankEntry]) -> None:
    known = [entry.info.rank for entry in table if entry.engine == death.engine]
    who = label_ranks(known) if known else "a rank"
    words = f"; its last lines on stderr:\n{tail(death.stderr_tail)}" if death.stderr_tail.strip() else ""
    words = words or "; jupyter disttrain doctor may tell why"
    raise LaunchError(f"{who} on {death.host} {death.cause} while starting{words}")


def check_reply(entry: RankEntry, future: Future[Message]) -> None:
    """Fail if a rank has replied that it could not."""
    content = future.result()["content"] if future.done() else {"status": "ok"}
    if content["status"] == "error":
        info = entry.info
        raise LaunchError(f"rank {info.rank} on {info.host}: {content['evalue'] or content['ename']}")


def too_late(entry: RankEntry, what: str, limit_s: float, log: Path) -> LaunchError:
    """Return what is to be raised when a rank does not do in time what it was asked."""
    info = entry.info
    said = f"its log may say why: {log}" if log.exists() else "it said nothing"
    return LaunchError(
        f"rank {info.rank} on {info.host} (process {info.pid}) did not {what} within {limit_s:g} s; {said}; "
        "give more with --start-timeout, or start anew"
    )


def is_here(entry: RankEntry) -> bool:
    """Whether a rank is on this host; another may have the same name, and then shares no memory with us."""
    return entry.info.host == socket.gethostname() and (entry.sees_shelf or not entry.probe)


def untold_deaths(table: Sequence[RankEntry]) -> Iterator[RankDeath]:
    """Look for ranks of this host whose nanny was killed with them, and so could not tell."""
    for entry in table:
        info = entry.info
        if entry.state == "dead" or not is_here(entry) or _runs(entry.nanny_pid):
            entry.nanny_missed = 0
            continue
        entry.nanny_missed += 1
        if entry.nanny_missed >= MISSED_LOOKS:
            yield RankDeath(
                engine=entry.engine,
                pid=info.pid,
                host=info.host,
                exit_code=None,
                signal_number=signal.SIGKILL,
                crash="",
                stderr_tail="",
                expected=False,
            )


def _runs(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has reaped does not."""
    try:
        # As psutil does, which takes five times as long; this is asked of each rank twice a second.
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def as_message(death: RankDeath) -> Message:
    """Return a death as the message with which its nanny would have told of it."""
    return {
        "header": {"msg_type": death.msg_type},
        "parent_header": {},
        "metadata": {"engine": death.engine},
        "content": death.to_content(),
    }
