"""Report the state of a host; this source is sent to the host's Python over ssh and run there.

Covers: versions, folders, clock, disks, GPUs, addresses, InfiniBand, whether other hosts can be reached.
Does not cover: evaluating the report (``preflight``), choosing the network (``network``).

The protocol is one line per message: a request is JSON on stdin, a reply is JSON on stdout after a mark, because login
scripts print too. The module needs only the standard library, and psutil where this package is installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

MARK = "disttrain-probe "
PACKAGE = "jupyter_disttrain"
COMMAND_SECONDS = 10.0  # for a command to end, e.g. mpiexec --version


def main() -> None:
    """Reply to the client's requests until it closes the connection."""
    with contextlib.ExitStack() as listening:  # on a port to which other hosts may connect until the end
        for line in sys.stdin.buffer:
            request = json.loads(line)
            answer: dict[str, Any] = {}
            if request["ask"] == "report":
                answer = report(request)
            elif request["ask"] == "listen":
                try:
                    listener, port = listen(request["address"])
                    listening.enter_context(listener)
                    answer = {"port": port}
                except OSError as error:
                    answer = {"port": 0, "why": error.strerror, "address": request["address"]}
            else:
                answer = {"unreached": asyncio.run(unreached(request["targets"], request["limit_s"]))}
            print(f"{MARK}{json.dumps(answer)}", flush=True)  # noqa: T201


def report(request: dict[str, Any]) -> dict[str, Any]:
    """Return what the client requested to know about this host."""
    sys.path[:] = [*request["python_path"], *(entry for entry in sys.path if entry)]
    found = package()
    own: list[dict[str, Any]] = []
    problems = list(problems_of_folders(request))
    try:
        own = addresses()
    except ImportError as error:
        if found["package_folder"]:  # else that it is missing is reported
            problems.append((f"psutil can't be imported there ({error})", "install the same environment on all hosts"))
    return {
        "hostname": socket.gethostname(),
        "ssh_address": "".join(os.environ.get("SSH_CONNECTION", "").split()[2:3]).partition("%")[0],
        "addresses": own,
        "rdma_ports": rdma_ports(),
        "python": python_version(),
        "torch": version_of("torch"),
        **found,
        "problems": problems,
        "gpus": gpus(),
        "daemon": version_of_daemon(request["mpiexec"]) if request["mpiexec"] else "",
        "time_s": time.time(),
    }


def python_version() -> str:
    """Return the implementation and the minor version: pickled code needs the same one."""
    return f"{platform.python_implementation()} {sys.version_info[0]}.{sys.version_info[1]}"


def version_of(name: str) -> str:
    """Return the version of an installed package without importing it, or an empty string."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def package() -> dict[str, str]:
    """Return this package's folder, version, and a digest of the names and sizes of its files."""
    found = util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        return {"package_folder": "", "package_version": "", "package_digest": ""}
    folder = Path(found.submodule_search_locations[0])
    files = sorted((str(path.relative_to(folder)), path.stat().st_size) for path in folder.rglob("*.py"))
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    return {"package_folder": str(folder), "package_version": version_of(PACKAGE), "package_digest": digest}


def problems_of_folders(request: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what prevents ranks from using their folders here, each with its remedy."""
    shared, nonce, temporary = request["shared_folder"], request["nonce"], request["temporary_folder"]
    mount = "mount the same one there (NFS, Lustre), or set JUPYTER_RUNTIME_DIR to a folder that all hosts share"
    if shared and not Path(shared).is_dir():
        yield f"there is no {shared}, so the hosts share no file system with this machine", mount
    elif shared:
        try:
            is_same = (Path(shared) / nonce).read_text() == nonce
        except FileNotFoundError:
            is_same = False
        except OSError as error:
            is_same = True
            what = f"what this machine writes into {shared} can't be read there ({error.strerror})"
            yield what, "log in there as the same user, and correct the folder's permissions"
        if not is_same:
            what = f"{shared} is not the same folder there as on this machine: the hosts share no file system"
            yield what, mount
    if not Path(temporary).is_dir():
        temporary = os.environ.get("TMPDIR", "/tmp")  # noqa: S108  (only checked)
    for folder in (shared, temporary):
        if folder and Path(folder).is_dir():
            yield from _room_in(folder, request["least_free_bytes"])
    working = request["working_folder"]
    if not os.access(working, os.R_OK | os.X_OK):
        trouble = "can't be entered" if Path(working).is_dir() else "is missing"
        what = f"the working directory {working} {trouble}"
        yield what, "create it there, or start the notebook in a folder that exists on all hosts"


def _room_in(folder: str, least_bytes: int) -> Iterator[tuple[str, str]]:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        what = f"no file can be written into {folder} ({error.strerror or error})"
        yield what, "free disk space, or correct the folder's permissions or mount"
        return
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < least_bytes:
        what = f"too little disk space is free in {folder}: {free_bytes / 2**20:.0f} MiB"
        yield what, f"free disk space: ranks need at least {least_bytes / 2**20:.0f} MiB for logs and sockets"


def gpus() -> int:
    """Return the number of NVIDIA GPUs, without initializing them if the driver lists them as files."""
    listed = Path("/proc/driver/nvidia/gpus")
    if listed.is_dir():
        return len(list(listed.iterdir()))
    # With a driver that does not reply, no GPU can be used.
    return sum(line.startswith("GPU ") for line in output_of("nvidia-smi", "-L").splitlines())


def addresses() -> list[dict[str, Any]]:
    """Return the addresses of all interfaces that are up and running, each with its interface and prefix length."""
    import psutil  # noqa: PLC0415  (the client's PYTHONPATH may lead to it)

    running = psutil.net_if_stats()
    found = []
    for label, of_interface in psutil.net_if_addrs().items():
        name = label.partition(":")[0]  # "eth0:1" is another address of eth0
        for each in of_interface if name in running and running[name].isup else ():
            if each.family in (socket.AF_INET, socket.AF_INET6) and each.netmask and "%" not in each.address:
                prefix = int(ipaddress.ip_address(each.netmask)).bit_count()
                found.append({"interface": name, "address": each.address, "prefix": prefix, "loopback": name == "lo"})
    return found


def rdma_ports(root: str = "/sys/class/infiniband") -> dict[str, str]:
    """Return the link layer of every active port of an RDMA device: "InfiniBand", or "Ethernet" for RoCE."""
    found = {}
    for port in sorted(Path(root).glob("*/ports/*")):
        with contextlib.suppress(OSError):
            if (port / "state").read_text().strip().endswith("ACTIVE"):  # "4: ACTIVE"
                found[f"{port.parent.parent.name}:{port.name}"] = (port / "link_layer").read_text().strip()
    return found


def version_of_daemon(mpiexec: str) -> str:
    """Return the version of the Open MPI whose daemon the client's mpiexec would start here; empty if there is none."""
    folder = next((each for each in (str(Path(mpiexec).parent), None) if shutil.which("prted", path=each)), "")
    own = shutil.which("mpiexec", path=folder)
    if own is None:
        return ""
    return open_mpi_version(output_of(own, "--version")) or "of an unknown version"


def output_of(*command: str) -> str:
    """Return what a command prints; empty if it can't be run or does not end in time."""
    try:
        return subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS, stdin=subprocess.DEVNULL
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def open_mpi_version(output: str) -> str:
    """Return the version in ``"mpirun (Open MPI) 5.0.11"``, or an empty string."""
    _, is_open_mpi, version = output.partition("(Open MPI)")
    return (version.split() or [""])[0] if is_open_mpi else ""


def listen(address: str) -> tuple[socket.socket, int]:
    """Open a port on one address, so that other hosts can try to connect; nothing is read from it."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(1024)  # the kernel completes connections as long as the backlog has room
    except OSError:
        listener.close()
        raise
    return listener, listener.getsockname()[1]


async def unreached(targets: dict[str, list[Any]], limit_s: float) -> dict[str, str]:
    """Connect to all addresses and ports at the same time; return the error of each that failed, by name."""

    async def connect(address: str, port: int) -> str:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), limit_s)
        except asyncio.TimeoutError:
            return "no reply"
        except OSError as error:
            return os.strerror(error.errno) if error.errno else str(error)
        writer.close()
        return ""

    errors = await asyncio.gather(*(connect(*target) for target in targets.values()))
    return {name: error for name, error in zip(targets, errors, strict=True) if error}


if __name__ == "__main__":
    main()
