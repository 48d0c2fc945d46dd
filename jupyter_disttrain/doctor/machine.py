"""Check the resources that the operating system gives the ranks.

Covers: shared memory, limits, the host's name, disk space for logs.
Does not cover: other hosts; folders that can't be written, which starting ranks reports (``ranks``).
"""

from __future__ import annotations

import resource
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_core.paths import jupyter_data_dir, jupyter_runtime_dir

from ..client.startup.gpus import count_gpus
from ..protocol.shared_memory import ROOT
from .report import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

_GIB = 2**30
SHARED_MEMORY_MIN_BYTES = DISK_MIN_BYTES = _GIB
SHARED_MEMORY_PER_RANK_MIN_BYTES = _GIB // 16
LIMIT_MIN = 1024  # open files, processes


def find() -> Iterator[Finding]:
    """Yield shared memory, limits, network and disk."""
    yield _shared_memory()
    yield _limit("open files", resource.RLIMIT_NOFILE, "ulimit -n 4096")
    yield _limit("processes", resource.RLIMIT_NPROC, "ulimit -u 4096")
    yield _locked_memory()
    yield _host_name()
    yield _disk("runtime folder", Path(jupyter_runtime_dir()), "JUPYTER_RUNTIME_DIR")
    yield _disk("log folder", Path(jupyter_data_dir()), "JUPYTER_DATA_DIR")


def _shared_memory() -> Finding:
    subject = f"shared memory {ROOT}"
    if not ROOT.is_dir():
        return Finding("error", subject, "missing; MPI and DataLoader workers need it", f"mount a tmpfs at {ROOT}")
    usage = shutil.disk_usage(ROOT)
    ranks = count_gpus() or 2
    needed = max(SHARED_MEMORY_MIN_BYTES, ranks * SHARED_MEMORY_PER_RANK_MIN_BYTES)
    text = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free"
    if usage.free >= needed:
        return Finding("ok", subject, text)
    gibibytes = -(-needed // _GIB)
    return Finding(
        "warning",
        subject,
        f"{text}; {ranks} ranks with DataLoader workers, or NCCL without peer access, need {gibibytes} GiB",
        f"start the container with --shm-size={gibibytes}g or --ipc=host, or: "
        f"mount -o remount,size={gibibytes}g {ROOT}",
    )


def _limit(subject: str, kind: int, remedy: str) -> Finding:
    soft, hard = ("unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in resource.getrlimit(kind))
    if soft.isdigit() and int(soft) < LIMIT_MIN:
        text = f"{soft} (up to {hard}); many ranks may need more"
        return Finding("warning", f"limit: {subject}", text, f"{remedy}, in the shell that starts Jupyter")
    return Finding("ok", f"limit: {subject}", soft)


def _locked_memory() -> Finding:
    subject, (soft, _) = "limit: locked memory", resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("ok", subject, "unlimited")
    text = f"{soft // 1024} KiB"
    if Path("/sys/class/infiniband").is_dir():
        remedy = "ulimit -l unlimited, in the shell that starts Jupyter, and on every node"
        return Finding("warning", subject, f"{text}; InfiniBand registers more than that", remedy)
    return Finding("ok", subject, text)


def _host_name() -> Finding:
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError as failure:
        return Finding(
            "warning",
            "host name",
            f"{name} does not resolve ({failure}): Gloo falls back to loopback, and other hosts can't reach this one",
            f"add a line '127.0.1.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo",
        )
    return Finding("ok", "host name", f"{name} is {', '.join(addresses)}")


def _disk(subject: str, folder: Path, variable: str) -> Finding:
    try:
        there = next(each for each in (folder, *folder.parents) if each.exists())
        free = shutil.disk_usage(there).free
    except OSError as failure:
        text = f"can't use {folder}: {failure.strerror}"
        return Finding("error", subject, text, f"allow it, or set {variable} to another folder")
    text = f"{free / _GIB:.1f} GiB free in {folder}"
    if free < DISK_MIN_BYTES:
        return Finding("warning", subject, text, f"free disk space, or set {variable} to a folder on a larger disk")
    return Finding("ok", subject, text)
