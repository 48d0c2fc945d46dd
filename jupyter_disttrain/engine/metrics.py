"""What a cell logs with ``log_metrics``.

Covers: taking values without delay, sending them in few messages.
Does not cover: histories over ranks (``cluster.telemetry``).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from ..messages import Metrics

if TYPE_CHECKING:
    from .shell import RankShell

SEND_SECONDS = 0.2
LIMIT = 10_000  # samples kept until they are sent


class MetricsLog:
    """Keep samples and send them from a thread of its own, which runs only after the first one."""

    def __init__(self, shell: RankShell | None) -> None:
        assert shell is not None
        self._shell = shell
        self._samples: deque[tuple[float, int | None, dict[str, Any]]] = deque()
        self._dropped = 0
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def log_metrics(self, step: int | None = None, **values: Any) -> None:
        """Log values of this rank, e.g. ``log_metrics(step, loss=loss)``.

        Parameters
        ----------
        step
            The training step; None where there is none.
        **values
            Floats, or tensors with one element.

        Raises
        ------
        ValueError, TypeError
            If a value is not a number.
        """
        held = {name: _hold(name, value) for name, value in values.items()}
        if len(self._samples) >= LIMIT:
            self._samples.popleft()
            self._dropped += 1
        self._samples.append((time.time(), step, held))
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_forever, name="disttrain metrics", daemon=True)
            self._thread.start()
        self._wake.set()

    def _send_forever(self) -> None:
        pause = threading.Event()
        while True:
            self._wake.wait()
            pause.wait(SEND_SECONDS)
            self._wake.clear()
            self.send()

    def send(self) -> None:
        """Send what is there."""
        samples = []
        while self._samples:
            time_s, step, held = self._samples.popleft()
            try:
                samples.append((time_s, step, {name: float(value) for name, value in held.items()}))
            except (RuntimeError, TypeError, ValueError):
                self._dropped += 1  # e.g. its device has failed, which the cell's own code reports
        if not samples and not self._dropped:
            return
        dropped, self._dropped = self._dropped, 0
        kernel = self._shell.kernel
        record = Metrics(samples=samples, dropped=dropped)
        message = kernel.session.msg(record.msg_type, record.to_content())
        kernel.iopub_socket.send_aside(kernel.session.serialize(message, ident=b"metrics"))


def _hold(name: str, value: Any) -> Any:
    """Return a value as it is now; of a tensor a copy, because to read its number is to wait for its device."""
    if not hasattr(value, "detach"):
        return float(value)
    if value.numel() != 1:
        raise ValueError(f"log_metrics takes single numbers, and {name} has {value.numel()}; log e.g. {name}.mean()")
    return value.detach().clone()
