"""Copy data sets to the nodes' local disks.

Covers: which nodes copy, in which order, their progress, the result.
Does not cover: copying (``features.staging.rank``), drawing (``notebook.magics.file_magics``).
"""

from __future__ import annotations

import socket
import time
import uuid
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from ...client.cells.events import Died, Replied
from ...client.cells.history import Origin
from ...client.cells.push_pull import ask, check_names, push
from ...config.data_urls import is_address, without_secrets
from ...errors import ClusterClosedError, StageError
from ...protocol.ranks import counted, label_ranks, size_text
from ...protocol.requests import EndStaging, PrepareStaging, StagingState
from ...protocol.states import RankState
from ...protocol.time_limits import STAGING_POLL_SECONDS
from .links import Place
from .notebook_source import NotebookSource

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from ...client.cells.cell_run import CellRun
    from ...client.cells.events import Event
    from ...client.session import Session
    from ...client.startup.launch import Launch
    from ...client.transport.link import Message


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
        launch, ranks = self._session.ready("all")
        copy = _Copy(str(source), launch, ranks, on_progress)
        try:
            chain = copy.prepare(None if to is None else str(to))
            sender = None if copy.is_seen else NotebookSource(copy.where, launch, copy.keys, chain, verify=verify)
            with sender or nullcontext():
                copy.sender = sender
                places = [tuple(place) for place in ([sender.place] if sender else []) + chain]
                run = self._session.run(
                    f"get_ipython().staging.run({places!r}, verify={verify})",
                    copy.ranks,
                    listener=copy,
                    origin=replace(origin or Origin(), is_cell=False),
                )
                staged = copy.result(run)
        except BaseException:  # also after an interrupt, no port stays open on a node
            copy.end(copy.ranks, "the copy was ended")
            raise
        if name is not None:
            for path in dict.fromkeys(staged.paths.values()):
                push(launch, [rank for rank in ranks if staged.paths[rank] == path], {name: path})
        return staged


class _Copy:
    """One copy: prepare the nodes, poll their progress while they copy, end them where one part of it fails.

    It listens to the cell that copies.
    """

    def __init__(
        self,
        where: str,
        launch: Launch,
        ranks: Sequence[int],
        on_progress: Callable[[StageProgress], None] | None,
    ) -> None:
        self.where, self.launch = where, launch
        self.keys = [key.decode() for key in zmq.curve_keypair()]
        self.ranks = [rank for rank in ranks if launch.table[rank].info.local_rank == 0]
        self.is_seen = False  # whether a node sees the source
        self.sender: NotebookSource | None = None  # if no node sees it
        self._infos = {rank: launch.table[rank].info for rank in ranks}
        self._mark = f"mark-{uuid.uuid4().hex[:8]}"
        self._on_progress = on_progress
        self._asked: dict[int, Future[Message]] = {}
        self._states: dict[int, Message] = {}
        self._has_ended = False
        self._began = self._due = time.monotonic()

    def prepare(self, to: str | None) -> list[Place]:
        """Prepare the nodes; return them in their order, one that sees the source first."""
        request = PrepareStaging(source=self.where, to=to, mark=self._mark, keys=self.keys)
        ready = {rank: reply["content"] for rank, reply in ask(self.launch, self.ranks, request).items()}
        refused = [f"rank {rank}: {content['trouble']}" for rank, content in ready.items() if content.get("trouble")]
        if refused:
            raise StageError("; ".join(refused))
        self.ranks.sort(key=lambda rank: not ready[rank]["sees"])
        self.is_seen = ready[self.ranks[0]]["sees"]
        if not self.is_seen and not Path(self.where).exists():
            hosts = ", ".join(dict.fromkeys([*(self._infos[rank].host for rank in ready), socket.gethostname()]))
            raise StageError(
                f"{self.where} does not exist on {hosts}; put it on a file system that a node can read, or use an "
                "address that fsspec reads, such as s3://bucket/folder"
            )
        return [Place(*ready[rank]["place"]) for rank in self.ranks]

    def end(self, ranks: Iterable[int], because: str) -> None:
        """End the copy on ranks, without waiting for it."""
        with suppress(ClusterClosedError):
            for entry in (self.launch.table[rank] for rank in ranks):
                if entry.state != RankState.DEAD:
                    self.launch.open_link.request(entry.engine, EndStaging(mark=self._mark, because=because))

    def on_events(self, events: Sequence[Event], run: CellRun) -> None:
        """Take the replies that have arrived, and send new requests, without waiting."""
        faults = [self._fault_of(event) for event in events] + [self.sender.fault if self.sender else ""]
        because = next(filter(None, faults), "")
        if because and not self._has_ended:
            self._has_ended = True
            self.end(run.running_now, because)
        if self._on_progress is not None and time.monotonic() >= self._due and not run.done:
            self._due = time.monotonic() + STAGING_POLL_SECONDS
            with suppress(ClusterClosedError):  # the cell reports it
                self._poll(self._on_progress)

    def _fault_of(self, event: Event) -> str:
        where = f"rank {event.rank} on {self._infos[event.rank].host}"
        if isinstance(event, Died):
            return f"{where} died"
        return f"{where} failed" if isinstance(event, Replied) and event.content["status"] != "ok" else ""

    def _poll(self, on_progress: Callable[[StageProgress], None]) -> None:
        for rank in self.ranks:
            asked = self._asked.get(rank)
            if asked is None or asked.done():
                if asked is not None and asked.exception() is None:
                    self._states[rank] = asked.result()["content"]
                self._asked[rank] = self.launch.open_link.request(self.launch.table[rank].engine, StagingState())
        states = [each for each in self._states.values() if each.get("phase")]
        if states:
            behind = max(states, key=lambda each: each["total_bytes"] - each["done_bytes"])
            total = max(each["total_bytes"] for each in states)
            on_progress(
                StageProgress(
                    phase=behind["phase"],
                    done_bytes=total - behind["total_bytes"] + behind["done_bytes"],
                    total_bytes=total,
                    nodes=len(self.ranks),
                    seconds=time.monotonic() - self._began,
                )
            )

    def on_late(self, event: Event) -> Event:
        """Leave late events to the next cell."""
        return event

    def on_end(self, run: CellRun) -> None:
        """Do nothing: the caller shows the result."""

    def result(self, run: CellRun) -> Staged:
        """Combine the nodes' reports; raises a StageError if the copy ended early without an error on a node."""
        reports: dict[int, dict[str, Any]] = run.results
        ended = next((report["ended"] for report in reports.values() if report["ended"]), "")
        if ended:
            raise StageError(
                f"{without_secrets(self.where)} was not copied to every node: {ended}; complete files are kept, and "
                "the next call copies the others"
            )
        paths = {self._infos[rank].node_rank: report["path"] for rank, report in reports.items()}
        first = reports[self.ranks[0]]
        return Staged(
            name=Path(first["path"]).name,
            paths={rank: paths[info.node_rank] for rank, info in self._infos.items()},
            files=first["files"],
            size_bytes=first["size_bytes"],
            copied_bytes=max(report["copied_bytes"] for report in reports.values()),
            read_bytes=first["read_bytes"] if self.sender is None else self.sender.node.read_bytes,
            seconds=max(run.durations_s.values()),
            nodes=len(reports),
            shared={
                self._infos[rank].host: each["shares_with"] for rank, each in reports.items() if each["shares_with"]
            },
            read_on=self._infos[self.ranks[0]].host if self.sender is None else str(self.sender),
        )
