"""A round trip to as many processes as there are ranks, through ZeroMQ alone: the floor for a cell on all ranks.

Covers: processes that send back what they get, the time until all have.
Does not cover: what a cell costs beyond that (``control_plane``).
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time

import zmq

SIZE = 1000  # bytes of a message, about those of a request
WARM_UP = 5
PATIENCE_MS = 30_000


def _echo(url: str) -> None:
    """Send everything back; ends with its parent."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sock = zmq.Context().socket(zmq.DEALER)
    sock.connect(url)
    sock.send(b"here")
    while True:
        sock.send_multipart(sock.recv_multipart())


def _fork_peers(url: str, count: int) -> list[int]:
    """Fork the processes; this one has no thread of ZeroMQ's yet, which they would not have."""
    pids = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            try:
                _echo(url)
            finally:
                os._exit(1)
        pids.append(pid)
    return pids


def round_trips(count: int, times: int) -> list[float]:
    """Return seconds, each from the first message sent until the last of ``count`` processes has answered."""
    with tempfile.TemporaryDirectory(prefix="disttrain-zmq-") as folder:
        url = f"ipc://{folder}/s"
        pids = _fork_peers(url, count)
        try:
            return _measure(url, count, times)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
            for pid in pids:
                os.waitpid(pid, 0)


def _measure(url: str, count: int, times: int) -> list[float]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as sock:
        sock.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        sock.bind(url)
        peers = [sock.recv_multipart()[0] for _ in range(count)]
        found = []
        for turn in range(times + WARM_UP):
            begun = time.perf_counter()
            for peer in peers:
                sock.send_multipart([peer, bytes(SIZE)])
            for _ in peers:
                sock.recv_multipart()
            if turn >= WARM_UP:
                found.append(time.perf_counter() - begun)
        return found


if __name__ == "__main__":  # a process of its own, so that what is forked is small and without threads
    print(*round_trips(int(sys.argv[1]), int(sys.argv[2])))
