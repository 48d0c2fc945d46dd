"""The records that cross a process border, and their message types.

Covers: what a rank, its nanny and the client say to each other beyond the Jupyter protocol.
Does not cover: sending (``cluster.link``, ``engine.publisher``), values of the user's own (``values``).

Every record is plain JSON: a reader needs no pickle to understand a rank.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from typing_extensions import Self


def channel_url(info: dict[str, Any], channel: str) -> str:
    """Return the address of one of the controller's channels from ipyparallel's connection file."""
    separator = "-" if info["interface"].startswith("ipc:") else ":"
    return f"{info['interface']}{separator}{info[channel]}"


def is_ipv6(info: dict[str, Any]) -> bool:
    """Whether the controller is reached at an IPv6 address, which stands in brackets."""
    return "[" in info["interface"]


def prepare(sock: Any, info: dict[str, Any]) -> None:
    """Have a ZeroMQ socket speak IPv6 and CurveZMQ, if the controller does."""
    if is_ipv6(info):
        sock.ipv6 = True
    encrypt(sock, info)


def encrypt(sock: Any, info: dict[str, Any]) -> None:
    """Have a ZeroMQ socket speak CurveZMQ, if the controller does.

    All who know the connection file share one pair of keys: that file is what makes somebody a part of the cluster.
    """
    if info.get("curve_serverkey"):
        sock.curve_serverkey = info["curve_serverkey"].encode()
        sock.curve_publickey = info["curve_publickey"].encode()
        sock.curve_secretkey = info["curve_secretkey"].encode()


# Requests from the client to a rank, on its shell channel; the reply is "rank_reply".
RANK_REQUEST = "rank_request"
# Requests from the client to a rank's nanny, on the control channel; the reply is "nanny_reply".
NANNY_REQUEST = "nanny_request"
# The key of our options in an execute_request's metadata.
OPTIONS = "disttrain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record that knows its message type and its JSON form."""

    msg_type: ClassVar[str]

    def to_content(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)

    @classmethod
    def from_content(cls, content: dict[str, Any]) -> Self:
        """Read the JSON form; fields that a newer sender added are left aside."""
        known = _names(cls)  # type: ignore[arg-type]  # a class is hashable
        return cls(**{name: value for name, value in content.items() if name in known})


@functools.cache
def _names(record: type[Record]) -> frozenset[str]:
    return frozenset(field.name for field in fields(record))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHello(Record):
    """A rank's process is up and waits to be told who it is."""

    msg_type: ClassVar[str] = "rank_hello"

    engine: str  # the identity of its sockets
    host: str
    pid: int
    nanny_pid: int
    launch_rank: int | None  # what the launcher says its rank is; None where it does not tell
    mpi: str | None  # the MPI library, None without MPI
    torch: str | None  # the version, None where it is not wanted
    cuda_devices: int  # that torch would see
    accelerator: str = ""  # that torch was built for: see ``framework_variables.accelerator_of``
    failure: str | None = None  # why this process can't be a rank
    launcher: str = ""  # what started it: see ``config``
    launch_host: str = ""  # its host as the launcher calls it; empty where the launcher does not say
    visible_gpus: str = ""  # of its host, as CUDA_VISIBLE_DEVICES has them; empty: all
    boot: str = ""  # what tells its machine, since that was started, from all others; empty where it can't be read


@dataclass(frozen=True, slots=True, kw_only=True)
class NannyHello(Record):
    """A rank's nanny is up and its output will be heard."""

    msg_type: ClassVar[str] = "nanny_hello"

    engine: str
    nanny: str  # the identity of its control socket
    probe: str = ""  # of the socket that tells whether its host can be reached; empty on the notebook's own


SOME_KILLER = ": kill -9, or the kernel's out-of-memory killer"


def signal_words(number: int, killer: str = SOME_KILLER) -> str:
    """Return the name of the signal that ended a process, and what that means where the name alone does not say it."""
    import signal  # noqa: PLC0415

    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return name + {"SIGKILL": killer, "SIGSEGV": ": a segmentation fault", "SIGBUS": ": a bus error"}.get(name, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDeath(Record):
    """A rank's process ended."""

    msg_type: ClassVar[str] = "rank_death"

    engine: str
    pid: int
    host: str
    exit_code: int | None
    signal_number: int | None
    crash: str  # Python's report of a crash in C code; empty without one
    stderr_tail: str
    expected: bool  # it was asked to end
    launcher: str = ""  # what started it: see ``config``; empty if another process than its nanny tells of it
    peak_bytes: int = 0  # the most memory that it ever held
    out_of_memory_kills: int = 0  # processes of its host that the kernel ended for want of memory during its cell
    host_silent_s: float = 0.0  # that its host did not answer, and so counts as lost; 0: it answers

    @property
    def cause(self) -> str:
        """How it ended, as a person says it."""
        if self.host_silent_s:
            return (
                f"lost with its host: {self.host} has not answered for {self.host_silent_s:.1f} s, because it is "
                "down or cut off from the network"
            )
        if self.signal_number is None and self.exit_code is None:
            return "ended, and what its nanny said of that can't be read"
        if self.signal_number is None:
            return f"exited with code {self.exit_code}"
        return f"was killed by {signal_words(self.signal_number, self._killer)}"

    @property
    def _killer(self) -> str:
        count = self.out_of_memory_kills
        if not count:
            return SOME_KILLER
        those = "a process" if count == 1 else f"{count} processes"
        return f", most likely for want of memory: the kernel ended {those} of {self.host} for that meanwhile"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputElided(Record):
    """More was said than is sent: the rest is in the log."""

    msg_type: ClassVar[str] = "output_elided"

    stream: str  # "stdout" or "stderr"
    lines: int
    size_bytes: int
    tail: str  # the last lines, whole
    log_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTrouble(Record):
    """The log of a rank can't be written; output on screen goes on."""

    msg_type: ClassVar[str] = "log_trouble"

    host: str
    log_path: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankVitals(Record):
    """What a rank does, and what it uses; counts and seconds are totals since it started."""

    msg_type: ClassVar[str] = "rank_vitals"

    time_s: float  # seconds since the epoch
    beat_s: float  # when the rank showed what it does; of a clock of its host that never goes back
    state: str  # "idle", "running", "in collective", "not responding", "stopped"
    silent_s: float = 0.0  # since the rank showed anything; 0 while it responds
    cell: int | None = None
    execution_count: int | None = None
    line: int | None = None  # of the cell, that runs
    call: str = ""  # the collective that it waits in
    waits_s: float = 0.0  # in that collective
    steps: int = 0  # of optimizers
    samples: int = 0  # from DataLoaders
    looks: int = 0  # at what the main thread does
    waits: int = 0  # those that found it waiting for other ranks
    seen: int = 0  # those that could tell; a look between two of them counts as the later one
    data_wait_s: float = 0.0  # for batches
    done: int = 0  # rounds of the loop that runs, where it knows how many there will be
    total: int = 0
    left_s: float | None = None  # of that loop, if it goes on as it went so far
    cpu_percent: float = 0.0  # of one core, its children's included
    memory_bytes: int = 0  # its children's included
    gpu: dict[str, Any] | None = None  # see ``engine.devices.Gpu.read``


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVitals(Record):
    """What a host does."""

    msg_type: ClassVar[str] = "node_vitals"

    time_s: float  # seconds since the epoch
    host: str
    cores: int
    cpu_percent: float  # of all cores
    load: float  # processes that ran or wanted to, on average over a minute
    memory_used_bytes: int
    memory_total_bytes: int
    disk_free_bytes: int  # where the ranks work
    disk_total_bytes: int
    received_bytes_per_s: int  # from other hosts
    sent_bytes_per_s: int
    infiniband_received_bytes_per_s: int
    infiniband_sent_bytes_per_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Used(Record):
    """A rank ran a cell, or served a request, since the last such message."""

    msg_type: ClassVar[str] = "used"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(Record):
    """Somebody beside the notebook wants the process that holds the cluster to do something."""

    msg_type: ClassVar[str] = "asked"

    what: str  # "interrupt", "reset", "stop"
    token: str  # tells this wish from every other
    until_s: float  # of the host's clock that never goes back: who hears it later does nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard(Record):
    """The process that holds the cluster has heard a wish, and does it."""

    msg_type: ClassVar[str] = "heard"

    token: str


# What many ranks tell often goes past the session, as three frames: the topic with the type, the engine, the bytes.
FIGURES_TOPIC = b"figures."
METRICS = "metrics"  # the type of ``samples.pack``'s bytes; those of the others are JSON
USED_TOPIC = b"used"  # under which it is published, for the controller


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFailure:
    """One distinct failure of a cell, and the ranks that share it."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    ename: str
    evalue: str
    traceback: tuple[str, ...] = field(repr=False)
    line: int | None  # of the cell, counted from 1 with the magic's own line; or of the script that it runs
    time_s: float  # seconds since the epoch, on the rank that failed first
    of_group: bool = False  # it came out of a process group: often another rank is the cause
    file: str = ""  # the script's, without its folder
    details: tuple[str, ...] = ()  # notes, and the texts of the errors that led to this one or are in it
    raised_at: str = ""  # the innermost frame of the traceback
    variants: tuple[tuple[int, str], ...] = ()  # of the other ranks: what theirs differs in, where it does

    @property
    def where(self) -> str:
        """Who failed, where: ``"ranks 0-1 (node7), line 3"``, or ``"rank 1 (node7), train.py:3"``."""
        from .ranks import label_ranks  # noqa: PLC0415  (ranks imports errors, which imports this)

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
        """The failure in one line: who, where, what."""
        what = f"{self.ename}: {self.evalue}" if self.evalue else self.ename
        return f"{self.where}: {what}"
