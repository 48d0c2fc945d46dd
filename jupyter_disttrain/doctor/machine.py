"""Check the resources that the operating system gives the ranks.

Covers: shared memory, limits, loopback and the host's name, disk space for logs.
Does not cover: other hosts.
"""

from __future__ import annotations

import resource
import shutil
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_core.paths import jupyter_data_dir, jupyter_runtime_dir

from ..client.startup.gpus import count_gpus
from .finding import Finding, error, ok, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

_MIB, _GIB = 2**20, 2**30
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (Linux's location)
SHARED_MEMORY_MIN_BYTES = _GIB
SHARED_MEMORY_PER_RANK_MIN_BYTES = 64 * _MIB
OPEN_FILES_MIN = 1024
PROCESSES_MIN = 1024
DISK_MIN_BYTES = _GIB


def find() -> Iterator[Finding]:
    """Yield shared memory, limits, network and disk."""
    yield _shared_memory()
    yield _limit("open files", resource.RLIMIT_NOFILE, OPEN_FILES_MIN, "ulimit -n 4096")
    yield _limit("processes", resource.RLIMIT_NPROC, PROCESSES_MIN, "ulimit -u 4096")
    yield _locked_memory()
    yield _loopback()
    yield _host_name()
    yield _folder("runtime folder", Path(jupyter_runtime_dir()), "JUPYTER_RUNTIME_DIR")
    yield _folder("log folder", Path(jupyter_data_dir()), "JUPYTER_DATA_DIR")


def _shared_memory() -> Finding:
    subject = f"shared memory {SHARED_MEMORY}"
    if not SHARED_MEMORY.is_dir():
        return error(subject, "missing; MPI and DataLoader workers need it", f"mount a tmpfs at {SHARED_MEMORY}")
    usage = shutil.disk_usage(SHARED_MEMORY)
    ranks = count_gpus() or 2
    needed = max(SHARED_MEMORY_MIN_BYTES, ranks * SHARED_MEMORY_PER_RANK_MIN_BYTES)
    text = f"{_size(usage.free)} of {_size(usage.total)} free"
    gigabytes = -(-needed // _GIB)
    if usage.free < needed:
        return warning(
            subject,
            f"{text}; {ranks} ranks with DataLoader workers, or NCCL without peer access, need {_size(needed)}",
            f"start the container with --shm-size={gigabytes}g or --ipc=host, or: "
            f"mount -o remount,size={gigabytes}g {SHARED_MEMORY}",
        )
    return ok(subject, text)


def _limit(subject: str, kind: int, least: int, remedy: str) -> Finding:
    soft, hard = resource.getrlimit(kind)
    if 0 <= soft < least:  # RLIM_INFINITY is negative
        return warning(
            f"limit: {subject}",
            f"{soft} (up to {_count(hard)}); many ranks may need more",
            f"{remedy}, in the shell that starts Jupyter",
        )
    return ok(f"limit: {subject}", _count(soft))


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and Path("/sys/class/infiniband").is_dir():
        return warning(
            "limit: locked memory",
            f"{_size(soft)}; InfiniBand registers more than that",
            "ulimit -l unlimited, in the shell that starts Jupyter, and on every node",
        )
    return ok("limit: locked memory", "unlimited" if soft == resource.RLIM_INFINITY else _size(soft))


def _loopback() -> Finding:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            port = server.getsockname()[1]
    except OSError as failure:
        return error(
            "loopback", f"127.0.0.1 can't be used: {failure}", "enable the loopback interface: ip link set lo up"
        )
    return ok("loopback", f"127.0.0.1 accepts connections (port {port})")


def _host_name() -> Finding:
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError as failure:
        return warning(
            "host name",
            f"{name} does not resolve ({failure}): Gloo falls back to loopback, and other hosts can't reach this one",
            f"add a line '127.0.1.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo",
        )
    return ok("host name", f"{name} is {', '.join(addresses)}")


def _folder(subject: str, folder: Path, variable: str) -> Finding:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * 4096)
            file.flush()
    except OSError as failure:
        return error(
            subject,
            f"can't write to {folder}: {failure.strerror}",
            f"free disk space or allow writing, or set {variable} to another folder",
        )
    free = shutil.disk_usage(folder).free
    if free < DISK_MIN_BYTES:
        return warning(
            subject,
            f"{_size(free)} free in {folder}",
            f"free disk space, or set {variable} to a folder on a larger disk",
        )
    return ok(subject, f"{_size(free)} free in {folder}")


def _size(size_bytes: int) -> str:
    if size_bytes >= _GIB:
        return f"{size_bytes / _GIB:.1f} GiB"
    if size_bytes >= _MIB:
        return f"{size_bytes / _MIB:.0f} MiB"
    return f"{size_bytes / 2**10:.0f} KiB"


def _count(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
