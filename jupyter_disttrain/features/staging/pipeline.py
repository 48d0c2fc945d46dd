"""Copy a data set through a chain of nodes, as one node of it.

Covers: the protocol between nodes, which blocks each node writes and passes on.
Does not cover: sockets (``links``), files (``source``, ``store``), the request for it (``rank``).

The first node reads the source, once. Each node writes what it lacks and passes on what those after it lack, block by
block, so that many copies take about as long as one. The protocol:

1. The list of files goes down the chain; with the hash of each, if all is compared by hash.
2. The numbers of the files that a node, or one after it, lacks come up.
3. The blocks of these files go down; the last one of each file carries the file's hash.
4. Each node reports to the one before that it has received everything.

A node that can't continue fails its cell, and the client ends the others.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import zmq

from ...errors import StageError
from ...protocol.time_limits import GREET_SECONDS, PIPELINE_CUT_SECONDS, PIPELINE_POLL_SECONDS
from .source import Item, Source, SourceFile, hash_files, read_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .links import Links, Place
    from .store import Store

BLOCKS_AHEAD = 8  # blocks that are read, or not written yet
BATCH = 1000  # files in one message
T = TypeVar("T")
Queue = queue.Queue[Item | None]


class EndedError(Exception):
    """Another node can't continue, or this one was stopped."""


class PipelineNode:
    """One node's part in copying a data set.

    It closes ``links`` and ``store`` at its end; without a store it only reads.

    Attributes
    ----------
    phase : str
        The current step: ``""`` (not started), ``"listing"``, ``"comparing"``, ``"copying"``, ``"finishing"``.
    ended : str
        Why the copy ended early, if this node has not failed.
    fault : Exception or None
        The error of this node.
    done : threading.Event
        Set at the end.
    """

    def __init__(self, source: str, links: Links, store: Store | None) -> None:
        self._source, self._links, self._store = source, links, store
        self._files: list[SourceFile] = []
        self._own: set[int] = set()  # the numbers of the files that are missing here
        self._after: set[int] = set()  # and on the nodes after this one
        self._to_write: Queue = queue.Queue(BLOCKS_AHEAD)
        self._was_read: Queue = queue.Queue(BLOCKS_AHEAD)
        self._trouble: Exception | None = None  # error of the threads that read and write
        self._stop_because = ""
        self._shares_with = ""  # the host that writes to the same shared folder
        self.phase = ""
        self.total_bytes = self.done_bytes = self.read_bytes = 0
        self.ended = ""
        self.fault: Exception | None = None
        self.done = threading.Event()

    # On other threads

    def stop(self, because: str) -> None:
        """End the copy soon."""
        self._stop_because = because

    def report(self) -> dict[str, Any]:
        """Return what this node has done."""
        return {
            "path": "" if self._store is None else str(self._store.path),
            "files": sum(not file.is_folder for file in self._files),
            "size_bytes": sum(file.size_bytes for file in self._files),
            "copied_files": len(self._own),
            "copied_bytes": self.done_bytes,
            "read_bytes": self.read_bytes,
            "shares_with": self._shares_with,
            "ended": self.ended,
        }

    # All steps

    def start(self, chain: Sequence[Place], at: int, *, verify: bool) -> None:
        """Copy in a thread, as node number ``at`` of the chain; ``verify``: see :meth:`Store.begin`."""
        self._chain, self._at, self._verify = chain, at, verify
        self.phase = "listing"
        threading.Thread(target=self._run, name="stage", daemon=True).start()

    def _run(self) -> None:
        writer = self._start(self._write)
        try:
            self._links.join(self._chain, self._at)
            self._deadline = time.monotonic() + GREET_SECONDS
            self._copy(writer)
        except EndedError as end:
            self.ended = str(end)
        except Exception as error:  # noqa: BLE001
            # For any error the client ends the other nodes; the waiting thread raises it.
            self.fault = error
        finally:
            self.stop("it is over")  # ends the threads
            writer.join()  # the thread that reads may hang with its source, and holds nothing
            try:
                self.close()
            finally:
                self.done.set()

    def _copy(self, writer: threading.Thread) -> None:
        up, down = self._links.up, self._links.down
        source = Source(self._source) if self._at == 0 else None
        if source is not None:
            self._files = hash_files(source, self._check) if self._verify else source.files
        while batch := self._receive(up)[0]:
            self._files += [SourceFile.from_list(fields) for fields in batch]
        for begin in range(0, len(self._files), BATCH):
            self._send(down, self._files[begin : begin + BATCH])
        self._send(down, [])

        self.phase = "comparing"
        self._own = self._missing()
        self.total_bytes = sum(self._files[number].size_bytes for number in self._own)
        self._after = set(self._receive(down)[0])
        self._send(up, sorted(self._own | self._after))

        self.phase = "copying"
        for item in self._receive_blocks() if source is None else self._read_ahead(source):
            number, hashed, block = item
            if number in self._own:
                self._put(self._to_write, item)
            if number in self._after:
                self._send(down, [number, hashed], block)
        self._put(self._to_write, None)
        self._send(down, [])

        self.phase = "finishing"
        self._send(up, [])
        while writer.is_alive():
            writer.join(PIPELINE_POLL_SECONDS)
            self._check()
        self._receive(down)  # what it has not received yet would be lost with the connection
        self._check()

    def close(self) -> None:
        """Close the sockets and the store."""
        self._links.close()
        if self._store is not None:
            self._store.close()

    def _missing(self) -> set[int]:
        if self._store is None or (self._at == 0 and self._store.is_source):
            return set()
        for place in self._chain[: self._at]:
            if place.mark and self._store.sees_mark(place.mark):
                self._shares_with = place.host
                return set()
        return self._store.begin(self._files, verify=self._verify, check=self._check)

    # Blocks

    def _receive_blocks(self) -> Iterator[Item]:
        while (message := self._receive(self._links.up))[0]:
            (number, hashed), block = message
            yield number, hashed, block

    def _read_ahead(self, source: Source) -> Iterator[Item]:
        self._start(self._read, source)
        while (item := self._turn(lambda: self._was_read.get(timeout=PIPELINE_POLL_SECONDS))) is not None:
            yield item

    def _read(self, source: Source) -> None:
        for item in read_blocks(source, sorted(self._own | self._after)):
            self.read_bytes += len(item[2])
            self._put(self._was_read, item)
        self._put(self._was_read, None)

    def _write(self) -> None:
        while (item := self._turn(lambda: self._to_write.get(timeout=PIPELINE_POLL_SECONDS))) is not None:
            assert self._store is not None
            self._store.write(*item)
            self.done_bytes += len(item[2])

    # Waiting

    def _start(self, target: Callable[..., None], *args: Any) -> threading.Thread:
        def guarded() -> None:
            try:
                target(*args)
            except EndedError:
                pass  # the reason is known
            except Exception as error:  # noqa: BLE001  (the main thread of the copy raises it)
                self._trouble = error

        thread = threading.Thread(target=guarded, name=f"stage {target.__name__}", daemon=True)
        thread.start()
        return thread

    def _check(self) -> None:
        if self._trouble is not None:
            raise self._trouble
        if self._stop_because:
            raise EndedError(self._stop_because)

    def _check_connection(self) -> None:
        """Check the connection to the node after; the client ends this node first if that one has failed."""
        links, now = self._links, time.monotonic()
        links.update()
        if links.down is None:
            return
        here, after = self._chain[self._at : self._at + 2]
        if not links.is_reached and now > self._deadline:
            raise StageError(
                f"{here.host} could not connect to {after.host} at {after.url} within {GREET_SECONDS:g} s; open the "
                "ports between the nodes, or name the network that is open with --interface"
            )
        if links.cut_at is not None and now > links.cut_at + PIPELINE_CUT_SECONDS:
            raise StageError(f"the connection from {here.host} to {after.label} was cut; stage it again")

    def _turn(self, call: Callable[[], T]) -> T:
        """Repeat a call with a time limit until it succeeds, or the copy ends."""
        while True:
            self._check()  # also where no call has to wait
            try:
                return call()
            except (queue.Empty, queue.Full):
                pass
            except zmq.Again:
                self._check_connection()

    def _put(self, items: Queue, item: Item | None) -> None:
        self._turn(lambda: items.put(item, timeout=PIPELINE_POLL_SECONDS))

    def _send(self, sock: zmq.Socket[bytes] | None, head: Sequence[Any], *parts: Any) -> None:
        """Send a message, if there is a node on that side."""
        if sock is not None:
            message = [json.dumps(head).encode(), *parts]
            self._turn(lambda: sock.send_multipart(message, copy=False))

    def _receive(self, sock: zmq.Socket[bytes] | None) -> list[Any]:
        """Return the next message: its head, and the frames behind it; an empty one if no node is on that side."""
        if sock is None:
            return [[]]
        head, *parts = self._turn(lambda: sock.recv_multipart(copy=False))
        return [json.loads(head.bytes), *parts]
