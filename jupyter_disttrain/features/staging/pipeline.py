"""Copy a data set through a chain of nodes, as one node of it.

Covers: the protocol between nodes, which blocks each node takes and passes on, normal and abnormal ends.
Does not cover: sockets (``peers``), files (``reader``, ``store``), the request for it (``rank``).

The first node reads the source, once. Each node writes what it lacks and passes on what those after it lack, block by
block, so that many copies take about as long as one. The protocol:

1. Neighbours exchange a greeting.
2. The list of files goes down the chain; with the hash of each, if all is compared by hash.
3. What is missing comes up: for each file the first block that this node, or one after it, lacks.
4. Blocks go down, then the hash of each file.
5. From the last node on each reports that it is done, with what it did.

A node that can't continue sends the reason to both sides, which pass it on and end as well.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any

from ...errors import StageError
from ...protocol.time_limits import GREET_SECONDS, PASS_END_ON_SECONDS, PIPELINE_POLL_SECONDS
from .partial_file import whole_hash
from .peers import DOWN, UP
from .reader import hash_files, read_blocks
from .source import BLOCK_BYTES, Source, SourceFile, inside_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .peers import Neighbours, Place
    from .reader import Item, Target

BLOCKS_AHEAD = 8  # blocks that are read, or not written yet
BATCH = 1000  # files in one message
OTHER = {UP: DOWN, DOWN: UP}


class EndedError(Exception):
    """Another node can't continue, or this one was stopped."""


class PipelineNode:
    """One node's part in copying a data set.

    Attributes
    ----------
    phase : str
        The current step: ``"greeting"``, ``"listing"``, ``"comparing"``, ``"copying"``, ``"finishing"``.
    """

    def __init__(
        self, source: str, chain: Sequence[Place], at: int, neighbours: Neighbours, store: Target, *, verify: bool
    ) -> None:
        self._source_name, self._chain, self._at = source, chain, at
        self._neighbours, self._store, self._verify = neighbours, store, verify
        self._source: Source | None = None
        self._files: list[SourceFile] = []
        self._empty_folders: list[str] = []
        self._is_folder = True
        self._own: dict[int, int] = {}  # the first block that is missing here, by file
        self._after: dict[int, int] = {}  # and on the nodes after this one
        self._to_write: queue.Queue[Item | None] = queue.Queue(BLOCKS_AHEAD)
        self._read: queue.Queue[Item | None] = queue.Queue(BLOCKS_AHEAD)
        self._trouble: BaseException | None = None  # error of the threads that read and write
        self._stop_because = ""
        self._over = False
        self._writer: threading.Thread | None = None
        self._parted: set[str] = set()  # sides of neighbours that are done
        self._reports: list[dict[str, Any]] = []
        self._shares_with = ""  # the host that writes to the same shared folder
        self.phase = "greeting"
        self.total_bytes = self.done_bytes = self.read_bytes = 0
        self.ended = ""  # why it ended early
        self.fault: BaseException | None = None  # error of this node

    # On other threads

    def stop(self, because: str) -> None:
        """End the copy soon."""
        self._stop_because = because

    def report(self) -> dict[str, Any]:
        """Return what this node has done."""
        return {
            "rank": self._chain[self._at].rank,
            "host": self._chain[self._at].host,
            "path": str(self._store.path),
            "files": len(self._files),
            "size_bytes": sum(file.size_bytes for file in self._files),
            "copied_files": len(self._own),
            "copied_bytes": self.done_bytes,
            "read_bytes": self.read_bytes,
            "shares_with": self._shares_with,
            "ended": self.ended,
        }

    # All steps

    def run(self) -> None:
        """Run all steps; afterwards :attr:`fault` or :attr:`ended` hold what went wrong."""
        try:
            self._go()
        except EndedError as end:
            self.ended = str(end)
            self._pass_on_end(self.ended)
        except Exception as error:  # noqa: BLE001
            # For any error the other nodes have to end, and the waiting thread raises it.
            self.fault = error
            self._pass_on_end(f"{self._chain[self._at].label}: {error}")
        finally:
            self._over = True
            if self._writer is not None:
                self._writer.join()  # the thread that reads may hang with its source, and holds nothing
            try:
                self._store.close()
            finally:
                self._neighbours.close()

    def _go(self) -> None:
        before = self._chain[self._at - 1] if self._at else None
        after = self._chain[self._at + 1] if self._at + 1 < len(self._chain) else None
        self._neighbours.join(before, after)
        self._greet()
        self.phase = "listing"
        self._share_list()
        self.phase = "comparing"
        self._share_needs()
        self.phase = "copying"
        self._writer = self._start(self._write_all)
        if self._at == 0:
            self._start(self._read_all)
            self._send_what_is_read()
        else:
            self._take_what_comes()
        self.phase = "finishing"
        self._put(self._to_write, None)
        self._finish()

    def _sharer(self) -> Place | None:
        """Return the node before this one that sees the same folder, and writes there."""
        others = self._chain[: self._at]
        return next((place for place in others if self._store.sees_mark(place.mark)), None)

    # Messages of neighbours

    def _check(self) -> None:
        if self._trouble is not None:
            raise self._trouble
        if self._stop_because:
            raise EndedError(self._stop_because)
        for side in (UP, DOWN):
            if side in self._neighbours and side not in self._parted and self._neighbours.is_gone(side):
                while (found := self._neighbours.receive(side)) is not None:  # its final messages
                    self._raise_if_ended(found[0])
                raise EndedError(f"the connection to {self._neighbour(side).label} was lost")

    def _raise_if_ended(self, head: dict[str, Any]) -> None:
        if head["type"] == "end":
            raise EndedError(head["because"])

    def _neighbour(self, side: str) -> Place:
        return self._chain[self._at + (1 if side == DOWN else -1)]

    def _next(self, side: str, deadline: float | None = None) -> tuple[dict[str, Any], list[Any]] | None:
        """Return the next message from a side; None if there was none until ``deadline``."""
        while True:
            found = self._neighbours.receive(side)
            if found is not None:
                self._raise_if_ended(found[0])
                return found
            self._check_for_end(OTHER[side])
            self._check()
            if deadline is not None and time.monotonic() > deadline:
                return None
            self._neighbours.wait(PIPELINE_POLL_SECONDS, [side])

    def _check_for_end(self, side: str) -> None:
        """Check for an end from the node after this one; that of the one before comes after its blocks."""
        if side == DOWN and DOWN in self._neighbours and self.phase != "greeting":
            found = self._neighbours.receive(DOWN)
            if found is not None:
                self._raise_if_ended(found[0])
                raise AssertionError("no other message comes while this node waits for the one before")

    def _send(self, side: str, head: dict[str, Any], parts: Sequence[Any] = ()) -> None:
        while not self._neighbours.send(side, head, parts):
            self._neighbours.wait(PIPELINE_POLL_SECONDS, [DOWN], [side])
            self._check_for_end(OTHER[side] if side == UP else DOWN)
            self._check()

    def _pass_on_end(self, because: str) -> None:
        """Send the end to both neighbours; one that does not receive it sees the connection end."""
        waiting = [side for side in (UP, DOWN) if side in self._neighbours]
        until = time.monotonic() + PASS_END_ON_SECONDS
        while waiting and time.monotonic() < until:
            waiting = [
                side
                for side in waiting
                if not self._neighbours.is_gone(side)
                and not self._neighbours.send(side, {"type": "end", "because": because})
            ]
            self._neighbours.wait(PIPELINE_POLL_SECONDS if waiting else 0, [], waiting)

    # 1: greeting

    def _greet(self) -> None:
        if DOWN in self._neighbours:
            self._send(DOWN, {"type": "hello"})
        deadline = time.monotonic() + GREET_SECONDS
        if UP in self._neighbours:
            if self._next(UP, deadline) is None:
                raise EndedError(f"{self._neighbour(UP).label} did not connect within {GREET_SECONDS:g} s")
            self._send(UP, {"type": "hello"})
        if DOWN in self._neighbours and self._next(DOWN, time.monotonic() + GREET_SECONDS) is None:
            after = self._neighbour(DOWN)
            raise StageError(
                f"{self._chain[self._at].host} could not connect to {after.host} at {after.url} within "
                f"{GREET_SECONDS:g} s; "
                "open the ports between the nodes, or choose a network that is open with --interface"
            )

    # 2: the list of files

    def _share_list(self) -> None:
        if self._at == 0:
            self._source = Source(self._source_name)
            if self._verify:
                self.phase = "comparing"
                self._source.files = hash_files(self._source, self._check_stop)
            self._files, self._is_folder = self._source.files, self._source.is_folder
            self._empty_folders = self._source.empty_folders
        else:
            while (found := self._next(UP)) is not None and found[0]["type"] == "files":
                self._files += [SourceFile.from_list(listed) for listed in found[0]["files"]]
            assert found is not None
            self._is_folder = found[0]["is_folder"]
            self._empty_folders = [inside_name(name) for name in found[0]["empty_folders"]]
        if DOWN not in self._neighbours:
            return
        for begin in range(0, len(self._files), BATCH):
            listed = [file.as_list() for file in self._files[begin : begin + BATCH]]
            self._send(DOWN, {"type": "files", "files": listed})
        self._send(DOWN, {"type": "listed", "is_folder": self._is_folder, "empty_folders": self._empty_folders})

    # 3: what is missing

    def _share_needs(self) -> None:
        sharer = self._sharer()
        self._shares_with = "" if sharer is None else sharer.host
        if sharer is None and not (self._at == 0 and self._store.is_source):
            folders = self._empty_folders if self._is_folder else None
            self._own = self._store.begin(self._files, folders, verify=self._verify, check=self._check_stop)
        self.total_bytes = sum(self._bytes_from(at, first) for at, first in self._own.items())
        if DOWN in self._neighbours:
            while (found := self._next(DOWN)) is not None and found[0]["type"] == "needs":
                self._after |= {int(at): first for at, first in found[0]["needs"]}
        if UP in self._neighbours:
            needs = list(self._needs().items())
            for begin in range(0, len(needs), BATCH):
                self._send(UP, {"type": "needs", "needs": needs[begin : begin + BATCH]})
            self._send(UP, {"type": "needed"})

    def _check_stop(self) -> None:
        if self._stop_because:
            raise EndedError(self._stop_because)

    def _needs(self) -> dict[int, int]:
        """Return the first block of each file that is missing here or on a node after this one."""
        both = self._own.keys() | self._after.keys()
        return {at: min(needs[at] for needs in (self._own, self._after) if at in needs) for at in sorted(both)}

    def _bytes_from(self, at: int, first: int) -> int:
        return max(0, self._files[at].size_bytes - first * BLOCK_BYTES)

    # 4: blocks

    def _start(self, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=self._guarded, args=(target,), name=f"stage {target.__name__}", daemon=True)
        thread.start()
        return thread

    def _guarded(self, target: Callable[[], None]) -> None:
        try:
            target()
        except EndedError:
            pass  # the reason is known
        except Exception as error:  # noqa: BLE001  (the relay's thread raises it)
            self._trouble = error

    def _put(self, items: queue.Queue[Item | None], item: Item | None) -> None:
        """Put an item into a queue, unless the copy ends."""
        while True:
            try:
                items.put(item, timeout=PIPELINE_POLL_SECONDS)
            except queue.Full:
                if items is self._read:
                    self._check_over()
                    continue
                if self.phase != "finishing":  # a faster node may already report that it is done
                    self._check_for_end(DOWN)
                self._check()
            else:
                return

    def _take(self, items: queue.Queue[Item | None]) -> Item | None:
        """Take an item from a queue, unless the copy ends; called on the threads that read and write."""
        while True:
            try:
                return items.get(timeout=PIPELINE_POLL_SECONDS)
            except queue.Empty:
                self._check_over()

    def _check_over(self) -> None:
        if self._over or self._trouble is not None or self._stop_because:
            raise EndedError

    def _read_all(self) -> None:
        assert self._source is not None
        for item in read_blocks(self._source, self._needs(), self._own, self._store):
            self.read_bytes += len(item[2])
            self._put(self._read, item)
        self._put(self._read, None)

    def _send_what_is_read(self) -> None:
        while True:
            try:
                item = self._read.get(timeout=PIPELINE_POLL_SECONDS)
            except queue.Empty:
                self._neighbours.wait(0, [])
                self._check_for_end(DOWN)
                self._check()
                continue
            if item is None:
                break
            self._hand_on(item)
        if DOWN in self._neighbours:
            self._send(DOWN, {"type": "sent"})

    def _take_what_comes(self) -> None:
        while (found := self._next(UP)) is not None and found[0]["type"] == "block":
            head, (digest, block) = found
            self._hand_on((head["at"], head["number"], block, digest.bytes))
        if DOWN in self._neighbours:
            self._send(DOWN, {"type": "sent"})

    def _hand_on(self, item: Item) -> None:
        """Queue a block for writing, and pass it on, where it is missing."""
        at, number, block, digest = item
        if at in self._own and (number < 0 or number >= self._own[at]):
            self._put(self._to_write, (at, number, getattr(block, "buffer", block), digest))
        if at in self._after and (number < 0 or number >= self._after[at]):
            self._send(DOWN, {"type": "block", "at": at, "number": number}, [digest, block])

    def _write_all(self) -> None:
        while (item := self._take(self._to_write)) is not None:
            at, number, block, digest = item
            if number < 0:
                self._store.finish(at, digest.decode())
            else:
                self._store.write(at, number, block, digest)
                self.done_bytes += len(block)
                if self._files[at].blocks == 1:
                    self._store.finish(at, whole_hash([digest]))

    # 5: the end

    def _finish(self) -> None:
        assert self._writer is not None
        while self._writer.is_alive():
            self._neighbours.wait(0, [])
            self._writer.join(PIPELINE_POLL_SECONDS)
            self._check()
        self._check()
        if DOWN in self._neighbours:
            found = self._next(DOWN)
            assert found is not None
            self._reports = found[0]["reports"]
            self._parted.add(DOWN)
            self._send(DOWN, {"type": "bye"})
        self._reports.insert(0, self.report())
        if UP in self._neighbours:
            self._send(UP, {"type": "done", "reports": self._reports})
            self._next(UP)  # a node that exits before that was read would count as lost
