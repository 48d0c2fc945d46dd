"""Copy data sets to the nodes' local disks.

Covers: which nodes copy, in which order, their progress, the result.
Does not cover: copying (``features.staging.rank``), drawing (``notebook.magics.data_magics``).
"""

from __future__ import annotations

import socket
import time
import uuid
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...client.cells.events import Died
from ...client.cells.history import Origin
from ...client.cells.variables import ask, check_names, push
from ...config.data_urls import is_address, without_secrets
from ...errors import ClusterClosedError, StageError
from ...protocol.ranks import label_ranks
from ...protocol.requests import EndStaging, ForgetStaging, PrepareStaging, RankControlRequest, StagingState
from ...protocol.states import RankState
from ...protocol.time_limits import STAGING_POLL_SECONDS
from .source_process import Sender

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from ...client.cells.cell_run import CellRun
    from ...client.cells.events import Event
    from ...client.session import Session
    from ...client.startup.launch import Launch
    from ...client.transport.link import Message

UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgress:
    """Progress of a data set on the node that is furthest behind."""

    phase: str  # see ``features.staging.pipeline.PipelineNode``
    done_bytes: int
    total_bytes: int
    nodes: int
    seconds: float

    def __str__(self) -> str:
        """Return the progress in one line."""
        if self.phase != "copying":
            return f"{self.phase or 'starting'} … {self.seconds:.0f} s"
        part = f" · {100 * self.done_bytes / self.total_bytes:.0f} %" if self.total_bytes else ""
        rate = size_text(self.done_bytes / max(self.seconds, 0.001))
        whole = f"{size_text(self.done_bytes)} of {size_text(self.total_bytes)} on {_count(self.nodes, 'node')}"
        return f"{whole}{part} · {rate}/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A data set that is on every node."""

    name: str
    paths: Mapping[int, str]  # by rank
    files: int
    size_bytes: int
    copied_bytes: int  # copied to the node that lacked most
    read_bytes: int  # read from the source
    seconds: float
    nodes: int
    shared: Mapping[str, str]  # by host: another host whose folder it shares
    read_on: str  # description of the machine that reads the source

    def __str__(self) -> str:
        """Return a line or two on what was done, and where the data set is."""
        whole = f"{self.name}: {size_text(self.size_bytes)} in {_count(self.files, 'file')}"
        nodes = f"on {_count(self.nodes, 'node')}"
        if not self.copied_bytes:
            did = f"{whole} {nodes}, already complete ({self.seconds:.1f} s)"
        else:
            rate = size_text(self.copied_bytes / max(self.seconds, 0.001))
            part = (
                ""
                if self.copied_bytes == self.size_bytes
                else f", of which {size_text(self.copied_bytes)} were missing"
            )
            read = "read once" if self.read_bytes == self.size_bytes else f"{size_text(self.read_bytes)} read, once"
            did = f"{whole}{part}, {nodes} in {self.seconds:.1f} s ({rate}/s); {read}, on {self.read_on}"
        lines = [did]
        lines += [f"{host} shares the folder of {other}, which was written once" for host, other in self.shared.items()]
        return "\n".join([*lines, *self._where()])

    def _where(self) -> list[str]:
        ranks: dict[str, list[int]] = {}
        for rank, path in sorted(self.paths.items()):
            ranks.setdefault(path, []).append(rank)
        if len(ranks) == 1:
            return list(ranks)
        return [f"{label_ranks(some)}: {path}" for path, some in ranks.items()]


class Staging:
    """Copies data sets to the nodes of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def stage(
        self,
        source: str | os.PathLike[str],
        to: str | os.PathLike[str] | None = None,
        *,
        name: str | None = None,
        verify: bool = False,
        on_progress: Callable[[StageProgress], None] | None = None,
        origin: Origin | None = None,
    ) -> Staged:
        """Copy a data set to each node's own disk: read once, sent from node to node, checked by hash.

        Files that are there and match the source are not copied again; interrupted copies continue where they stopped.

        Parameters
        ----------
        source
            A file or a folder, or an address that fsspec reads, such as ``s3://bucket/folder``. The first node that can
            access it reads it. If no node can, this machine reads it and sends it to the first node: through ssh if
            there is no other way.
        to
            The folder on each node in which the data set's own folder is created; ``$NAME`` stands for a variable of
            the node. None: ``$DISTTRAIN_STAGE_DIR``, or a folder on the node's local disk.
        name
            A variable that is set to the path on each rank.
        verify
            Read the source and existing files and compare their hashes, instead of sizes and times.
        on_progress
            Called a few times per second.
        origin
            The place in a notebook that requested this.

        Returns
        -------
        Staged
            Where it is, and what was done.

        Raises
        ------
        StageError
            If the source can't be read, or another node can't be reached.
        RankFailure
            If a node can't write it, e.g. because its disk is full; the others have ended then, and the next call
            continues from there.
        """
        if name is not None:
            check_names([name])
        where = source if isinstance(source, str) and is_address(source) else _absolute(source)
        launch, ranks = self._session.ready("all")
        first = _first_of_each_node(launch, ranks)
        try:
            order, chain, is_seen = _get_ready(launch, first, where, None if to is None else str(to))
            with ExitStack() as stack:
                sender = None if is_seen else stack.enter_context(Sender(where, launch, chain[0]))
                if sender is not None:
                    sender.start(chain, verify=verify)
                    chain.insert(0, sender.place)
                run = self._session.run(
                    f"get_ipython().staging.run({chain!r}, verify={verify})",
                    order,
                    listener=_Watch(launch, order, on_progress),
                    origin=replace(origin or Origin(), is_cell=False),
                )
                staged = _result(where, launch, ranks, run, order[0], sender)
        except BaseException:  # also after an interrupt, no port stays open on a node
            _let_go(launch, first)
            raise
        if name is not None:
            for path in dict.fromkeys(staged.paths.values()):
                push(launch, [rank for rank in ranks if staged.paths[rank] == path], {name: path})
        return staged


class _Watch:
    """Poll the nodes' progress while waiting for the cell that copies."""

    def __init__(
        self, launch: Launch, ranks: Sequence[int], on_progress: Callable[[StageProgress], None] | None
    ) -> None:
        self._launch, self._ranks, self._on_progress = launch, ranks, on_progress
        self._asked: dict[int, Future[Message]] = {}
        self._states: dict[int, Message] = {}
        self._began = time.monotonic()
        self._due = self._began

    def on_events(self, events: Sequence[Event], run: CellRun) -> None:
        """Take the replies that have arrived, and send new requests, without waiting."""
        for event in events:
            if isinstance(event, Died):  # its neighbours would wait for its network to recover
                host = self._launch.table[event.rank].info.host
                end = EndStaging(because=f"rank {event.rank} on {host} died")
                for rank in run.running_now:
                    self._ask(rank, end)
        now = time.monotonic()
        if self._on_progress is None or now < self._due or run.done:
            return
        self._due = now + STAGING_POLL_SECONDS
        for rank in self._ranks:
            future = self._asked.get(rank)
            if future is not None and not future.done():
                continue
            if future is not None and future.exception() is None:
                self._states[rank] = future.result()["content"]
            self._asked[rank] = self._ask(rank, StagingState())
        states = [each for each in self._states.values() if each.get("phase")]
        if states:
            behind = max(states, key=lambda each: each["total_bytes"] - each["done_bytes"])
            total = max(each["total_bytes"] for each in states)
            left = behind["total_bytes"] - behind["done_bytes"]
            seconds = now - self._began
            nodes = len(self._ranks)
            self._on_progress(
                StageProgress(
                    phase=behind["phase"], done_bytes=total - left, total_bytes=total, nodes=nodes, seconds=seconds
                )
            )

    def _ask(self, rank: int, request: RankControlRequest) -> Future[Message]:
        try:
            return self._launch.open_link.request(self._launch.table[rank].engine, request)
        except ClusterClosedError as error:  # the cell reports it
            future: Future[Message] = Future()
            future.set_exception(error)
            return future

    def on_late(self, event: Event) -> Event:
        """Leave late events to the next cell."""
        return event

    def on_end(self, run: CellRun) -> None:
        """Do nothing: the caller shows the result."""


def _get_ready(
    launch: Launch, first: Sequence[int], where: str, to: str | None
) -> tuple[list[int], list[dict[str, Any]], bool]:
    """Prepare the nodes for the transfer.

    Returns
    -------
    order, chain, is_seen
        The ranks in the order of the chain; the places of the nodes in the chain, which each node receives; and whether
        the first node can access the source; otherwise this machine can.
    """
    request = PrepareStaging(source=where, to=to, mark=f"mark-{uuid.uuid4().hex[:8]}")
    ready = {}
    for rank, reply in ask(launch, first, request).items():
        ready[rank] = reply["content"]
    refused = [f"rank {rank}: {content['trouble']}" for rank, content in ready.items() if content.get("trouble")]
    if refused:
        raise StageError("; ".join(refused))
    sees = [rank for rank in first if ready[rank]["sees"]]
    if not sees and not Path(where).exists():
        hosts = ", ".join(dict.fromkeys([*(launch.table[rank].info.host for rank in first), socket.gethostname()]))
        raise StageError(
            f"{where} does not exist on {hosts}; put it on a file system that a node can read, or use an address that "
            "fsspec reads, such as s3://bucket/folder"
        )
    order = [*sees[:1], *(rank for rank in first if rank not in sees[:1])]
    return order, [ready[rank]["place"] for rank in order], bool(sees)


def _let_go(launch: Launch, ranks: Sequence[int]) -> None:
    for rank in ranks:
        entry = launch.table[rank]
        if launch.link is not None and entry.state != RankState.DEAD:
            launch.link.request(entry.engine, ForgetStaging())


def _first_of_each_node(launch: Launch, ranks: Sequence[int]) -> list[int]:
    first: dict[int, int] = {}
    for rank in ranks:
        first.setdefault(launch.table[rank].info.node_rank, rank)
    return sorted(first.values())


def _result(
    where: str, launch: Launch, ranks: Sequence[int], run: CellRun, first: int, sender: Sender | None
) -> Staged:
    """Combine the nodes' reports.

    Raises
    ------
    StageError
        If the transfer stopped early without an error on a node.
    """
    reports: list[dict[str, Any]] = list(run.results.values())
    ended = next((report["ended"] for report in reports if report["ended"]), "")
    if ended:
        fault = "" if sender is None else sender.fault
        ended = f"{sender.host}: {fault}" if sender is not None and fault else ended
        raise StageError(
            f"{without_secrets(where)} was not copied to every node: {ended}; complete files are kept, and the next "
            "call continues from there"
        )
    by_node = {launch.table[report["rank"]].info.node_rank: report for report in reports}
    paths = {rank: by_node[launch.table[rank].info.node_rank]["path"] for rank in ranks}
    return Staged(
        name=Path(reports[0]["path"]).name,
        paths=paths,
        files=reports[0]["files"],
        size_bytes=reports[0]["size_bytes"],
        copied_bytes=max(report["copied_bytes"] for report in reports),
        read_bytes=sum(report["read_bytes"] for report in [*reports, *([sender.finish()] if sender else [])]),
        seconds=max(run.durations_s.values()),
        nodes=len(reports),
        shared={report["host"]: report["shares_with"] for report in reports if report["shares_with"]},
        read_on=launch.table[first].info.host if sender is None else _sender_text(sender),
    )


def _sender_text(sender: Sender) -> str:
    """Describe the machine that has read the source, if it is none of the nodes."""
    way = f", and sent through ssh to {sender.via}" if sender.via else ""
    return f"{sender.host}, the notebook's machine{way}"


def _absolute(source: str | os.PathLike[str]) -> str:
    return str(Path(source).expanduser().absolute())


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def size_text(size_bytes: float) -> str:
    """Format a size with a suitable unit."""
    for unit, name in UNITS:
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes:.0f} B"
