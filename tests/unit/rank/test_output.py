"""What a rank prints: streams, descriptors, dropped messages."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from jupyter_disttrain.rank.nanny.stderr_filter import without_noise
from jupyter_disttrain.rank.output.iopub import Publisher
from jupyter_disttrain.rank.output.streams import Descriptors, RankStream, Turns

from ..records import cell_started

if TYPE_CHECKING:
    from pathlib import Path

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


def test_redirected_stdin_is_restored(tmp_path: Path) -> None:
    saved = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    descriptors = Descriptors(SimpleNamespace(stdout_write=1, stderr_write=2))  # type: ignore[arg-type]
    (tmp_path / "answers").write_text("yes\n")
    answers = os.open(tmp_path / "answers", os.O_RDONLY)
    try:
        os.dup2(answers, 0)
        message = descriptors.restore()
        assert message.endswith("restored for the next one: 0")
        assert os.path.samestat(os.fstat(0), os.fstat(nothing))
        assert not descriptors.restore()
    finally:
        os.dup2(saved, 0)
        for descriptor in (saved, nothing, answers):
            os.close(descriptor)


def test_libevent_message_on_a_dead_connection_is_dropped_and_others_are_kept() -> None:
    assert without_noise(b"before\n" + LIBEVENT + b"after\n") == b"before\nafter\n"
    other = b"[warn] Epoll is what my lecture is about\nframe #0: of my film\n"
    assert without_noise(other) == other
