"""Resources of a lab by its number: a folder, a bridge, namespaces and addresses.

Covers: claiming the first free number, removing all resources of a lab, removing labs whose owner has ended.
Does not cover: what runs in a lab.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

# A short path, since that of a Unix socket has 107 characters at most, and not /run, which may be mounted noexec.
ROOT = Path("/var/lib/disttrain-labs")
HIGHEST_ID = 250
NAMESPACES = Path("/run/netns")
TIMEOUT_S = 30.0

claimed: list[Place] = []  # by this process; tests.support.leftovers checks them


class LabError(Exception):
    """The lab cannot do what was requested."""


@dataclass(frozen=True, slots=True)
class Place:
    """The resources of the lab with this number."""

    lab_id: int

    @property
    def folder(self) -> Path:
        return ROOT / str(self.lab_id)

    @property
    def bridge(self) -> str:
        return f"dtbr{self.lab_id}"

    @property
    def head_address(self) -> str:
        return f"10.77.{self.lab_id}.1"

    @property
    def table(self) -> str:
        """The packet filter's table in the namespace of the head."""
        return f"disttrain-lab-{self.lab_id}"

    def address(self, number: int) -> str:
        return f"10.77.{self.lab_id}.{10 + number}"

    def hardware_address(self, number: int) -> str:
        """The MAC address of a host, or of the head (0), also after a restart: no neighbour has a stale one."""
        return f"02:77:00:00:{self.lab_id:02x}:{number:02x}"

    def namespace(self, number: int) -> str:
        return f"dt{self.lab_id}n{number}"

    def link(self, number: int) -> str:
        """The bridge's end of the cable of a host."""
        return f"dt{self.lab_id}v{number}"

    def namespaces(self) -> list[str]:
        return [path.name for path in NAMESPACES.glob(f"dt{self.lab_id}n*")]

    def links(self) -> list[str]:
        return [path.name for path in Path("/sys/class/net").glob(f"dt{self.lab_id}v*")]


def command(*arguments: str | Path, check: bool = True) -> str:
    """Run a system command and return its output, which is in the error if it fails."""
    done = subprocess.run([str(name) for name in arguments], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise LabError(
            f"{' '.join(map(str, arguments))} ended with {done.returncode}: {done.stderr.strip() or done.stdout}"
        )
    return done.stdout


def claim() -> Place:
    """Remove what killed owners left, and claim the first free number for this process."""
    with _locked():
        for place in _known():
            if not _owner_runs(place):
                _remove(place)
        for lab_id in range(1, HIGHEST_ID + 1):
            place = Place(lab_id)
            # A bridge without a folder belongs to another program.
            if place.folder.exists() or Path("/sys/class/net", place.bridge).exists():
                continue
            # Without an address of its own a bridge takes that of a cable, another one whenever a host is killed.
            command("ip", "link", "add", place.bridge, "address", place.hardware_address(0), "type", "bridge")
            place.folder.mkdir()
            (place.folder / "owner").write_text(json.dumps([os.getpid(), _began_ticks(os.getpid())]))
            claimed.append(place)
            return place
    raise LabError(f"all {HIGHEST_ID} numbers of labs are taken: see {ROOT}")


def release(place: Place) -> None:
    """End every process of the lab and remove all its resources."""
    with _locked():
        _remove(place)


def left_of(place: Place) -> list[str]:
    """Return descriptions of what a lab of this process left behind; empty when all is gone."""
    with _locked():
        if place.folder.exists() and not _is_mine(place):
            return []  # another process has claimed the number since
        interfaces = [*place.links(), *([place.bridge] if Path("/sys/class/net", place.bridge).exists() else [])]
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        return [
            *(f"namespace {name}" for name in place.namespaces()),
            *(f"network interface {name}" for name in interfaces),
            *(f"mount {line}" for line in mounts if f"{place.folder}/" in line),
            *(f"process {process.pid}: {command_line_of(process)}" for process in processes_of(place)),
            *([f"folder {place.folder}"] if place.folder.exists() else []),
        ]


def end(processes: list[psutil.Process]) -> None:
    """Kill processes and wait until none of them runs; their parents may still read their exit status."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    deadline = time.monotonic() + TIMEOUT_S
    while alive := [process for process in processes if _runs(process)]:
        if time.monotonic() > deadline:
            raise LabError(f"could not be killed within {TIMEOUT_S:g} s: {alive}")
        time.sleep(0.005)


def processes_of(place: Place) -> list[psutil.Process]:
    """Return the processes in the lab's namespaces, and those with its folder in the command line."""
    pids = {
        int(pid) for name in place.namespaces() for pid in command("ip", "netns", "pids", name, check=False).split()
    }
    others = (process for process in psutil.process_iter() if process.pid != os.getpid())
    return [process for process in others if process.pid in pids or f"{place.folder}/" in command_line_of(process)]


def command_line_of(process: psutil.Process) -> str:
    """Return the command line of a process; empty when it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _remove(place: Place) -> None:
    # Cables first, so that killed processes cannot close connections to the outside properly.
    for link in place.links():
        command("ip", "link", "delete", link)
    while running := processes_of(place):
        end(running)
    for namespace in place.namespaces():
        command("ip", "netns", "delete", namespace)
    if Path("/sys/class/net", place.bridge).exists():
        command("ip", "link", "delete", place.bridge)
    if place.table in command("nft", "list", "tables"):
        command("nft", "delete", "table", "inet", place.table)
    shutil.rmtree(place.folder, ignore_errors=False)


def _known() -> list[Place]:
    return [Place(int(path.name)) for path in ROOT.iterdir() if path.name.isdigit()]


def _owner(place: Place) -> tuple[int, int]:
    """Return the owner's pid and start time; zeros if it was killed before it could write them."""
    try:
        pid, began_ticks = json.loads((place.folder / "owner").read_text())
    except FileNotFoundError:
        return 0, 0
    return pid, began_ticks


def _owner_runs(place: Place) -> bool:
    pid, began_ticks = _owner(place)
    return pid != 0 and _began_ticks(pid) == began_ticks


def _is_mine(place: Place) -> bool:
    return _owner(place)[0] in (0, os.getpid())


def _began_ticks(pid: int) -> int | None:
    """Return the start time of a process, by a clock that cannot be set; None if it does not run."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else int(fields[18])


@contextmanager
def _locked() -> Iterator[None]:
    """Only one process at a time claims, sweeps or removes."""
    ROOT.mkdir(mode=0o755, exist_ok=True)
    root = os.open(ROOT, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(root, fcntl.LOCK_EX)
        yield
    finally:
        os.close(root)
