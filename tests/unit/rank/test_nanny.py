"""The messages of a rank and its nanny while it starts: that it has started, and that it has exited."""

from __future__ import annotations

import select
import socket
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from jupyter_client.session import DELIM, Session

from jupyter_disttrain.protocol.messages import DebugMessage
from jupyter_disttrain.protocol.rank_death import RankDeath
from jupyter_disttrain.rank.nanny.nanny import Nanny
from jupyter_disttrain.rank.startup.connection import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Hellos

if TYPE_CHECKING:
    import pytest


def test_hello_is_rare_after_a_receipt_and_stops_after_registration() -> None:
    hellos = Hellos()
    assert hellos.is_due()
    assert hellos.next_at - time.monotonic() <= FIRST_PAUSE_SECONDS
    hellos.delay()
    assert hellos.next_at - time.monotonic() > LONGEST_PAUSE_SECONDS  # but it is repeated: the receiver may have exited
    hellos.next_at = 0.0
    hellos.is_known = True
    assert not hellos.is_due()


def test_any_published_message_is_passed_on_and_the_text_of_a_display_is_logged() -> None:
    published: list[Any] = []
    logged: list[bytes] = []
    returned: list[bytes] = []
    nanny: Any = SimpleNamespace(
        _read_pipes=lambda: None,
        _session=Session(),
        _output=SimpleNamespace(flush=lambda *, end_of_cell: None),  # noqa: ARG005
        _out=SimpleNamespace(send_multipart=lambda frames, *, is_kept: published.append((frames, is_kept))),
        _wire=SimpleNamespace(give_back=returned.append),
        _log=SimpleNamespace(write=lambda data, _stream: logged.append(data)),
    )
    display = b'{"msg_type": "display_data"}', b"{}", b"{}"
    messages = [
        [],
        [b"no message of Jupyter's"],
        [DELIM, b"", b"[]"],
        [DELIM, b"", *display, b"no JSON"],
        [DELIM, b"", *display, rb'{"data": {"text/plain": "half \ud83d"}}'],
        [DELIM, b"", f'{{"msg_type": "{DebugMessage.msg_type}"}}'.encode(), b"{}", b"{}", b"{}"],  # of one client only
    ]
    for frames in messages:
        Nanny._on_message(nanny, b"token", frames)
    assert published == [(frames, frames is not messages[-1]) for frames in messages]
    assert returned == [b"token"] * len(messages)
    assert b"".join(logged) == b"half \\ud83d\n"


def test_death_is_repeated_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[Any] = []
    wake_read, wake_write = socket.socketpair()
    nanny: Any = SimpleNamespace(
        _pid=1,
        _stop_requested=False,
        _cluster=SimpleNamespace(is_there=lambda *, once_reached: not once_reached),
        _publish_record=published.append,
        _wake_read=wake_read,
    )
    ready = select.select

    def wait(*sources: Any) -> Any:
        found = ready(*sources[:3], 0)
        nanny._stop_requested = not found[0] or len(published) > 5  # it pauses, or would go on without a pause
        return found

    monkeypatch.setattr(select, "select", wait)
    with wake_read, wake_write:
        wake_write.send(b"\0")  # SIGCHLD of the rank itself
        Nanny._repeat(nanny, RankDeath(engine="", pid=1, host="node7", exit_code=1))
    assert len(published) == 2
