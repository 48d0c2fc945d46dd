"""Send a data set from a machine that is none of the nodes: the notebook's own.

Covers: ``python -m jupyter_disttrain.engine.stage_sender``, which reads the source as the first of the chain.
Does not cover: starting it, and a way through ssh to the first node (``cluster.stage_sender``).

It writes nothing here, and listens to nobody. A line of JSON on its standard output tells its public key; one on its
standard input tells the chain; one on its standard output, at its end, what it has done. When its standard input ends,
so does it: the notebook has gone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .stage_chain import Neighbours, Place
from .stage_relay import Relay

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .stage_source import SourceFile


class Nowhere:
    """What stands in the place of a :class:`Store` where nothing is to be written: all is there."""

    def __init__(self, source: str) -> None:
        self.path = Path(source)
        self.is_source = True

    def begin(
        self, _files: Sequence[SourceFile], _folders: Sequence[str] | None, *, verify: bool, check: Callable[[], None]
    ) -> dict[int, int]:
        """Lack nothing."""
        del verify, check
        return {}

    def sees_mark(self, _name: str) -> bool:
        """See nobody's folder."""
        return False

    def digests_of(self, _at: int) -> list[bytes]:
        """Know no block without reading it."""
        return []

    def hash_of(self, _at: int) -> str:
        """Leave it to the nodes: of a file that goes on where it was cut off, they alone have hashed the beginning."""
        return ""

    def write(self, _at: int, _number: int, _block: bytes | memoryview, _digest: bytes) -> None:
        """Refuse."""
        raise AssertionError("nothing is missing here")

    def finish(self, _at: int, _hashed: str) -> None:
        """Refuse."""
        raise AssertionError("nothing is missing here")

    def close(self) -> None:
        """Do nothing."""


def main() -> None:
    """Tell the key, wait for the chain, send."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt comes by the nodes, which tell who was interrupted
    neighbours = Neighbours(None)
    _say({"key": neighbours.key})
    told = sys.stdin.readline()
    if not told:  # the notebook has gone, or could not reach the nodes
        neighbours.close()
        return
    asked = json.loads(told)
    source = asked["source"]
    chain = [Place(**place) for place in asked["chain"]]
    relay = Relay(source, chain, 0, neighbours, Nowhere(source), verify=asked["verify"])
    threading.Thread(target=_stop_with_notebook, args=(relay,), daemon=True).start()
    relay.run()
    _say(relay.tell() | {"fault": "" if relay.fault is None else str(relay.fault)})
    os._exit(0)  # the thread that reads the source may hang with it, and the other waits for the notebook


def _stop_with_notebook(relay: Relay) -> None:
    sys.stdin.read()
    relay.stop("the notebook has ended, or was interrupted")


def _say(told: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
