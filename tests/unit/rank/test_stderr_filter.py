"""What libraries write that says nothing: as they write it, and what is left of it."""

from __future__ import annotations

from jupyter_disttrain.rank.nanny.stderr_filter import without_noise

LIBEVENT = (
    b"[warn] Epoll ADD(4) on fd 50 failed. Old events were 0; read change was 0 (none); write change was 1 (add); "
    b"close change was 0 (none): Bad file descriptor\n"
)


def test_what_libevent_says_of_a_dead_connection_is_left_out_and_nothing_else() -> None:
    assert without_noise(b"before\n" + LIBEVENT + b"after\n") == b"before\nafter\n"
    other = b"[warn] Epoll is what my lecture is about\nframe #0: of my film\n"
    assert without_noise(other) == other
