"""Messages of libraries that the stderr filter drops."""

from __future__ import annotations

from jupyter_disttrain.rank.nanny.stderr_filter import without_noise

LIBEVENT = (
    b"[warn] Epoll ADD(4) on fd 50 failed. Old events were 0; read change was 0 (none); write change was 1 (add); "
    b"close change was 0 (none): Bad file descriptor\n"
)


def test_libevent_message_on_a_dead_connection_is_dropped_and_others_are_kept() -> None:
    assert without_noise(b"before\n" + LIBEVENT + b"after\n") == b"before\nafter\n"
    other = b"[warn] Epoll is what my lecture is about\nframe #0: of my film\n"
    assert without_noise(other) == other
