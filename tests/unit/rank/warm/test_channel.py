"""Messages between a rank or a start and the warm process, or what it has forked."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from jupyter_disttrain.rank.warm import channel


def test_message_is_sent_by_one_system_call() -> None:
    """Else a thread that Python's end stops in the middle leaves a part, and the other side waits for the rest."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # each call is a packet
    with ours, theirs:
        channel.send(ours, {"where": "x" * 1000})
        assert theirs.recv(1 << 20).endswith(b'xxx"}')


@pytest.mark.parametrize("size", [0, 1 << 22])  # more than there is room for on the socket
def test_message_arrives_with_its_descriptors(size: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, Path(os.devnull).open("rb") as file:
        sender = threading.Thread(target=channel.send, args=(ours, {"text": "x" * size}, [file.fileno()]))
        sender.start()
        message, descriptors = channel.receive(theirs)
        sender.join()
    assert message == {"text": "x" * size}
    assert [os.fstat(each).st_rdev for each in descriptors] == [Path(os.devnull).stat().st_rdev]
    channel.close_all(descriptors)
