"""Run the cluster's controller: ipyparallel's, without the parts that this package does not use.

Covers: which schedulers run, encryption, connection files, when the controller ends.
Does not cover: its arguments (``protocol.controller_args``), its process (``controller_process``).

``python -m jupyter_disttrain.client.transport.controller`` takes ipcontroller's arguments, and
``--IPController.owner_pid=N``: the notebook's process. When that process ends for any reason, the controller ends; the
ranks' nannies detect that and end too. With ``--DisttrainController.idle_timeout=S`` the controller also ends once no
rank has been used for ``S`` seconds. Task and broadcast schedulers are left out (no client sends through them), and the
hub no longer receives a copy of every message: cells, output and tensors pass through the controller unread.

If ranks are on other hosts, the controller listens for them on one address only, and every socket uses CurveZMQ;
messages are signed as well. The keys are created here and stored in the connection files, which only the user can read.

The controller of a job, whose ranks belong to no notebook, ends with ``--DisttrainController.follow_ranks=True`` once
all ranks have left.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq
from ipyparallel.controller.app import IPController
from tornado.ioloop import PeriodicCallback
from traitlets import Bool, Float, Integer, Unicode, observe

from ...launchers.folders import remove_folder
from ...private_files import replace_private
from ...process_table import wait_for_end
from ...protocol.connection_file import remove_own
from ...protocol.controller_args import RANK_ENDED
from ...protocol.messages import USED_TOPIC
from ...protocol.time_limits import CLOSED_SECONDS, ORPHANED_SECONDS, RANK_CHECK_MS, UNANSWERED_SECONDS

if TYPE_CHECKING:
    from collections.abc import Collection

_TCP_TABLE = Path("/proc/self/net/tcp")
_ESTABLISHED = "01"


class OrphanCheck:
    """Decide from repeated observations when all ranks of a job that were present have left.

    Heartbeats alone do not show which ranks have left. Processes that are killed all at once do not deregister, and the
    hub still lists them for half a minute; the hub drops processes that a debugger has stopped, or whose network was
    down for a while, although they still run. The system closes the connections of a process that ends, and keeps those
    of all others.
    """

    def __init__(self) -> None:
        self._had_ranks = False
        self._known_s = self._connected_s = 0.0  # times of the last positive observation

    def note_end(self, now_s: float) -> None:
        """Note that a rank has ended, which may not have registered; see :meth:`are_gone` for ``now_s``."""
        self._had_ranks = True
        self._known_s = self._connected_s = now_s

    def are_gone(self, *, known: bool, connected: bool, now_s: float) -> bool:
        """Return whether all ranks have left.

        ``known``: the hub has a rank registered; ``connected``: a process of the job is connected; ``now_s``: the time
        of a monotonic clock.
        """
        self._had_ranks = self._had_ranks or known
        if known:
            self._known_s = now_s
        if connected:
            self._connected_s = now_s
        silent_s, apart_s = now_s - self._known_s, now_s - self._connected_s
        if not self._had_ranks:
            return False
        return silent_s > ORPHANED_SECONDS or apart_s > (UNANSWERED_SECONDS if known else CLOSED_SECONDS)


def has_connection(ports: Collection[int]) -> bool:
    """Whether any process is connected to one of these ports of this host."""
    with _TCP_TABLE.open() as lines:
        next(lines)  # the column headers
        for line in lines:
            _, local, _, state, *_ = line.split(maxsplit=4)
            if state == _ESTABLISHED and int(local.rpartition(":")[2], 16) in ports:
                return True
    return False


class DisttrainController(IPController):
    """An IPController that ends with its owner, after an idle timeout, or with its ranks."""

    idle_timeout = Float(0.0, config=True, help="Seconds without use after which the cluster ends; 0: it never does.")
    owner_pid = Integer(0, config=True, help="End with this process; 0: with none.")
    remove_dirs = Unicode("[]", config=True, help="Folders to remove at the end, as JSON: their names may have colons.")
    remove_file = Unicode("", config=True, help="The job's own file, to remove before them.")
    follow_ranks = Bool(False, config=True, help="End once all ranks that were there have left.")

    def launch_broadcast_schedulers(self, monitor_url: str, children: list[Any]) -> None:
        """Launch none: this package does not use them."""

    def init_schedulers(self) -> None:
        """Let a client that joins take over the identity of one that has ended, even before that is detected."""
        super().init_schedulers()
        for child in self.children:
            if getattr(child, "name", "") in ("DirectScheduler", "ControlScheduler"):
                child.setsockopt_in(zmq.ROUTER_HANDOVER, 1)
                child.setsockopt_out(zmq.ROUTER_HANDOVER, 1)  # for a rank whose connection was cut

    @observe("enable_curve")
    def _enable_curve_changed(self, change: Any) -> None:
        """Create keys; messages stay signed, so that the keys of one channel don't allow sending on another."""
        if change["new"]:
            self._ensure_curve_keypair()
            public, secret = zmq.curve_keypair()
            self._shared_keys = {"curve_publickey": public.decode(), "curve_secretkey": secret.decode()}

    def save_connection_dict(self, fname: str, cdict: dict[str, Any]) -> None:
        """Write a connection file atomically, with the keys that all connecting processes share."""
        content = json.dumps(cdict | (self._shared_keys if self.enable_curve else {}))
        replace_private(Path(self.profile_dir.security_dir) / fname, content)

    def init_hub(self) -> None:
        """Subscribe to heartbeats only; use IPv6 on all sockets if the controller is reached by it."""
        if self.engine_ip.startswith("["):
            zmq.Context.instance().set(zmq.IPV6, 1)
            os.register_at_fork(after_in_child=_speak_ipv6)
        super().init_hub()
        monitor = self.hub.monitor.socket
        monitor.setsockopt(zmq.UNSUBSCRIBE, b"")
        monitor.setsockopt(zmq.SUBSCRIBE, b"heartmonitor")

    def start(self) -> None:
        """Run until one of the reasons to end occurs, then remove the cluster's files."""
        if self.owner_pid:
            threading.Thread(target=self._follow_owner, name="follow owner", daemon=True).start()
        if self.follow_ranks:
            self._orphan_check = OrphanCheck()
            signal.signal(RANK_ENDED, lambda *_: self._orphan_check.note_end(time.monotonic()))
            self._rank_check = PeriodicCallback(self._check_ranks, RANK_CHECK_MS)
            self.loop.add_callback(self._rank_check.start)
        if self.idle_timeout:
            threading.Thread(target=self._follow_use, name="follow use", daemon=True).start()
        try:
            super().start()
        finally:
            if self.remove_file:
                remove_own(Path(self.remove_file), self.cluster_id)
            for folder in json.loads(self.remove_dirs):
                remove_folder(Path(folder))

    def _follow_owner(self) -> None:
        wait_for_end(self.owner_pid)
        self.log.warning("process %s, which owned this cluster, has ended", self.owner_pid)
        # On the loop, because it runs only once every child has been started.
        self.loop.add_callback(self._end)

    def _check_ranks(self) -> None:
        known = bool(self.hub.engines or self.hub.incoming_registrations)
        connected = has_connection(self.engine_ports)
        if self._orphan_check.are_gone(known=known, connected=connected, now_s=time.monotonic()):
            self._rank_check.stop()
            self._end()

    def _follow_use(self) -> None:
        """End once no rank has reported use for ``idle_timeout`` seconds."""
        activity: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self.connect(activity, self.client_url("iopub"))
        activity.subscribe(USED_TOPIC)
        while activity.poll(round(self.idle_timeout * 1000)):
            activity.recv_multipart()
        activity.close()
        self.log.warning("this cluster has not been used for %g s", self.idle_timeout)
        self.loop.add_callback(self._end)

    def _end(self) -> None:
        self.terminate_children()
        self.loop.stop()


def _die_with_parent() -> None:
    """Have the kernel kill a forked child when the controller ends, for whatever reason."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


class _IPv6Context(zmq.Context[zmq.Socket[bytes]]):
    """A context whose sockets use IPv6."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.set(zmq.IPV6, 1)


def _speak_ipv6() -> None:
    """Use IPv6 in a forked child too: ipyparallel's heart monitor creates its own context."""
    zmq.Context = _IPv6Context  # type: ignore[misc]


def _allow_connections() -> None:
    """Raise the limit of open files to the hard limit: the usual 1024 suffices for fewer than 200 ranks."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _end_with_thread(failed: threading.ExceptHookArgs) -> None:
    """Exit once a thread that forwards messages has failed, e.g. because its port is taken."""
    threading.__excepthook__(failed)
    sys.stderr.flush()
    os._exit(os.EX_SOFTWARE)


def main() -> None:
    """Run the controller."""
    threading.excepthook = _end_with_thread
    _allow_connections()
    os.register_at_fork(after_in_child=_die_with_parent)
    DisttrainController.launch_instance()


if __name__ == "__main__":
    main()
