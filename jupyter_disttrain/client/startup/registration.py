"""Register ranks that start and detect ranks that died.

Covers: hellos of processes that were just started, refusing those that can't be ranks, deaths that no nanny could
report.
Does not cover: assigning ranks (``rank_assignment``), recovery after a death (``client.recovery.supervisor``).
"""

from __future__ import annotations

import queue
import signal
import socket
import time
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import suppress
from typing import TYPE_CHECKING

from ...errors import LaunchError
from ...process_table import runs
from ...protocol.messages import NannyHello, RankHello
from ...protocol.rank_death import RankDeath
from ...protocol.ranks import label_ranks
from ...protocol.requests import AcknowledgeNannyHello, AcknowledgeRankHello, End, Ping
from ...protocol.states import RankState
from ...protocol.time_limits import QUIET_SECONDS, REPLY_SECONDS, UNCHECKED_SECONDS
from .processes import tail

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from ...protocol.ranks import RankInfo
    from ..transport.link import Link, Message
    from .cluster_state import ClusterState
    from .rank_table import RankEntry

MISSED_CHECKS = 3  # checks that do not find a nanny, before its rank counts as dead: its last message may be in transit


class Registration:
    """Hellos and deaths of processes that have no rank yet.

    Hellos are acknowledged while the ranks start, or a replacement does; a process that registers later is ended. Those
    of ranks that these replace are ignored.
    """

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self.awaits_rank = False  # a replacement process is starting
        self._queue: queue.SimpleQueue[RankHello | NannyHello | RankDeath] = queue.SimpleQueue()
        self._checked_at = time.monotonic()
        self.replaced: dict[str, RankInfo] = {}  # by engine: the ranks that these replace, which end meanwhile
        self.seen: set[object] = set()  # all processes that have reported
        self.ignored: set[object] = set()  # processes for the ranks that these replace
        self.killed: dict[str, str] = {}  # messages on those of them that were killed because they took too long to end
        self._handled_deaths: set[tuple[str, int]] = set()  # host and pid of processes whose death was handled

    def follow(self, before: Registration, table: Sequence[RankEntry]) -> None:
        """Ignore the processes of earlier ranks, of which ``table`` has those that run."""
        self.replaced = {entry.engine: entry.info for entry in table}
        self.ignored = before.seen | before.ignored | self.replaced.keys()

    def on_record(self, record: RankHello | NannyHello | RankDeath) -> None:
        """Handle a hello or a death; called on the link's thread."""
        who = _who(record)
        self.seen.add(who)
        if who in self.ignored:
            if isinstance(record, RankDeath) and record.unfinished and record.engine in self.replaced:
                self.killed[record.engine] = killed_text(self.replaced[record.engine], record.unfinished)
            return
        link = self._state.link
        if not self._state.is_started or self.awaits_rank:
            self._queue.put(record)
            if link is None or isinstance(record, RankDeath):
                return  # a process whose hello is not acknowledged repeats it
            if isinstance(record, RankHello):
                link.request(record.engine, AcknowledgeRankHello())
            else:
                link.request(record.nanny, AcknowledgeNannyHello())
        elif isinstance(record, NannyHello) and link is not None and not self._state.is_observer:
            known = {entry.engine for entry in self._state.table}
            if record.engine not in known:
                link.request(record.nanny, End())  # it registered too late to be used

    def wait_for_all(
        self, n: int, check: Callable[[int], None], on_arrival: Callable[[int], None] = lambda _ranks: None
    ) -> tuple[list[RankHello], dict[str, NannyHello]]:
        """Wait for ``n`` ranks and their nannies; return the ranks' hellos, and the nannies' hellos by engine.

        Both callbacks get the number of ranks so far. ``check``, which may raise an error, is called when no message
        has arrived for ``QUIET_SECONDS``, and from time to time where messages keep coming; ``on_arrival`` after each
        message. Raises a LaunchError if a process can't be a rank, or died while starting.
        """
        return self._wait(n, lambda _record: True, check, on_arrival)

    def wait_for_one(
        self,
        known: Collection[str],
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
        *,
        in_mpi: bool = False,
    ) -> tuple[RankHello, NannyHello]:
        """Wait for a rank that is not among the known engines; return its hello and its nanny's.

        With ``in_mpi``, wait for a process that was started within the MPI job, otherwise for one beside it. A process
        of an earlier attempt that failed may still start, or report its death repeatedly. Raises a LaunchError if the
        process can't be a rank, died while starting, or did not start within ``timeout_s``.
        """
        launcher = "mpi" if in_mpi else "local"
        deadline = time.monotonic() + timeout_s

        def check_time(_ranks: int) -> None:
            check()
            if time.monotonic() > deadline:
                raise LaunchError(f"no new process started within {round(timeout_s, 1):g} s")

        (hello, *_), nannies = self._wait(
            1, lambda record: record.engine not in known and record.launcher == launcher, check_time
        )
        return hello, nannies[hello.engine]

    def _wait(
        self,
        n: int,
        is_awaited: Callable[[RankHello | RankDeath], bool],
        check: Callable[[int], None],
        on_arrival: Callable[[int], None] = lambda _ranks: None,
    ) -> tuple[list[RankHello], dict[str, NannyHello]]:
        hellos: dict[str, RankHello] = {}
        nannies: dict[str, NannyHello] = {}
        while len(hellos.keys() & nannies.keys()) < n:
            arrival: RankHello | NannyHello | RankDeath | None = None
            with suppress(queue.Empty):
                arrival = self._queue.get(timeout=QUIET_SECONDS)
            # What has arrived comes first, as it is more specific. Many ranks repeat their hellos all the time.
            if arrival is None or time.monotonic() - self._checked_at > UNCHECKED_SECONDS:
                check(len(hellos))
                self._checked_at = time.monotonic()
            if isinstance(arrival, NannyHello):
                nannies[arrival.engine] = arrival
            elif isinstance(arrival, RankHello) and is_awaited(arrival):
                _check_hello(arrival)
                hellos[arrival.engine] = arrival
            elif isinstance(arrival, RankDeath) and is_awaited(arrival):
                self._fail_once(arrival)
            if arrival is not None:
                on_arrival(len(hellos))
        return [hello for engine, hello in hellos.items() if engine in nannies], nannies

    def _fail_once(self, death: RankDeath) -> None:
        """Fail at the first report of the death of a process that has no rank yet; ignore repeated reports."""
        process = death.host, death.pid
        if process not in self._handled_deaths:
            self._handled_deaths.add(process)
            _fail_dead(death, ())

    def check_deaths(self, table: Sequence[RankEntry], *, others: bool) -> None:
        """Raise a LaunchError if one of these ranks, or with ``others`` any process, has died while starting."""
        engines = {entry.engine for entry in table}
        while not self._queue.empty():
            arrival = self._queue.get()
            if isinstance(arrival, RankDeath) and (others or arrival.engine in engines):
                _fail_dead(arrival, table)


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
    reason = f"; its last lines on stderr:\n{tail(death.stderr_tail)}" if death.stderr_tail.strip() else ""
    reason = reason or "; jupyter disttrain doctor may show why"
    raise LaunchError(f"{who} on {death.host} {death.cause} while starting{reason}")


def check_reply(entry: RankEntry, future: Future[Message]) -> None:
    """Raise a LaunchError if a rank has replied with an error."""
    content = future.result()["content"] if future.done() else {"status": "ok"}
    if content["status"] == "error":
        info = entry.info
        raise LaunchError(f"rank {info.rank} on {info.host}: {content['evalue'] or content['ename']}")


def too_late(entry: RankEntry, what: str, limit_s: float, log: Path) -> LaunchError:
    """Return the error to raise when a rank does not complete a request within ``limit_s`` seconds."""
    info = entry.info
    hint = f"its log may show why: {log}" if log.exists() else "it printed nothing"
    return LaunchError(
        f"rank {info.rank} on {info.host} (process {info.pid}) did not {what} within {limit_s:g} s; {hint}; "
        "increase --start-timeout, or start again"
    )


def _who(record: RankHello | NannyHello | RankDeath) -> object:
    """Identify the process that a record is about; one that ended before it registered has no engine."""
    return (record.host, record.pid) if isinstance(record, RankDeath) and not record.engine else record.engine


def responds(link: Link, table: Sequence[RankEntry]) -> bool:
    """Whether a nanny replies, and so the controller passes messages on."""
    nannies = [entry.nanny for entry in table if entry.state != RankState.DEAD]
    replies = [link.request(nanny, Ping(nannies=[])) for nanny in nannies]
    done = wait(replies, REPLY_SECONDS, FIRST_COMPLETED).done
    return any(reply.exception() is None for reply in done)


def killed_text(info: RankInfo, unfinished: str) -> str:
    """Return the message on a rank that was killed because it took too long to exit."""
    return f"rank {info.rank} on {info.host} was killed: {unfinished}"


def is_here(entry: RankEntry) -> bool:
    """Whether a rank is on this host; another host of the same name shares no memory with it."""
    return entry.info.host == socket.gethostname() and (entry.sees_shelf or not entry.probe)


def unreported_deaths(table: Sequence[RankEntry]) -> Iterator[RankDeath]:
    """Yield the deaths of ranks of this host whose nanny was killed too, and so could not report them."""
    for entry in table:
        info = entry.info
        if entry.state == RankState.DEAD:
            continue  # keep the count for ``killed_nannies``
        if not is_here(entry) or runs(entry.nanny_pid, entry.nanny_started):
            entry.nanny_missed = 0
            continue
        entry.nanny_missed += 1
        if entry.nanny_missed >= MISSED_CHECKS:
            yield RankDeath(engine=entry.engine, pid=info.pid, host=info.host, signal_number=signal.SIGKILL)


def killed_nannies(table: Sequence[RankEntry]) -> int:
    """Return how many nannies were killed, of ranks without a new process.

    A nanny that has reported its rank's death ends as well, and is missing at one check at most.
    """
    return sum(entry.nanny_missed > 1 for entry in table)


def as_message(death: RankDeath) -> Message:
    """Return a death as the message with which its nanny would have reported it."""
    return {
        "header": {"msg_type": death.msg_type},
        "parent_header": {},
        "metadata": {"engine": death.engine},
        "content": death.to_content(),
    }
