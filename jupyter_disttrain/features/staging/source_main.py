"""Send a data set from a machine that is not one of the nodes: the notebook's own.

Covers: ``python -m jupyter_disttrain.features.staging.source_main``, which reads the source as the first of the chain.
Does not cover: starting it, and the ssh tunnel to the first node (``features.staging.source_process``).

It writes no files here, and does not listen. It writes its public key as a line of JSON to its standard output, reads
the chain as a line from its standard input, and at its end writes a report as a line to its standard output. When its
standard input ends, it exits: the notebook has ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

from .peers import Neighbours, Place
from .pipeline import PipelineNode
from .reader import Nowhere


def main() -> None:
    """Write the key, wait for the chain, send."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # interrupts arrive through the nodes, which name the one interrupted
    neighbours = Neighbours(None)
    _write({"key": neighbours.key})
    line = sys.stdin.readline()
    if not line:  # the notebook has ended, or could not reach the nodes
        neighbours.close()
        return
    asked = json.loads(line)
    source = asked["source"]
    chain = [Place(**place) for place in asked["chain"]]
    node = PipelineNode(source, chain, 0, neighbours, Nowhere(source), verify=asked["verify"])
    threading.Thread(target=_stop_with_notebook, args=(node,), daemon=True).start()
    node.run()
    _write(node.report() | {"fault": "" if node.fault is None else str(node.fault)})
    os._exit(0)  # the thread that reads the source may hang with it, and the other waits for the notebook


def _stop_with_notebook(node: PipelineNode) -> None:
    sys.stdin.read()
    node.stop("the notebook has ended, or was interrupted")


def _write(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
