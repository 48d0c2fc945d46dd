"""What a rank prints: streams, dropped messages."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from jupyter_disttrain.rank.nanny.stderr_filter import without_noise
from jupyter_disttrain.rank.output.iopub import Publisher
from jupyter_disttrain.rank.output.streams import RankStream, Turns

from ..records import cell_started

LIBEVENT = (
    b"[warn] Epoll ADD(4) on fd 50 failed. Old events were 0; read change was 0 (none); write change was 1 (add); "
    b"close change was 0 (none): Bad file descriptor\n"
)


def test_unfinished_line_is_sent_before_the_next_cell_begins() -> None:
    read, write = os.pipe()
    os.set_blocking(read, False)
    turns = Turns(SimpleNamespace(wait_read=lambda _: None))  # type: ignore[arg-type]
    stream = RankStream(write, "stdout", turns)
    handled: list[bytes] = []
    rank_end: Any = SimpleNamespace(begin_cell=lambda _: handled.append(os.read(read, 100)))
    with turns.lock:  # which keeps the thread that sends unfinished lines from doing so first
        print("working", end="", file=stream)
        Publisher(rank_end, turns, lambda _: b"").attribute_output(cell_started(1))
    assert handled == [b"working"]


def test_libevent_message_on_a_dead_connection_is_dropped_and_others_are_kept() -> None:
    assert without_noise(b"before\n" + LIBEVENT + b"after\n") == b"before\nafter\n"
    other = b"[warn] Epoll is what my lecture is about\nframe #0: of my film\n"
    assert without_noise(other) == other
