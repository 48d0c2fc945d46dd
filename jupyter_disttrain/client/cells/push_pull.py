"""Move variables between the notebook and the ranks, and compare them.

Covers: push, pull, copy, diff; errors that name the ranks where a variable is missing or can't be sent.
Does not cover: pickling (``protocol.serialization``), shared memory (``protocol.shared_memory``), computing differences
(``compare``).
"""

from __future__ import annotations

import keyword
from concurrent.futures import wait
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import UnserializableValueError, UsageError
from ...protocol.ranks import label_ranks
from ...protocol.requests import Digest, Numbers, Pull, Push, RankRequest
from ...protocol.serialization import dump_values, load_from
from ...protocol.shared_memory import drop, fetch, lend
from ...protocol.states import RankState
from .history import Copied

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from ..startup.launch import Launch
    from ..startup.rank_table import RankEntry
    from ..transport.link import Message
    from .compare import Comparison


def check_names(names: Iterable[str]) -> None:
    """Raise a UsageError for names that are not valid variable names."""
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise UsageError(f"{name!r} is not a variable's name; use names such as lr or batch_size")


def push(launch: Launch, ranks: Sequence[int], values: Mapping[str, Any]) -> None:
    """Set variables on ranks."""
    pickled, buffers = dump_values(values)
    _send(launch, ranks, pickled, buffers)
    launch.journal.pushed(values, ranks, pickled, buffers)


def _send(launch: Launch, ranks: Sequence[int], pickled: Any, buffers: Sequence[Any]) -> None:
    shared = all(launch.table[rank].sees_shelf for rank in ranks)
    note, frames = lend(launch.folders.shelf_name if shared else None, buffers)
    try:
        ask(launch, ranks, Push(shelf=note), [pickled, *frames])
    finally:
        drop(launch.folders.shelf_name, note)


def pull(launch: Launch, ranks: Sequence[int], names: Sequence[str]) -> dict[int, dict[str, Any]]:
    """Return variables of ranks: by rank, then by name."""
    replies = ask(launch, ranks, Pull(names=list(names)))
    contents = {rank: reply["content"] for rank, reply in replies.items()}
    found = [rank for rank, content in contents.items() if content["status"] == "ok"]
    values = {rank: load_from(rank, _taken(launch, rank, replies[rank])) for rank in found}
    _check_found(contents, "set it in a %%distributed cell first")
    return values


def _check_found(contents: Mapping[int, Mapping[str, Any]], advice: str) -> None:
    """Raise an error if ranks lack variables, listed as ``names``, or can't send them, for the listed ``reasons``."""
    missing: dict[str, list[int]] = {}
    refused: dict[str, list[int]] = {}
    for rank, content in contents.items():
        for name in content.get("names", ()):
            missing.setdefault(name, []).append(rank)
        for reason in content.get("reasons", ()):
            refused.setdefault(reason, []).append(rank)
    if missing:
        by_ranks: dict[str, list[str]] = {}
        for name, who in missing.items():
            by_ranks.setdefault(f"{label_ranks(who)} {'has' if len(who) == 1 else 'have'}", []).append(repr(name))
        texts = [f"{who} no {', '.join(names)}" for who, names in by_ranks.items()]
        raise UsageError(f"{'; '.join(texts)}; {advice}")
    if refused:
        raise UnserializableValueError("; ".join(f"{label_ranks(who)}: {reason}" for reason, who in refused.items()))


def copy(launch: Launch, source: int, ranks: Sequence[int], names: Sequence[str]) -> None:
    """Copy variables from one rank to others, through the notebook's process, where they are not unpickled."""
    others = [rank for rank in ranks if rank != source]
    if not others:
        raise UsageError(f"rank {source} has its own variables already; name other ranks with --to")
    reply = ask(launch, [source], Pull(names=list(names), whole=True))[source]
    _check_found({source: reply["content"]}, f"set it there in a %%rank {source} cell first")
    pickled, *buffers = _taken(launch, source, reply)
    _send(launch, others, pickled, buffers)
    launch.journal.add(Copied(names=tuple(names), source=source, ranks=tuple(others)))


def diff(launch: Launch, ranks: Sequence[int], name: str) -> Comparison:
    """Compare a variable over ranks."""
    if len(ranks) < 2:  # noqa: PLR2004
        raise UsageError(f"{label_ranks(ranks)} can't be compared with itself; name at least two ranks with -r")
    contents = {rank: reply["content"] for rank, reply in ask(launch, ranks, Digest(name=name)).items()}
    missing = {rank: {"names": [name]} for rank, content in contents.items() if content["status"] == "missing"}
    _check_found(missing, "set it in a %%distributed cell first, or leave ranks out with -r")

    def numbers_of(path: str, some: Sequence[int]) -> dict[int, Any]:
        replies = ask(launch, ranks, Numbers(name=name, path=path, ranks=list(some)))
        return {rank: load_from(rank, _taken(launch, rank, replies[rank])) for rank in some}

    from .compare import compare  # noqa: PLC0415  (numpy takes a kernel 10 MB)

    return compare(name, {rank: content["parts"] for rank, content in contents.items()}, numbers_of)


def _taken(launch: Launch, rank: int, reply: Message) -> list[Any]:
    """Return the buffers of a rank's reply."""
    try:
        return from_shared_memory(launch.folders.shelf_name, reply["content"]["shelf"], reply["buffers"])
    except ValueError as error:
        host = launch.table[rank].info.host
        raise UnserializableValueError(f"the value of rank {rank} on {host} could not be received: {error}") from error


def from_shared_memory(folder: str | None, note: Message | None, buffers: Sequence[Any]) -> list[Any]:
    """Return a reply's buffers; mapping its shared-memory file at once ensures that the file is removed."""
    try:
        return [*buffers[:1], *fetch(folder, note, buffers[1:])]
    finally:
        drop(folder, note)


def with_value(folder: str | None, content: Message, buffers: Sequence[Any]) -> tuple[Message, list[Any]]:
    """Return a cell's reply and its buffers; a value that can't be mapped must not lose the reply."""
    try:
        return content, from_shared_memory(folder, content.get("value", {}).get("shelf"), buffers)
    except ValueError as error:
        reason = str(error)
    except FileNotFoundError:
        reason = "it was sent to the notebook that ran the cell"  # the reply was repeated after that
    except OSError as error:
        reason = f"the notebook can't map its shared memory ({error.strerror})"
    return content | {"value": {"kind": "unserializable", "reason": reason}}, []


def ask(launch: Launch, ranks: Sequence[int], request: RankRequest, buffers: Sequence[Any] = ()) -> dict[int, Message]:
    """Send a request to each rank and wait for all replies."""
    link = launch.open_link
    entries = {rank: launch.table[rank] for rank in ranks}  # of the processes that reply; one may be replaced meanwhile
    futures = {rank: link.request(entry.engine, request, buffers=buffers) for rank, entry in entries.items()}
    try:
        replies = {rank: _wait_for(future, entries[rank]) for rank, future in futures.items()}
    except BaseException:  # usually an interrupt: files of replies still to come must not stay in shared memory
        for future in futures.values():
            future.add_done_callback(partial(_discard, launch))
        raise
    for rank, reply in replies.items():
        content = reply["content"]
        if content["status"] == "error":
            raise UsageError(f"rank {rank} on {entries[rank].info.host}: {content['ename']}: {content['evalue']}")
    return replies


def _discard(launch: Launch, future: Future[Message]) -> None:
    """Remove the shared-memory file of a reply that no caller waits for any more."""
    if future.exception() is None:
        drop(launch.folders.shelf_name, future.result()["content"].get("shelf"))


def _wait_for(future: Future[Message], entry: RankEntry) -> Message:
    while not wait([future], 0.2).done:
        if entry.state == RankState.DEAD:
            who = f"rank {entry.info.rank} ({entry.info.host})"
            raise UsageError(
                f"{who} died before it replied; try again once it is replaced, which the next output reports"
            )
    return future.result()
