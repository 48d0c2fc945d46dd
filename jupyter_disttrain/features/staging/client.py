"""Copy data sets to the nodes' local disks.

Covers: which nodes copy, in which order, their progress, the result.
Does not cover: copying (``features.staging.rank``), drawing (``notebook.magics.file_magics``).
"""

from __future__ import annotations

import socket
import time
import uuid
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from ...client.cells.events import Died, Replied
from ...client.cells.history import Origin
from ...client.cells.variables import ask, check_names, push
from ...config.data_urls import is_address, without_secrets
from ...errors import ClusterClosedError, StageError
from ...protocol.ranks import counted, label_ranks
from ...protocol.requests import EndStaging, ForgetStaging, PrepareStaging, RankControlRequest, StagingState
from ...protocol.states import RankState
from ...protocol.time_limits import STAGING_POLL_SECONDS
from .links import Place
from .notebook_source import NotebookSource

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
        whole = f"{size_text(self.done_bytes)} of {size_text(self.total_bytes)} on {counted(self.nodes, 'node')}"
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
        text = f"{self.name}: {size_text(self.size_bytes)} in {counted(self.files, 'file')}"
        nodes, seconds = f"on {counted(self.nodes, 'node')}", f"{self.seconds:.1f} s"
        if not self.copied_bytes:
            text += f" {nodes}, already complete ({seconds})"
        else:
            if self.copied_bytes != self.size_bytes:
                text += f", of which {size_text(self.copied_bytes)} were missing"
            rate = size_text(self.copied_bytes / max(self.seconds, 0.001))
            read = "read once" if self.read_bytes == self.size_bytes else f"{size_text(self.read_bytes)} read, once"
            text += f", {nodes} in {seconds} ({rate}/s); {read}, on {self.read_on}"
        shared = [f"{host} shares the folder of {other}, which was written once" for host, other in self.shared.items()]
        return "\n".join([text, *shared, *self._where()])

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

        Files that are there and match the source are not copied again.

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
        if not (isinstance(source, str) and is_address(source)):
            source = Path(source).expanduser().absolute()
        where = str(source)
        launch, ranks = self._session.ready("all")
        first = [rank for rank in ranks if launch.table[rank].info.local_rank == 0]
        keys = [key.decode() for key in zmq.curve_keypair()]
        try:
            chain, is_seen = _get_ready(launch, first, where, None if to is None else str(to), keys)
            order = [place.rank for place in chain if place.rank is not None]
            with nullcontext() if is_seen else NotebookSource(where, launch, keys, chain, verify=verify) as sender:
                places = [tuple(place) for place in ([sender.place] if sender else []) + chain]
                run = self._session.run(
                    f"get_ipython().staging.run({places!r}, verify={verify})",
                    order,
                    listener=_Watch(launch, order, sender, on_progress),
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
    """End the copy where one part of it fails; poll the nodes' progress while waiting for the cell that copies."""

    def __init__(
        self,
        launch: Launch,
        ranks: Sequence[int],
        sender: NotebookSource | None,
        on_progress: Callable[[StageProgress], None] | None,
    ) -> None:
        self._launch, self._ranks, self._sender, self._on_progress = launch, ranks, sender, on_progress
        self._asked: dict[int, Future[Message]] = {}
        self._states: dict[int, Message] = {}
        self._has_ended = False
        self._began = self._due = time.monotonic()

    def on_events(self, events: Sequence[Event], run: CellRun) -> None:
        """Take the replies that have arrived, and send new requests, without waiting."""
        faults = [self._fault_of(event) for event in events] + [self._sender.fault if self._sender else ""]
        because = next(filter(None, faults), "")
        if because and not self._has_ended:
            self._has_ended = True
            for rank in run.running_now:
                self._ask(rank, EndStaging(because=because))
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
            self._on_progress(
                StageProgress(
                    phase=behind["phase"],
                    done_bytes=total - behind["total_bytes"] + behind["done_bytes"],
                    total_bytes=total,
                    nodes=len(self._ranks),
                    seconds=now - self._began,
                )
            )

    def _fault_of(self, event: Event) -> str:
        where = f"rank {event.rank} on {self._launch.table[event.rank].info.host}"
        if isinstance(event, Died):
            return f"{where} died"
        return f"{where} failed" if isinstance(event, Replied) and event.content["status"] != "ok" else ""

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
    launch: Launch, first: Sequence[int], where: str, to: str | None, keys: list[str]
) -> tuple[list[Place], bool]:
    """Prepare the nodes; return them in their order, and whether the first one sees the source (else this machine)."""
    request = PrepareStaging(source=where, to=to, mark=f"mark-{uuid.uuid4().hex[:8]}", keys=keys)
    ready = {rank: reply["content"] for rank, reply in ask(launch, first, request).items()}
    refused = [f"rank {rank}: {content['trouble']}" for rank, content in ready.items() if content.get("trouble")]
    if refused:
        raise StageError("; ".join(refused))
    order = sorted(first, key=lambda rank: not ready[rank]["sees"])
    is_seen = ready[order[0]]["sees"]
    if not is_seen and not Path(where).exists():
        hosts = ", ".join(dict.fromkeys([*(launch.table[rank].info.host for rank in first), socket.gethostname()]))
        raise StageError(
            f"{where} does not exist on {hosts}; put it on a file system that a node can read, or use an address that "
            "fsspec reads, such as s3://bucket/folder"
        )
    return [Place(*ready[rank]["place"]) for rank in order], is_seen


def _let_go(launch: Launch, ranks: Sequence[int]) -> None:
    for rank in ranks:
        entry = launch.table[rank]
        if launch.link is not None and entry.state != RankState.DEAD:
            launch.link.request(entry.engine, ForgetStaging())


def _result(
    where: str, launch: Launch, ranks: Sequence[int], run: CellRun, first: int, sender: NotebookSource | None
) -> Staged:
    """Combine the nodes' reports.

    Raises
    ------
    StageError
        If the transfer stopped early without an error on a node.
    """
    reports: dict[int, dict[str, Any]] = run.results
    ended = next((report["ended"] for report in reports.values() if report["ended"]), "")
    if ended:
        raise StageError(
            f"{without_secrets(where)} was not copied to every node: {ended}; complete files are kept, and the "
            "next call copies the others"
        )
    infos = {rank: launch.table[rank].info for rank in ranks}
    paths = {infos[rank].node_rank: report["path"] for rank, report in reports.items()}
    report = reports[first]
    return Staged(
        name=Path(report["path"]).name,
        paths={rank: paths[info.node_rank] for rank, info in infos.items()},
        files=report["files"],
        size_bytes=report["size_bytes"],
        copied_bytes=max(report["copied_bytes"] for report in reports.values()),
        read_bytes=report["read_bytes"] if sender is None else sender.read_bytes,
        seconds=max(run.durations_s.values()),
        nodes=len(reports),
        shared={infos[rank].host: report["shares_with"] for rank, report in reports.items() if report["shares_with"]},
        read_on=infos[first].host if sender is None else str(sender),
    )


def size_text(size_bytes: float) -> str:
    """Format a size with a suitable unit."""
    for unit, name in UNITS:
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes:.0f} B"
