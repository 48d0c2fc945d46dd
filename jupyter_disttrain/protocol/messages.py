"""Define the records that cross a process border, and their message types.

Covers: messages between a rank, its nanny and the client beyond the Jupyter protocol.
Does not cover: the death of a rank (``rank_death``), sending (``client.transport.link``, ``rank.output.iopub``), values
of the user's own (``serialization``).

Every record is plain JSON, so a reader needs no pickle.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from .ranks import label_ranks

if TYPE_CHECKING:
    from typing_extensions import Self


def channel_url(info: dict[str, Any], channel: str) -> str:
    """Return the address of one of the controller's channels from ipyparallel's connection file."""
    separator = "-" if info["interface"].startswith("ipc:") else ":"
    return f"{info['interface']}{separator}{info[channel]}"


def is_ipv6(info: dict[str, Any]) -> bool:
    """Whether the controller is reached at an IPv6 address, which is written in brackets."""
    return "[" in info["interface"]


def prepare(sock: Any, info: dict[str, Any]) -> None:
    """Enable IPv6 and CurveZMQ on a ZeroMQ socket, if the controller uses them."""
    if is_ipv6(info):
        sock.ipv6 = True
    encrypt(sock, info)


def encrypt(sock: Any, info: dict[str, Any]) -> None:
    """Enable CurveZMQ on a ZeroMQ socket, if the controller uses it.

    All processes of a cluster share one pair of keys: access to the connection file is what authenticates them.
    """
    if info.get("curve_serverkey"):
        sock.curve_serverkey = info["curve_serverkey"].encode()
        sock.curve_publickey = info["curve_publickey"].encode()
        sock.curve_secretkey = info["curve_secretkey"].encode()


# Our options' key in an execute_request's metadata.
OPTIONS = "disttrain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record with its message type and its JSON form."""

    msg_type: ClassVar[str]

    def to_content(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)

    @classmethod
    def from_content(cls, content: dict[str, Any]) -> Self:
        """Read the JSON form; unknown fields of a newer sender are ignored."""
        known = _names(cls)  # type: ignore[arg-type]  # a class is hashable
        return cls(**{name: value for name, value in content.items() if name in known})


@functools.cache
def _names(record: type[Record]) -> frozenset[str]:
    return frozenset(field.name for field in fields(record))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHello(Record):
    """A rank's process has started and waits for its identity."""

    msg_type: ClassVar[str] = "rank_hello"

    engine: str  # the identity of its sockets
    host: str
    pid: int
    nanny_pid: int
    nanny_started: str = ""  # start time: see ``process_table.start_time``
    launch_rank: int | None  # rank according to the launcher; None where it sets none
    mpi: str | None  # the MPI library, None without MPI
    torch: str | None  # the version, None where torch is not used
    cuda_devices: int  # devices that torch would see
    accelerator: str = ""  # what torch was built for: see ``config.frameworks.accelerator_of``
    failure: str | None = None  # why this process can't be a rank
    launcher: str = ""  # what started it: see ``config``
    launch_host: str = ""  # the launcher's name of its host; empty where it sets none
    visible_gpus: str = ""  # the host's CUDA_VISIBLE_DEVICES; empty: all
    boot: str = ""  # identifies the machine and its boot; empty where it can't be read
    cold_reason: str = ""  # why its process was not forked from a warm one; empty if it was, or should not be


@dataclass(frozen=True, slots=True, kw_only=True)
class NannyHello(Record):
    """A rank's nanny has started and its output will be received."""

    msg_type: ClassVar[str] = "nanny_hello"

    engine: str
    nanny: str  # the identity of its control socket
    probe: str = ""  # identity of the socket that checks whether its host responds; empty on the notebook's own host


@dataclass(frozen=True, slots=True, kw_only=True)
class Question(Record):
    """Code of a cell waits for an answer of the user, published in its place among the output."""

    msg_type: ClassVar[str] = "question"

    number: int  # counted from 1 on each rank
    prompt: str
    is_password: bool = False
    is_debugger: bool = False  # a debugger waits for its next command


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionEnded(Record):
    """The rank waits for this answer no more: it was answered or interrupted."""

    msg_type: ClassVar[str] = "question_ended"

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugMessage(Record):
    """A response or an event of the rank's debugger, as in the Debug Adapter Protocol."""

    msg_type: ClassVar[str] = "debug_message"

    message: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputElided(Record):
    """Output beyond the limit was not sent; it is in the log."""

    msg_type: ClassVar[str] = "output_elided"

    stream: str  # "stdout" or "stderr"
    lines: int
    size_bytes: int
    tail: str  # the last lines, whole
    log_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTrouble(Record):
    """The log of a rank can't be written; its output is still shown."""

    msg_type: ClassVar[str] = "log_trouble"

    host: str
    log_path: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankVitals(Record):
    """Activity and resource use of a rank; counts and seconds are totals since it started."""

    msg_type: ClassVar[str] = "rank_vitals"

    time_s: float  # seconds since the epoch
    beat_s: float  # time of the rank's last heartbeat, on its host's monotonic clock
    state: str  # see ``protocol.states.RankActivity``
    silent_s: float = 0.0  # since the rank's last heartbeat; 0 while it responds
    cell: int | None = None
    execution_count: int | None = None
    line: int | None = None  # the current line of the cell
    call: str = ""  # the collective that the rank waits in
    waits_s: float = 0.0  # waiting time in that collective
    steps: int = 0  # optimizer steps
    samples: int = 0  # samples from DataLoaders
    checks: int = 0  # checks of the main thread's activity
    waits: int = 0  # checks that found it waiting for other ranks
    seen: int = 0  # checks with a result; a check between two of these counts as the later one
    data_wait_s: float = 0.0  # waiting for batches
    done: int = 0  # iterations of the current loop, where their total is known
    total: int = 0
    left_s: float | None = None  # remaining time of that loop, at the speed so far
    program: int = 0  # process ID of the program that does the rank's work; 0: the rank itself
    uses: int = 0  # beginnings and ends of cells and of requests that wait for cells
    cpu_percent: float = 0.0  # percent of one core, including child processes
    memory_bytes: int = 0  # including child processes
    gpu: dict[str, Any] | None = None  # see ``features.telemetry.rank.gpu_stats.Gpu.read``


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVitals(Record):
    """Load, memory, disk and traffic of a host."""

    msg_type: ClassVar[str] = "node_vitals"

    time_s: float  # seconds since the epoch
    host: str
    cores: int
    cpu_percent: float  # percent of all cores
    load: float  # running and runnable processes, one-minute average
    memory_used_bytes: int
    memory_total_bytes: int
    disk_free_bytes: int  # on the disk of the ranks' working directory
    received_bytes_per_s: int  # traffic from other hosts
    sent_bytes_per_s: int
    infiniband_received_bytes_per_s: int
    infiniband_sent_bytes_per_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Used(Record):
    """A rank ran a cell, or served a request, since the last such message."""

    msg_type: ClassVar[str] = "used"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(Record):
    """A request of another process to the process that holds the cluster."""

    msg_type: ClassVar[str] = "asked"

    what: str  # "interrupt", "reset", "stop"
    token: str  # unique ID of the request
    until_s: float  # deadline on the host's monotonic clock; received later, it is ignored


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged(Record):
    """The process that holds the cluster has received a request and carries it out."""

    msg_type: ClassVar[str] = "acknowledged"

    token: str


# Frequent messages of many ranks bypass the session, as three frames: the topic with the type, the engine, the bytes.
FIGURES_TOPIC = b"figures."
METRICS = "metrics"  # the type of ``metric_blocks.pack``'s bytes; those of the others are JSON
USED_TOPIC = b"used"  # topic of Used, for the controller


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFailure:
    """One distinct failure of a cell, and the ranks that share it."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    ename: str
    evalue: str
    traceback: tuple[str, ...] = field(repr=False)
    line: int | None  # of the cell, counted from 1 with the magic's own line; or of the script that the cell runs
    time_s: float  # seconds since the epoch, on the rank that failed first
    of_group: bool = False  # raised by a process group: often another rank is the cause
    file: str = ""  # the script's name, without its folder
    details: tuple[str, ...] = ()  # notes, and the texts of the errors that led to this one or are in it
    raised_at: str = ""  # the innermost frame of the traceback
    variants: tuple[tuple[int, str], ...] = ()  # of the other ranks: where their failure differs

    @property
    def where(self) -> str:
        """Ranks, hosts and line: ``"ranks 0-1 (node7), line 3"``, or ``"rank 1 (node7), train.py:3"``."""
        place = f", {self.place}" if self.place else ""
        return f"{label_ranks(self.ranks)} ({', '.join(self.hosts)}){place}"

    @property
    def place(self) -> str:
        """``"line 3"`` of the cell, ``"train.py:3"``; empty where it has none."""
        if not self.line:
            return ""
        return f"{self.file}:{self.line}" if self.file else f"line {self.line}"

    @property
    def headline(self) -> str:
        """The failure in one line: ranks, hosts, place and error."""
        what = f"{self.ename}: {self.evalue}" if self.evalue else self.ename
        return f"{self.where}: {what}"
