"""Follow one running cluster from the server.

Covers: its own subscription, the state of each rank, their variables, asking its holder to act, acting itself if no
process holds it.
Does not cover: which clusters there are (``clusters``), HTTP (``handlers``).

The kernel that holds the cluster may be busy, stopped or dead: everything here comes from the ranks and their nannies.
"""

from __future__ import annotations

import functools
import threading
import time
import uuid
from concurrent.futures import wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..client.recovery.hang_explanation import explain_figures
from ..client.registry import observer
from ..client.registry.cluster_file import ClusterFile
from ..client.registry.log_ends import log_ends, require_here
from ..client.startup.launch import Launch
from ..client.transport.link import FIGURES
from ..errors import UsageError
from ..features.introspection.client import VariableRequests
from ..features.telemetry.client import Telemetry
from ..features.telemetry.snapshot import snapshot
from ..protocol.messages import Acknowledged, Asked, NannyHello, RankVitals
from ..protocol.rank_death import RankDeath
from ..protocol.requests import Figures, Publish
from ..protocol.states import RankActivity, RankState
from ..protocol.time_limits import ACKNOWLEDGE_SECONDS, LIVE_NANNY_SECONDS, LIVE_RECEIVE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from concurrent.futures import Future
    from logging import Logger
    from pathlib import Path

    from ..client.startup.rank_table import RankEntry
    from ..client.transport.link import Message
    from ..features.telemetry.rank_figures import RankFigures


class LiveCluster:
    """Follow one cluster until it ends."""

    def __init__(self, file: ClusterFile, log: Logger) -> None:
        self.file = file
        once = functools.cache(lambda text: log.warning("jupyter_disttrain: %s", text))
        self.telemetry = Telemetry(file.config["sample_s"], once)
        self.ended = False
        self._lock = threading.Lock()
        self._dead: set[int] = set()
        self._acknowledged: dict[str, threading.Event] = {}
        self._variable_requests = VariableRequests()
        self._launch = Launch(file.load_config(), file)
        try:
            self._launch.join(observer=True)
            self.telemetry.read_metrics(self._launch.folders.metrics)
            self._launch.dispatcher.open(self)
            asked = self._ask_figures(self._launch.table)
            for reply in wait(asked, LIVE_NANNY_SECONDS).done:
                self._take_figures(asked[reply], reply)
        except BaseException:  # also after an interrupt, the link's thread and sockets must not stay
            self._launch.leave()
            raise

    def close(self) -> None:
        """Detach from the cluster."""
        self._launch.leave()

    # Messages

    def on_message(self, channel: str, message: Message) -> None:
        """Handle a message of a rank or a nanny."""
        if channel not in ("iopub", FIGURES):
            return
        msg_type, content = message["header"]["msg_type"], message["content"]
        if msg_type == Acknowledged.msg_type:
            if (event := self._acknowledged.get(content["token"])) is not None:
                event.set()
            return
        is_news = channel == FIGURES or msg_type == NannyHello.msg_type
        rank = self._rank_of(message["metadata"].get("engine", ""), may_be_new=is_news)
        if rank is None:
            return
        if channel == FIGURES:
            self.telemetry.take(rank, msg_type, content)
        elif msg_type == "status" and content["execution_state"] == "idle":
            self.telemetry.end_cell(rank)
        elif msg_type == RankDeath.msg_type:
            self._on_rank_death(rank, expected=bool(content["expected"]))

    def _on_rank_death(self, rank: int, *, expected: bool) -> None:
        """Record a rank's end that its nanny reported; the loss of the nanny is reported repeatedly."""
        with self._lock:
            if rank in self._dead:
                return
            self._dead.add(rank)
        self.telemetry.end_rank(rank, expected=expected)

    def _rank_of(self, engine: str, *, may_be_new: bool) -> int | None:
        """Return the rank of an engine; an unknown engine may have replaced a dead one."""
        rank = next((entry.info.rank for entry in self._launch.table if entry.engine == engine), None)
        if rank is None and may_be_new:
            self._read_again()
            return self._rank_of(engine, may_be_new=False)
        return rank

    def _read_again(self) -> None:
        with suppress(OSError, ValueError, TypeError, KeyError):  # the cluster has just ended
            self.refresh(ClusterFile.read(self._launch.folders.profile))

    def refresh(self, file: ClusterFile) -> None:
        """Adopt the current cluster file: ranks that were replaced, the process group's generation."""
        if file.cluster_id != self.file.cluster_id:  # all ranks were reset: they are another cluster here
            self.ended = True
            return
        known = {entry.engine for entry in self._launch.table}
        self.file = file
        self._launch.update(file)
        new = [entry for entry in self._launch.table if entry.engine not in known]
        with self._lock:
            self._dead -= {entry.info.rank for entry in new}
        for reply, rank in self._ask_figures(new).items():
            reply.add_done_callback(functools.partial(self._take_figures, rank))

    def on_lost(self) -> None:
        """Record that the cluster has ended."""
        self.ended = True

    def _ask_figures(self, entries: Iterable[RankEntry]) -> dict[Future[Message], int]:
        """Request the present figures of ranks, which publish them only from time to time; return ranks by reply."""
        if not self.file.config["sample_s"]:
            return {}
        link = self._launch.open_link
        return {link.request(entry.nanny, Figures()): entry.info.rank for entry in entries}

    def _take_figures(self, rank: int, reply: Future[Message]) -> None:
        """Take the reply of a rank's nanny; without one, the rank is shown as starting until it publishes figures."""
        if (
            rank not in self._dead
            and reply.exception() is None
            and (content := reply.result()["content"]).get("status") != "error"
        ):
            self.telemetry.take_first(rank, RankVitals.from_content(content))

    # State and metrics

    def snapshot(self) -> dict[str, Any]:
        """Return the cluster as JSON."""
        file = self.file
        infos = [entry.info for entry in self._launch.table]
        figures = self.telemetry.ranks
        return {
            "id": file.cluster_id,
            "name": file.name,
            "launcher": file.launcher,
            "backend": infos[0].backend,
            "started_s": file.started_s,
            "notebook": file.notebook,
            "held": file.is_held,
            "kept": file.config["keep"],
            "job_file": file.config["job_file"],
            "logs": file.run,
            "sample_s": file.config["sample_s"],
            "hang": explain_figures({rank: each.vitals for rank, each in figures.items()}, file.config["hang_after_s"]),
            **snapshot(self.telemetry, [(info, self._known(info.rank, figures)) for info in infos]),
        }

    def _known(self, rank: int, figures: Mapping[int, RankFigures]) -> RankState:
        if rank in self._dead:
            return RankState.DEAD
        if rank not in figures:
            return RankState.STARTING if self.file.config["sample_s"] else RankState.IDLE  # unknown without samples
        return RankState.IDLE if figures[rank].vitals.state == RankActivity.IDLE else RankState.RUNNING

    def variables(self) -> dict[str, Any]:
        """Return the variables of the ranks as JSON, also while they run cells; see ``VariableTable.to_content``.

        Called on threads of their own. Raises a ClusterClosedError if the cluster has ended.
        """
        self._launch.check_open()
        table = self._variable_requests.ask(
            self._launch.open_link, tuple(self._launch.table), lambda entry: entry.info.rank not in self._dead
        )
        return table.to_content()

    def log_ends(self, ranks: Sequence[int] | None) -> list[dict[str, Any]]:
        """Return the end of the given ranks' logs, None meaning all, with the errors of :meth:`log_path`."""
        return log_ends(self.log_path, range(len(self._launch.table)) if ranks is None else ranks)

    def log_path(self, rank: int) -> Path:
        """Return the path of a rank's log; raise UsageError if there is no such rank, or its log is elsewhere."""
        if not 0 <= rank < len(self._launch.table):
            raise UsageError(f"there is no rank {rank} in {self.file.name!r}; it has {len(self._launch.table)} ranks")
        return require_here(self._launch.folders.rank_log(rank), rank, str(self.file.config["job_file"]))

    # Actions, called on threads of their own

    def ask(self, what: str) -> str:
        """Interrupt, reset or stop the cluster; return which process does it, or raise UsageError if none can."""
        self._read_again()
        if what == "reset" and self.file.config["job"]:
            raise UsageError(
                f"the ranks of {self.file.config['job_file']} belong to a job; stop ends it, and only its launcher "
                "can start it again"
            )
        if self.file.is_held and self._ask_holder(what):
            return f"requested from {self.file.holder}"
        if what == "stop":
            observer.stop(self.file)
        elif what == "interrupt":
            ranks = (entry.info.rank for entry in self._launch.table)
            observer.interrupt(self._launch, [rank for rank in ranks if rank not in self._dead])
        else:
            raise UsageError(
                f"{self.file.holder}, which held {self.file.name!r}, does not respond, and only the process that "
                "holds a cluster can restart its ranks; stop it here, or attach a notebook to it with %dist_attach"
            )
        return "done by the server"

    def _ask_holder(self, what: str) -> bool:
        """Ask the notebook's process through a nanny, which publishes the request; returns whether it confirmed."""
        token = uuid.uuid4().hex
        event = self._acknowledged[token] = threading.Event()
        until_s = time.monotonic() + LIVE_RECEIVE_SECONDS
        asked = Asked(what=what, token=token, until_s=until_s)
        request = Publish(record_type=asked.msg_type, content=asked.to_content())
        try:
            for entry in self._launch.table:
                if entry.info.rank not in self._dead:
                    done, _ = wait([self._launch.open_link.request(entry.nanny, request)], LIVE_NANNY_SECONDS)
                    if done:
                        break
            return event.wait(max(0.0, until_s - time.monotonic()) + ACKNOWLEDGE_SECONDS)
        finally:
            del self._acknowledged[token]
