"""Helpers of the ``%dist_stage`` tests: data, a file server that counts and can pause, a chain of nodes without ranks.

Covers: a data set; one file over HTTP, with ranges; relays in threads of one process.
Does not cover: real hosts (``tests.lab``).
"""

from __future__ import annotations

import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest
import zmq

from jupyter_disttrain.features.staging.links import Links, Place
from jupyter_disttrain.features.staging.pipeline import PipelineNode
from jupyter_disttrain.features.staging.store import Store

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from typing_extensions import Self

MIB = 1 << 20
PIECE = 1 << 18


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data set of three files, one of several blocks."""
    folder = write_data(tmp_path, 3 * MIB + 5)
    (folder / "empty").touch()
    return folder


def write_data(parent: Path, size: int) -> Path:
    """Write a data set of two files, one of this size."""
    folder = parent / "source" / "data"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "large").write_bytes(os.urandom(size))
    (folder / "small").write_text("small")
    return folder


def files(folder: Path) -> dict[str, bytes]:
    """The contents of the files below a folder, by their relative paths."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


class FileServer:
    """A file at an address; counts how many of its bytes were requested."""

    def __init__(self, content: bytes, address: str = "127.0.0.1", etag: str = '"one"') -> None:
        self.sent = 0
        self.holds_after = len(content)  # position in the file after which nothing is sent
        self.holding = threading.Event()  # set when that position is reached
        self.go_on = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._head(len(content), 200)

            def do_GET(self) -> None:
                found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "bytes=0-"))
                assert found is not None
                first, last = int(found[1]), min(int(found[2] or len(content)), len(content) - 1)
                self._head(last + 1 - first, 206, f"bytes {first}-{last}/{len(content)}")
                for at in range(first, last + 1, PIECE):
                    if at >= outer.holds_after:
                        outer.holding.set()
                        outer.go_on.wait()
                    piece = content[at : min(at + PIECE, last + 1)]
                    try:
                        self.wfile.write(piece)
                    except OSError:
                        return  # the client has disconnected
                    outer.sent += len(piece)

            def _head(self, size: int, status: int, covered: str = "") -> None:
                self.send_response(status)
                for name, value in (("Content-Length", str(size)), ("Accept-Ranges", "bytes"), ("ETag", etag)):
                    self.send_header(name, value)
                if covered:
                    self.send_header("Content-Range", covered)
                self.end_headers()

            def log_message(self, *_args: object) -> None:
                pass

        self._server = ThreadingHTTPServer((address, 0), Handler)
        self._server.daemon_threads = False  # so that closing waits for them
        self.url = f"http://{address}:{self._server.server_port}/file.bin"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="file server")
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def hold(self, after: int) -> None:
        """Send no more than this many bytes of the file, until :meth:`release`."""
        self.holds_after = after
        self.holding.clear()
        self.go_on.clear()

    def release(self) -> None:
        """Send the rest, and everything from now on."""
        self.holds_after = 1 << 60
        self.go_on.set()


class Chain:
    """Nodes that copy to folders of this machine, each in a thread; the first may only read, and has no folder.

    As the client does, it ends the others when one has failed.
    """

    def __init__(self, source: Path | str, folders: Sequence[Path | None], *, verify: bool = False) -> None:
        self.verify = verify
        self.keys = [key.decode() for key in zmq.curve_keypair()]
        self.stores = [
            None if folder is None else Store(str(source), str(folder), f"node{at}", f"mark-{at}")
            for at, folder in enumerate(folders)
        ]
        self.links = [Links(self.keys, None if folder is None else "127.0.0.1") for folder in folders]
        self.places = [
            Place(at, f"node{at}", each.url, f"mark-{at}" if each.url else "") for at, each in enumerate(self.links)
        ]
        self.relays = [PipelineNode(str(source), *each) for each in zip(self.links, self.stores, strict=True)]

    def run(self) -> list[PipelineNode]:
        """Copy to the end; return the nodes' parts."""
        self.start()
        return self.join()

    def start(self) -> None:
        for at, relay in enumerate(self.relays):
            relay.start(self.places, at, verify=self.verify)

    def join(self) -> list[PipelineNode]:
        while not all(relay.done.wait(0.05) for relay in self.relays):
            for failed in (relay for relay in self.relays if relay.fault is not None):
                for relay in self.relays:
                    relay.stop(str(failed.fault))
        return self.relays
