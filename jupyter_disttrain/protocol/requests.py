"""Define the client's requests to ranks and to their nannies.

Covers: one record per request, decoding one, the tables of the methods that serve them.
Does not cover: sending (``client.transport.link``), serving (``rank.kernel.requests``, ``rank.nanny.nanny``), what is
published without a request (``messages``).

A request is the content of a Jupyter message; large values are sent as the message's buffers. A reply is a plain
mapping: ``status`` and the keys that the request's docstring names.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from .messages import Record

if TYPE_CHECKING:
    from collections.abc import Callable

Method = TypeVar("Method", bound="Callable[..., Any]")
Reply = tuple[dict[str, Any], list[Any]]  # content, buffers


@dataclass(frozen=True, kw_only=True)
class Request(Record):
    """A request; its class is the request's kind."""

    control: ClassVar[bool] = False  # sent on the control channel, past the shell channel's queue

    def to_content(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"do": type(self).__name__} | super().to_content()


@dataclass(frozen=True, kw_only=True)
class RankRequest(Request):
    """A request to a rank, which serves it between two cells, after everything sent before."""

    msg_type: ClassVar[str] = "rank_request"


@dataclass(frozen=True, kw_only=True)
class RankControlRequest(RankRequest):
    """A request to a rank, which serves it at once, on a thread beside the running cell."""

    control: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class NannyRequest(Request):
    """A request to a rank's nanny, which serves it whatever the rank is doing."""

    msg_type: ClassVar[str] = "nanny_request"
    control: ClassVar[bool] = True


# Becoming a rank


@dataclass(frozen=True, kw_only=True)
class AcknowledgeRankHello(RankControlRequest):
    """Stop repeating ``RankHello`` so often: it was received."""


@dataclass(frozen=True, kw_only=True)
class Identify(RankRequest):
    """Become a rank. Replies ``sees_shelf``, ``place`` (for TensorFlow and JAX) and ``troubles`` of the profile."""

    info: dict[str, Any]  # see ``ranks.RankInfo``
    environment: dict[str, str]
    defaults: dict[str, str]  # defaults of libraries: see ``rank.libraries.defaults``
    log_path: str
    address: str  # MASTER_ADDR
    timeout_s: float  # timeout of collectives
    shelf: str | None  # the folder in shared memory, on the notebook's host
    shelf_token: str
    uses_tensorflow: bool


@dataclass(frozen=True, kw_only=True)
class OpenStore(RankRequest):
    """Open the store through which all ranks find each other; sent to rank 0. Replies its ``port``."""

    address: str
    port: int  # 0: a free one
    generation: int


@dataclass(frozen=True, kw_only=True)
class Form(RankRequest):
    """Form the process group. Replies what of earlier groups is ``lost``, ``mpi_lost`` and the collective counts."""

    address: str
    port: int
    generation: int
    mpi_lost: str  # why MPI's world can't be used; empty if it can
    mpi_revoked: bool
    places: list[str]  # the ``place`` that each rank replied to ``Identify``
    tf_roles: Any


# Variables


@dataclass(frozen=True, kw_only=True)
class Push(RankRequest):
    """Set variables; the values are the buffers, or on the shelf."""

    shelf: dict[str, Any] | None  # see ``shared_memory.lend``


@dataclass(frozen=True, kw_only=True)
class Pull(RankRequest):
    """Send variables. If it can't, replies ``status`` "missing" with ``names``, or "unserializable", ``reasons``."""

    names: list[str]
    whole: bool = False  # refuse values that exist only in their process, e.g. a part of a sharded tensor


@dataclass(frozen=True, kw_only=True)
class Digest(RankRequest):
    """Summarise the content of a variable. Replies ``parts``, or ``status`` "missing"."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Numbers(RankRequest):
    """Send one part of a variable as an array, from ``ranks``; all ranks take part."""

    name: str
    path: str  # of the part: see ``rank.kernel.digests``
    ranks: list[int]


# The user's modules


@dataclass(frozen=True, kw_only=True)
class ListModules(RankRequest):
    """Reply the files of the user's imported modules, and which were ``edited``."""


@dataclass(frozen=True, kw_only=True)
class CompareFiles(RankRequest):
    """Remove copied files; reply the ``names`` of those that differ from the notebook's, and those ``removed``."""

    folder: str  # the notebook's folder
    hashes: dict[str, str]  # SHA-256 by name
    gone: dict[str, dict[str, str]]  # the same of the files to remove unless changed here, by host


@dataclass(frozen=True, kw_only=True)
class WriteFiles(RankRequest):
    """Write files of the notebook's folder; their contents are the buffers."""

    folder: str
    names: list[str]


# Scripts and data sets


@dataclass(frozen=True, kw_only=True)
class OpenPort(RankRequest):
    """Reply the rendezvous of the programs of one ``%dist_run``: ``port`` (rank 0), ``place``, ``socket`` for MPI."""

    served: bool  # a store is opened there
    mpi: bool = False  # mpiexec will start a process for each rank: see ``features.scripts.mpi_connection``


@dataclass(frozen=True, kw_only=True)
class EndProgram(RankControlRequest):
    """End the program of a cell."""

    cell: int  # its number
    because: str


@dataclass(frozen=True, kw_only=True)
class PrepareStaging(RankRequest):
    """Prepare to receive a data set. Replies ``sees`` (the source) and ``place``, or ``trouble``."""

    source: str
    to: str | None  # a folder of the node
    mark: str
    keys: list[str]  # the public and the secret key of this copy


@dataclass(frozen=True, kw_only=True)
class StagingState(RankControlRequest):
    """Reply the progress of copying a data set."""


@dataclass(frozen=True, kw_only=True)
class EndStaging(RankControlRequest):
    """End the copy of a data set, also one that was only prepared."""

    mark: str  # of the copy: a later one goes on
    because: str


# Beside a cell


@dataclass(frozen=True, kw_only=True)
class Where(RankControlRequest):
    """Reply what the rank is doing: its stack, the collective that it waits in, its cell."""

    about: list[Any] = field(default_factory=list)  # collectives of other ranks: see ``hang_explanation.waited_for``


@dataclass(frozen=True, kw_only=True)
class AnswerQuestion(RankControlRequest):
    """Answer what code of the running cell asks; an answer to any other question is ignored."""

    number: int  # of the question: see ``messages.Question``
    text: str = ""
    is_end: bool = False  # the user has ended the input: raises EOFError
    refusal: str = ""  # why it can't be answered, and what to do instead


@dataclass(frozen=True, kw_only=True)
class Debug(RankControlRequest):
    """Serve a request of the Debug Adapter Protocol; the response is published as a ``DebugMessage``."""

    message: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Complete(RankControlRequest):
    """Complete the text at the cursor of a cell.

    Replies ``start``, ``end``, ``matches``, each a text and its kind, and ``names`` as of ``ListNames`` for a name.
    """

    code: str
    cursor: int


@dataclass(frozen=True, kw_only=True)
class ListNames(RankControlRequest):
    """Reply the ``names`` of the user's variables that begin with a prefix."""

    prefix: str


@dataclass(frozen=True, kw_only=True)
class ListVariables(RankControlRequest):
    """Reply the user's ``variables``, each with ``name``, ``properties`` (texts by title), ``size_bytes`` or None.

    And ``tensor_bytes``: the bytes of the tensors and arrays of all of them, each counted once.
    """


@dataclass(frozen=True, kw_only=True)
class Inspect(RankControlRequest):
    """Document what is at the cursor of a cell. Replies its ``name`` and ``sections``: titles and texts."""

    code: str
    cursor: int
    with_source: bool


@dataclass(frozen=True, kw_only=True)
class Release(RankControlRequest):
    """Make every wait for other ranks fail."""

    generation: int
    forced: bool  # without checking whether the rank waits
    mpi: str  # the kind of MPI call in which a rank waits: "", "one", "many" requests at once, or "partitioned"


@dataclass(frozen=True, kw_only=True)
class Respawn(RankControlRequest):
    """Start a process within the MPI job, together with all other ranks."""

    command: list[str]
    host: str


@dataclass(frozen=True, kw_only=True)
class MpiFailure(RankControlRequest):
    """Reply how the start of a process within the MPI job failed: ``failure``, empty so far."""


@dataclass(frozen=True, kw_only=True)
class RepeatReply(RankControlRequest):
    """Send the reply to a cell again, if it has ended, or reply whether it runs."""

    cell: str  # the message ID of its request


@dataclass(frozen=True, kw_only=True)
class RepeatReplyInOrder(RankRequest):
    """The same, after everything that was sent to the rank before."""

    cell: str


# To nannies


@dataclass(frozen=True, kw_only=True)
class AcknowledgeNannyHello(NannyRequest):
    """Stop repeating ``NannyHello`` so often: it was received."""


@dataclass(frozen=True, kw_only=True)
class RepeatHello(NannyRequest):
    """Publish ``NannyHello`` again: receiving it shows the client that its subscription is active."""


@dataclass(frozen=True, kw_only=True)
class Signal(NannyRequest):
    """Send a signal to the rank's process."""

    number: int


@dataclass(frozen=True, kw_only=True)
class Interrupt(NannyRequest):
    """Interrupt a cell; if it has not started, as soon as it does."""

    cell: str  # the message ID of its request


@dataclass(frozen=True, kw_only=True)
class End(NannyRequest):
    """Ask the rank to exit; send SIGKILL if it does not exit in time."""


@dataclass(frozen=True, kw_only=True)
class Publish(NannyRequest):
    """Publish a record for all clients of the cluster."""

    record_type: str  # its message type
    content: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Figures(NannyRequest):
    """Reply the rank's figures as they are now, as ``RankVitals``, without waiting until they are published next."""


@dataclass(frozen=True, kw_only=True)
class Replay(NannyRequest):
    """Reply what was published since the cell started, as the reply's buffers."""


@dataclass(frozen=True, kw_only=True)
class Ping(NannyRequest):
    """Reply that the host responds, and which of its nannies have exited: ``gone``."""

    nannies: list[tuple[int, str]]  # process IDs and start times


@dataclass(frozen=True, kw_only=True)
class Stack(NannyRequest):
    """Reply the ``stack`` of a rank that does not respond itself, and its ``vitals`` if it still sends heartbeats."""


def kinds(base: type[Request] = Request) -> list[type[Request]]:
    """Return the concrete classes of requests: those without subclasses."""
    below = base.__subclasses__()
    return [kind for each in below for kind in kinds(each)] if below else [base]


@functools.cache
def _kinds_by_name() -> dict[str, type[Request]]:
    return {kind.__name__: kind for kind in kinds()}


def decode(content: dict[str, Any]) -> Request:
    """Decode a request.

    Raises a ValueError if this version has no such request.
    """
    kind = _kinds_by_name().get(content["do"])
    if kind is not None:
        return kind.from_content(content)
    raise ValueError(f"unknown request {content['do']!r}; install the same version for the notebook and the ranks")


class Handlers:
    """A table of methods, each of which serves one kind of request: ``handles = Handlers()``, ``@handles(Push)``."""

    def __init__(self) -> None:
        self.methods: dict[type[Request], Callable[..., Any]] = {}

    def __call__(self, kind: type[Request]) -> Callable[[Method], Method]:
        """Register the decorated method for a kind of request."""

        def register(method: Method) -> Method:
            self.methods[kind] = method
            return method

        return register

    def serve(self, owner: Any, content: dict[str, Any], *args: Any) -> Reply:
        """Call the owner's method for a request, with the record in place of its JSON form; return the reply.

        The method returns the reply's content with or without buffers, or None; its status is "ok" if it has none.

        Raises a ValueError if the request is unknown, or is served elsewhere.
        """
        request = decode(content)
        if type(request) not in self.methods:
            raise ValueError(f"{content['do']} is not served on this channel")
        found = self.methods[type(request)](owner, request, *args)
        content, buffers = found if isinstance(found, tuple) else (found or {}, [])
        return {"status": "ok"} | content, buffers
