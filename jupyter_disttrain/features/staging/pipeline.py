"""Copy a data set through a chain of nodes, as one node of it.

Covers: the protocol between nodes, which blocks each node writes and passes on.
Does not cover: sockets (``links``), files (``source``, ``store``), the request for it (``rank``).

The first node reads the source, once. Each node passes on what those after it lack and writes what it lacks itself,
block by block, so that many copies take about as long as one. The protocol:

1. The list of files goes down the chain; with the hash of each, if all is compared by hash.
2. The numbers of the files that a node, or one after it, lacks come up.
3. The blocks of these files go down in this order; the last one of each file carries the file's hash.
4. Each node reports to the one before that it has everything.

A node that can't continue fails its cell, and the client ends the others.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import zmq

from ...errors import StageError
from ...protocol.time_limits import GREET_SECONDS, PIPELINE_CUT_SECONDS, PIPELINE_POLL_SECONDS
from .source import Source, SourceFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .links import Links, Place
    from .source import Block
    from .store import Store

BLOCKS_AHEAD = 8  # that are read before they are sent
BATCH = 1000  # files in one message
T = TypeVar("T")


class EndedError(Exception):
    """Another node can't continue, or this one was stopped."""


class PipelineNode:
    """One node's part in copying a data set, in a thread that waits for :meth:`start`.

    It closes ``links`` and ``store`` at its end; without a store it only reads.
    """

    def __init__(self, source: str, links: Links, store: Store | None) -> None:
        self._source, self._links, self._store = source, links, store
        self._files: list[SourceFile] = []
        self._own: set[int] = set()  # the numbers of the files that are missing here
        self._after: set[int] = set()  # and on the nodes after this one
        self._read_error: Exception | None = None
        self._go_on = threading.Event()  # set by start and stop
        self._stop_because = ""
        self._shares_with = ""  # the host that writes to the same shared folder
        self.phase = ""  # or "listing", "comparing", "copying", "finishing"
        self.total_bytes = self.done_bytes = self.read_bytes = 0
        self.ended = ""  # why the copy ended early, if this node has not failed
        self.fault: Exception | None = None  # the error of this node
        self.done = threading.Event()
        threading.Thread(target=self._run, name="stage", daemon=True).start()

    # On other threads

    def start(self, chain: Sequence[Place], at: int, *, verify: bool) -> None:
        """Copy, as node number ``at`` of the chain; ``verify``: see :meth:`Store.begin`."""
        self._chain, self._at, self._verify = chain, at, verify
        self._go_on.set()

    def stop(self, because: str) -> None:
        """End the copy soon, also one that has not started."""
        self._stop_because = because
        self._go_on.set()

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

    def _run(self) -> None:
        try:
            self._go_on.wait()
            self._check()
            self._copy()
        except EndedError as end:
            self.ended = str(end)
        except Exception as error:  # noqa: BLE001
            # For any error the client ends the other nodes; the waiting thread raises it.
            self.fault = error
        finally:
            self.stop("it is over")  # ends the thread that reads; if it hangs with its source, it holds nothing
            try:
                self._links.close()
                if self._store is not None:
                    self._store.close()
            finally:
                self.done.set()

    def _copy(self) -> None:
        self.phase = "listing"
        self._deadline = time.monotonic() + GREET_SECONDS
        if self._at + 1 < len(self._chain):
            self._links.connect(self._chain[self._at + 1].url)
        up, down = self._links.up if self._at else None, self._links.down
        source = None if self._at else Source(self._source)
        if source is not None:
            self._files = source.hashed_files(self._check) if self._verify else source.files
        while batch := self._receive(up)[0]:
            self._files += [SourceFile.from_list(fields) for fields in batch]
        for begin in range(0, len(self._files), BATCH):
            self._send(down, self._files[begin : begin + BATCH])
        self._send(down, [])

        self.phase = "comparing"
        self._own = self._missing()
        self.total_bytes = sum(self._files[number].size_bytes for number in self._own)
        self._after = set(self._receive(down)[0])
        numbers = sorted(self._own | self._after)
        self._send(up, numbers)

        self.phase = "copying"
        blocks = self._receive_blocks() if source is None else self._read_ahead(source, numbers)
        for number in numbers:
            passed_on = self._pass_on(number, blocks)
            if self._store is not None and number in self._own:
                self._store.write(self._files[number], passed_on)
            else:
                for _ in passed_on:
                    pass

        self.phase = "finishing"
        self._send(up, [])
        self._receive(down)  # what it has not received yet would be lost with the connection

    def _missing(self) -> set[int]:
        if self._store is None or (self._at == 0 and self._store.is_source):
            return set()
        for place in self._chain[: self._at]:
            if place.mark and self._store.sees_mark(place.mark):
                self._shares_with = place.host
                return set()
        return self._store.begin(self._files, verify=self._verify, check=self._check)

    # Blocks

    def _pass_on(self, number: int, blocks: Iterator[Block]) -> Iterator[Block]:
        """Yield a file's blocks, each after it was sent to the next node, if that lacks the file."""
        for hashed, block in blocks:
            if number in self._after:
                self._send(self._links.down, hashed, block)
            yield hashed, block
            if number in self._own:
                self.done_bytes += len(block)
            if hashed:
                return

    def _receive_blocks(self) -> Iterator[Block]:
        while True:
            hashed, block = self._receive(self._links.up)
            yield hashed, block

    def _read_ahead(self, source: Source, numbers: Sequence[int]) -> Iterator[Block]:
        """Yield the blocks of files, which a thread reads: reading may hang."""
        blocks: queue.Queue[Block] = queue.Queue(BLOCKS_AHEAD)

        def read() -> None:
            try:
                for item in source.blocks(numbers):
                    self.read_bytes += len(item[1])
                    self._turn(partial(blocks.put, item, timeout=PIPELINE_POLL_SECONDS))
            except EndedError:
                pass  # the reason is known
            except Exception as error:  # noqa: BLE001  (the main thread of the copy raises it)
                self._read_error = error

        threading.Thread(target=read, name="stage read", daemon=True).start()
        while True:
            yield self._turn(partial(blocks.get, timeout=PIPELINE_POLL_SECONDS))

    # Waiting

    def _check(self) -> None:
        if self._read_error is not None:
            raise self._read_error
        if self._stop_because:
            raise EndedError(self._stop_because)

    def _check_connection(self) -> None:
        """Check the connection to the node after; the client ends this node first if that one has failed."""
        links, now = self._links, time.monotonic()
        if links.down is None:
            return
        links.update()
        here, after = self._chain[self._at : self._at + 2]
        if not links.is_reached and now > self._deadline:
            raise StageError(
                f"{here.host} could not connect to {after.host} at {after.url} within {GREET_SECONDS:g} s; open the "
                "ports between the nodes, or name the network that is open with --interface"
            )
        # A node may leave first, once it has reported that it has everything.
        if links.cut_at is not None and now > links.cut_at + PIPELINE_CUT_SECONDS and not links.down.poll(0):
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

    def _send(self, sock: zmq.Socket[bytes] | None, head: Any, *parts: Any) -> None:
        """Send a message, if there is a node on that side."""
        if sock is not None:
            message = [json.dumps(head).encode(), *parts]
            self._turn(partial(sock.send_multipart, message, copy=False))

    def _receive(self, sock: zmq.Socket[bytes] | None) -> list[Any]:
        """Return the next message: its head, and the frames behind it; an empty one if no node is on that side."""
        if sock is None:
            return [[]]
        head, *parts = self._turn(lambda: sock.recv_multipart(copy=False))
        return [json.loads(head.bytes), *parts]
