"""Registration of rank processes: how long to wait for a hello."""

from __future__ import annotations

import threading

import pytest

from jupyter_disttrain.client.startup.registration import Arrivals
from jupyter_disttrain.errors import LaunchError
from jupyter_disttrain.protocol.messages import NannyHello


def test_time_waited_for_a_new_process_is_shown_in_tenths_of_a_second() -> None:
    with pytest.raises(LaunchError, match=r"no new process came up within 0\.1 s"):
        Arrivals().hear_from_one((), 0.12345)


def test_repeated_hellos_do_not_postpone_the_start_timeout() -> None:
    arrivals, has_ended = Arrivals(), threading.Event()
    hello = NannyHello(engine="known", nanny="nanny")
    message = {"header": {"msg_type": NannyHello.msg_type}, "content": hello.to_content()}

    def repeat() -> None:
        while not has_ended.wait(0.02):
            arrivals.take(message)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        with pytest.raises(LaunchError, match=r"no new process came up within 0\.1 s"):
            arrivals.hear_from_one(("known",), 0.1)
    finally:
        has_ended.set()
        thread.join()
