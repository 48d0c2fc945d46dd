"""Measure round trips over plain ZeroMQ to many processes: the lower bound for a cell on as many ranks.

Usage: ``python -m benchmarks.overhead.zmq_round_trips PROCESSES REPETITIONS`` prints the seconds of each repetition.

Covers: processes that echo messages, the time until all have replied.
Does not cover: the cost of a cell (control_plane).
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time

import zmq

MESSAGE_BYTES = 1000  # about the size of an execute_request
WARM_UP = 5
TIMEOUT_MS = 30_000


def _echo(url: str) -> None:
    """Send every message back, until SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sock = zmq.Context().socket(zmq.DEALER)
    sock.connect(url)
    sock.send(b"connected")
    while True:
        sock.send_multipart(sock.recv_multipart())


def _fork_echoes(url: str, count: int) -> list[int]:
    """Fork the processes, before this one has threads of ZeroMQ."""
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


def round_trips(count: int, repetitions: int) -> list[float]:
    """Return the seconds from the first message until the last of ``count`` processes has replied."""
    with tempfile.TemporaryDirectory(prefix="disttrain-zmq-") as folder:
        url = f"ipc://{folder}/s"
        pids = _fork_echoes(url, count)
        try:
            return _measure(url, count, repetitions)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
            for pid in pids:
                os.waitpid(pid, 0)


def _measure(url: str, count: int, repetitions: int) -> list[float]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as sock:
        sock.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        sock.bind(url)
        identities = [sock.recv_multipart()[0] for _ in range(count)]
        seconds = []
        for turn in range(repetitions + WARM_UP):
            begun = time.perf_counter()
            for identity in identities:
                sock.send_multipart([identity, bytes(MESSAGE_BYTES)])
            for _ in identities:
                sock.recv_multipart()
            if turn >= WARM_UP:
                seconds.append(time.perf_counter() - begun)
        return seconds


if __name__ == "__main__":  # runs as a process of its own, so that the forked processes are small and have one thread
    print(*round_trips(int(sys.argv[1]), int(sys.argv[2])))
