"""What a rank prints: streams, messages that JSON can't hold, dropped messages, the log."""

from __future__ import annotations

import json
import os
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from jupyter_client.session import Session

from jupyter_disttrain.rank.nanny.ipc import RankEnd, Wire
from jupyter_disttrain.rank.nanny.log_file import RankLog
from jupyter_disttrain.rank.nanny.stderr_filter import without_noise
from jupyter_disttrain.rank.output.iopub import Publisher, escaping
from jupyter_disttrain.rank.output.streams import RankStream, Turns

from ..records import cell_started

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

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


def test_rank_end_with_a_reused_descriptor_is_closed(tmp_path: Path) -> None:
    wire = Wire()
    rank_end = RankEnd(wire)
    assert not rank_end.close_if_damaged()
    other = os.open(tmp_path, os.O_RDONLY)
    os.dup2(other, wire.stdout_read)
    assert rank_end.close_if_damaged()
    assert wire.nanny_socket.recv(1) == b""
    wire.nanny_socket.close()
    for each in (other, wire.stdout_read, wire.stdout_write, wire.stderr_read, wire.stderr_write):
        os.close(each)
    for each in (wire.stack_file, wire.crash_file, wire.lock_file):
        os.close(each)


def test_what_a_signal_handler_prints_during_another_print_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    turns = Turns(SimpleNamespace(wait_read=lambda _: None))  # type: ignore[arg-type]
    stream = RankStream(write, "stdout", turns)
    monkeypatch.setattr(stream, "_wake_flusher", lambda: None)

    def interrupt_next_send(handler: Callable[[], Any]) -> None:
        def take(_stream: RankStream) -> None:
            monkeypatch.setattr(turns, "take", lambda _: None)
            handler()  # the signal's, on the thread that holds the lock

        monkeypatch.setattr(turns, "take", take)

    interrupt_next_send(lambda: stream.write("b"))
    stream.write("a\nc")
    stream.flush()
    ended = threading.Thread(target=stream.write, args=("d",))
    ended.start()
    ended.join()
    stream.write("e")
    interrupt_next_send(stream.flush)
    stream.flush()
    assert os.read(read, 100) == b"a\nbcde"


def test_text_that_utf_8_can_not_encode_is_escaped_beside_other_values_that_json_lacks() -> None:
    packed = escaping(Session().pack)({"file": "\udc80", "half": ["\ud83d"], "loss": float("nan"), ("x",): 1})
    assert json.loads(packed) == {"file": r"\udc80", "half": [r"\ud83d"], "loss": "nan", "('x',)": 1}
    assert escaping(Session().pack)({"file": "\udc80"}) == rb'{"file": "\\udc80"}'


def test_early_output_is_kept_in_part_until_the_log_has_a_path(tmp_path: Path) -> None:
    log = RankLog(lambda *_: None)
    for number in range(3):
        log.write(f"{number}".encode() * (1 << 19), "stdout")
    log.place(str(tmp_path / "rank.log"))
    log.close()
    assert (tmp_path / "rank.log").read_bytes() == b"1" * (1 << 19) + b"2" * (1 << 19)


def test_libevent_message_on_a_dead_connection_is_dropped_and_others_are_kept() -> None:
    assert without_noise(b"before\n" + LIBEVENT + b"after\n") == b"before\nafter\n"
    other = b"[warn] Epoll is what my lecture is about\nframe #0: of my film\n"
    assert without_noise(other) == other
