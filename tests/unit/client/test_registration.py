"""Registration of rank processes: how long to wait for a hello."""

from __future__ import annotations

import threading

import pytest

from jupyter_disttrain.client.startup.cluster_state import ClusterState
from jupyter_disttrain.client.startup.registration import Registration
from jupyter_disttrain.config.cluster import ClusterConfig
from jupyter_disttrain.errors import LaunchError
from jupyter_disttrain.protocol.messages import NannyHello


def registration() -> Registration:
    return Registration(ClusterState.before_start(ClusterConfig()))


def test_start_timeout_of_a_new_process_is_reported_in_tenths_of_a_second() -> None:
    with pytest.raises(LaunchError, match=r"no new process started within 0\.1 s"):
        registration().wait_for_one((), 0.12345)


def test_repeated_hellos_do_not_postpone_the_start_timeout() -> None:
    registered, has_ended = registration(), threading.Event()
    hello = NannyHello(engine="known", nanny="nanny")
    message = {"header": {"msg_type": NannyHello.msg_type}, "content": hello.to_content()}

    def repeat() -> None:
        while not has_ended.wait(0.02):
            registered.take(message)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        with pytest.raises(LaunchError, match=r"no new process started within 0\.1 s"):
            registered.wait_for_one(("known",), 0.1)
    finally:
        has_ended.set()
        thread.join()
