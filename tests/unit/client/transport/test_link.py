"""The client's link to its ranks: messages that are queued when it closes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import zmq

from jupyter_disttrain.client.transport.link import Link

if TYPE_CHECKING:
    from pathlib import Path


def test_queued_messages_are_sent_before_the_link_closes(tmp_path: Path) -> None:
    context = zmq.Context()
    info: dict[str, object] = {"interface": f"ipc://{tmp_path}/s", "key": "key", "signature_scheme": "hmac-sha256"}
    ends = {"mux": context.socket(zmq.ROUTER), "control": context.socket(zmq.ROUTER), "iopub": context.socket(zmq.PUB)}
    for number, (channel, end_of_it) in enumerate(ends.items()):
        end_of_it.bind(f"{info['interface']}-{number}")
        info[channel] = number
    is_busy, go_on = threading.Event(), threading.Event()
    link = Link(info, "notebook", lambda *_: None, lambda: None, lambda: (is_busy.set(), go_on.wait(10)))
    assert is_busy.wait(10)
    link.post("rank", link.make("execute_request", {}))
    threading.Timer(0.2, go_on.set).start()
    link.close()
    assert ends["mux"].poll(5000)
    context.destroy(linger=0)
