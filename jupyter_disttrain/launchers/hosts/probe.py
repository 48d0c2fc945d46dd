"""Report the state of a host; this source is sent to the host's Python over ssh and run there.

Covers: versions, folders, clock, disks, GPUs, addresses, InfiniBand, whether other hosts can be reached.
Does not cover: evaluating the report (``preflight``), choosing the network (``network``).

The protocol is one line per message: a request is JSON on stdin, a reply is JSON on stdout after a mark, because login
scripts print too. The module needs only the standard library, and imports little of it, as users wait for the reply.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import selectors
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from importlib import metadata, util
from pathlib import Path
from typing import Any

MARK = "disttrain-probe "
PACKAGE = "jupyter_disttrain"
COMMAND_SECONDS = 10.0  # for a command to end, e.g. mpiexec --version

# Linux's constants for a request of all addresses (rtnetlink(7)) and for an interface's flags (netdevice(7)).
_GET_ADDRESSES, _NEW_ADDRESS, _DONE, _REQUEST_DUMP = 22, 20, 3, 0x301
_ADDRESS, _LOCAL = 1, 2
_GET_FLAGS = 0x8913
_UP, _LOOPBACK, _RUNNING = 0x1, 0x8, 0x40


def main() -> None:
    """Reply to the client's requests until it closes the connection."""
    listener: socket.socket | None = None
    for line in sys.stdin.buffer:
        request = json.loads(line)
        kind = request["ask"]
        if kind == "report":
            answer = report(request)
        elif kind == "listen":
            listener, answer = listen(request["address"])
        else:
            answer = {"reached": reach(request["targets"], request["limit_s"])}
        sys.stdout.write(f"{MARK}{json.dumps(answer)}\n")
        sys.stdout.flush()
        if kind == "reach":
            break
    if listener is not None:
        sys.stdin.buffer.read(1)  # other hosts may still connect; the client closes stdin once all have replied
        listener.close()


def report(request: dict[str, Any]) -> dict[str, Any]:
    """Return what the client requested to know about this host."""
    mpiexec = daemon_beside(request["mpiexec"]) if request["mpiexec"] else ""
    asked = ask_version(mpiexec) if mpiexec else None
    sys.path[:] = [*request["python_path"], *(entry for entry in sys.path if entry)]
    folder, temporary = request["shared_folder"], temporary_folder(request["temporary_folder"])
    written = [path for path in (folder, temporary) if path]
    return {
        "hostname": socket.gethostname(),
        "ssh": os.environ.get("SSH_CONNECTION", "").split(),
        "addresses": addresses(),
        "infiniband": infiniband(),
        "python": python_version(),
        "torch": version_of("torch"),
        **package(),
        "shared": shared(folder, request["nonce"]) if folder else "",
        "unwritable": {path: why for path in written if (why := unwritable(path))},
        "working": working(request["working_folder"]),
        "free_bytes": {path: free for path in written if (free := free_bytes(path)) >= 0},
        "gpus": gpus(),
        "daemon": (open_mpi_version(output_of(asked)) or "of an unknown version") if asked else "",
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


def shared(folder: str, nonce: str) -> str:
    """Return an empty string if this host sees the client's file, else what is wrong."""
    if not Path(folder).is_dir():
        return "no folder"
    try:
        seen = (Path(folder) / nonce).read_text()
    except FileNotFoundError:
        return "other content"
    except OSError as error:
        return f"unreadable: {error.strerror}"
    return "" if seen == nonce else "other content"


def unwritable(folder: str) -> str:
    """Return an empty string if a file can be written there, else why not."""
    if not Path(folder).is_dir():
        return ""  # reported by `shared`
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def temporary_folder(wanted: str) -> str:
    """Return the client's temporary folder, or this host's if that does not exist here."""
    return wanted if Path(wanted).is_dir() else os.environ.get("TMPDIR", "/tmp")  # noqa: S108  (only checked)


def working(folder: str) -> str:
    """Return an empty string if processes can be started in that folder, else why not."""
    if not Path(folder).is_dir():
        return "is missing"
    return "" if os.access(folder, os.R_OK | os.X_OK) else "can't be entered"


def free_bytes(folder: str) -> int:
    """Return the bytes that an unprivileged user may still write there, -1 if the folder does not exist."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return -1


def gpus() -> int:
    """Return the number of NVIDIA GPUs, without initializing them if the driver lists them as files."""
    listed = Path("/proc/driver/nvidia/gpus")
    if listed.is_dir():
        return len(list(listed.iterdir()))
    command = shutil.which("nvidia-smi")
    if command is None:
        return 0
    try:
        output = subprocess.run([command, "-L"], capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return 0  # with a driver that doesn't respond no GPU can be used
    return sum(line.startswith("GPU ") for line in output.stdout.splitlines())


def addresses() -> list[dict[str, Any]]:
    """Return the addresses of all interfaces that are up and running, each with its interface and prefix length."""
    found: list[dict[str, Any]] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:  # `ip` may be missing, and takes longer
        link.sendto(struct.pack("=IHHIIBxxx", 20, _GET_ADDRESSES, _REQUEST_DUMP, 1, 0, socket.AF_UNSPEC), (0, 0))
        while True:
            data = link.recv(1 << 16)
            while data:
                length, kind = struct.unpack_from("=IH", data)
                if kind != _NEW_ADDRESS:
                    assert kind == _DONE, f"the kernel replied {kind} to the request for its addresses"
                    return found
                one = _address(data[16:length])
                if one is not None:
                    found.append(one)
                data = data[(length + 3) & ~3 :]


def _address(message: bytes) -> dict[str, Any] | None:
    """Parse one reply of the kernel: an ifaddrmsg and its attributes."""
    family, prefix, _, scope, index = struct.unpack_from("=BBBBI", message)
    try:
        name = socket.if_indextoname(index)
    except OSError:
        return None  # the interface was just removed
    flags = _flags(name)
    values: dict[int, bytes] = {}
    position = 8
    while position + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, position)
        values[kind] = message[position + 4 : position + length]
        position += max(4, (length + 3) & ~3)
    raw = values.get(_LOCAL, values.get(_ADDRESS))  # on a point-to-point link _ADDRESS is the peer's
    is_link_local = family == socket.AF_INET6 and scope == 253  # noqa: PLR2004  (RT_SCOPE_LINK)
    if raw is None or is_link_local or not flags & _UP or not flags & _RUNNING:
        return None
    address = socket.inet_ntop(family, raw)
    return {"interface": name, "address": address, "prefix": prefix, "loopback": bool(flags & _LOOPBACK)}


def _flags(interface: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _GET_FLAGS, struct.pack("16sH22x", interface.encode(), 0))
        except OSError:
            return 0  # the interface was just removed
    flags: int = struct.unpack_from("=16xH", answer)[0]
    return flags


def infiniband(root: str = "/sys/class/infiniband") -> list[dict[str, Any]]:
    """Return every port of every RDMA device, as the kernel describes it."""
    if not Path(root).is_dir():
        return []
    return [_port(port) for device in sorted(Path(root).iterdir()) for port in sorted((device / "ports").glob("*"))]


def _port(folder: Path) -> dict[str, Any]:
    def read(name: str) -> str:
        try:
            return (folder / name).read_text().strip()
        except OSError:
            return ""

    return {
        "device": folder.parent.parent.name,
        "port": int(folder.name),
        "active": read("state").endswith("ACTIVE"),  # "4: ACTIVE"
        "link_layer": read("link_layer"),  # "InfiniBand", or "Ethernet" for RoCE
    }


def daemon_beside(mpiexec: str) -> str:
    """Return the mpiexec of this host whose daemon the client's mpiexec would start here, or an empty string."""
    for folder in (str(Path(mpiexec).parent), None):
        if shutil.which("prted", path=folder):
            return shutil.which("mpiexec", path=folder) or ""
    return ""


def ask_version(mpiexec: str) -> subprocess.Popen[str]:
    """Start ``mpiexec --version``; the caller can do other work until it reads the output with :func:`output_of`."""
    return subprocess.Popen(  # noqa: S603
        [mpiexec, "--version"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def output_of(process: subprocess.Popen[str]) -> str:
    """Return the output of a process; empty if it does not end in time."""
    with process:
        try:
            output, _ = process.communicate(timeout=COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return ""
    return output


def open_mpi_version(output: str) -> str:
    """Return the version in ``"mpirun (Open MPI) 5.0.11"``, or an empty string."""
    _, is_open_mpi, version = output.partition("(Open MPI)")
    return (version.split() or [""])[0] if is_open_mpi else ""


def listen(address: str) -> tuple[socket.socket | None, dict[str, Any]]:
    """Open a port on one address, so that other hosts can try to connect; nothing is read from it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(1024)  # the kernel completes connections as long as the backlog has room
    except OSError as error:
        listener.close()
        return None, {"port": 0, "why": error.strerror or str(error)}
    return listener, {"port": listener.getsockname()[1], "why": ""}


def reach(targets: list[list[Any]], limit_s: float) -> list[str]:
    """Connect to all addresses and ports concurrently; return an empty string for each success, else the error."""
    outcomes = ["no reply"] * len(targets)
    deadline = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        for index, (address, port) in enumerate(targets):
            one = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
            one.setblocking(False)
            code = one.connect_ex((address, port))
            if code in (0, errno.EINPROGRESS):
                selector.register(one, selectors.EVENT_WRITE, index)
            else:
                outcomes[index] = os.strerror(code)
                one.close()
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                code = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # type: ignore[union-attr]
                outcomes[key.data] = os.strerror(code) if code else ""
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
    return outcomes


if __name__ == "__main__":
    main()
