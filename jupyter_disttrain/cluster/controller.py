"""The cluster's controller: ipyparallel's, without what this package has no use for.

``python -m jupyter_disttrain.cluster.controller`` takes ipcontroller's arguments, and ``--IPController.owner_pid=N``:
the notebook's process. When that process ends, however it ends, the controller ends; the ranks' nannies notice and
follow. Task and broadcast schedulers are left out (nobody sends through them), and the hub no longer receives a copy of
every message: cells, output and tensors pass through the controller without being looked at.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import threading
import time
from typing import Any

import psutil
import zmq
from ipyparallel.controller.app import IPController
from traitlets import Integer, Unicode

OWNER_SECONDS = 0.2  # between two looks at the owner, where the system can't tell of its end


class DisttrainController(IPController):
    """An IPController with an owner."""

    owner_pid = Integer(0, config=True, help="End with this process; 0: with none.")
    remove_dirs = Unicode("", config=True, help="Folders to remove at the end, separated like PATH.")

    def launch_broadcast_schedulers(self, monitor_url: str, children: list[Any]) -> None:
        """Leave them out."""

    def init_hub(self) -> None:
        """Subscribe to the heartbeats alone."""
        super().init_hub()
        monitor = self.hub.monitor.socket
        monitor.setsockopt(zmq.UNSUBSCRIBE, b"")
        monitor.setsockopt(zmq.SUBSCRIBE, b"heartmonitor")

    def start(self) -> None:
        """Run until the owner ends."""
        if self.owner_pid:
            threading.Thread(target=self._follow_owner, name="follow owner", daemon=True).start()
        try:
            super().start()
        finally:
            for folder in filter(None, self.remove_dirs.split(os.pathsep)):
                shutil.rmtree(folder, ignore_errors=True)

    def _follow_owner(self) -> None:
        _wait_for_end(self.owner_pid)
        self.log.warning("process %s, which owned this cluster, has ended", self.owner_pid)
        # On the loop, because it turns only once every child has been started.
        self.loop.add_callback(self._end)

    def _end(self) -> None:
        self.terminate_children()
        self.loop.stop()


def _wait_for_end(pid: int) -> None:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return  # it ended before we came up
    except (AttributeError, OSError):
        # An old kernel, or a Python built for one, such as conda's.
        while psutil.pid_exists(pid):
            time.sleep(OWNER_SECONDS)
    else:
        select.select([process], [], [])


def _die_with_parent() -> None:
    """Have the kernel end a forked child with the controller, however that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def main() -> None:
    """Run the controller."""
    os.register_at_fork(after_in_child=_die_with_parent)
    DisttrainController.launch_instance()


if __name__ == "__main__":
    main()
