"""The socket filter of MPI's listeners."""

from __future__ import annotations

import socket

import psutil
import pytest

from jupyter_disttrain.rank.startup.socket_filter import hide_listeners


def test_filtered_listener_accepts_this_host_only() -> None:
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        assert port in hide_listeners()
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        up = {name for name, state in psutil.net_if_stats().items() if state.isup}
        for name, addresses in psutil.net_if_addrs().items():
            for each in addresses if name in up else ():
                if each.family == socket.AF_INET and not each.address.startswith("127."):
                    with pytest.raises(TimeoutError):
                        socket.create_connection((each.address, port), timeout=0.5)
