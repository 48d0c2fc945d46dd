"""Parse the state of a Slurm job.

Covers: the record, parsing the output of scontrol and sacct, the meaning of states.
Does not cover: querying (``job``), texts for the user (``user_messages``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

GONE = "GONE"  # not one of Slurm's states: Slurm does not know the job any more
SACCT_FIELDS = "JobID,State,ExitCode,Start,End,Reason"
UNKNOWN = "UNKNOWN"  # not one of Slurm's states: Slurm did not reply
ENDLESS = ("UNLIMITED", "Partition_Limit", "365-00:00:00")  # the last is the limit of a running job without a limit
WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
OVER = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
        *("REVOKED", "TIMEOUT", GONE),
    }
)
_FIELD = re.compile(r"(?:^|\s)([A-Za-z][\w/:]*)=(\S*)")
_LOG = re.compile(r"(?:^|\s)StdOut=(.*?)(?=\s+[A-Za-z][\w/:]*=|\s*$)")  # a path may contain spaces
_GPUS = re.compile(r"(?:gres[:/])?gpu(?:[:/](?P<type>[A-Za-z][^=,:]*))?(?:[:=](?P<count>\d+))?(?:\(.*\))?")
_NOTHING = {"", "(null)", "N/A", "None", "NONE", "Unknown"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """State of a job at one moment."""

    job_id: str
    state: str  # Slurm's state, such as PENDING, or GONE or UNKNOWN
    reason: str = ""  # why it waits, or has ended
    partition: str = ""
    position: int | None = None  # in its partition's queue, from 1 on; None where it does not wait
    start_s: float | None = None  # seconds since the epoch; for a waiting job the expected start
    end_s: float | None = None  # end of its time limit, or when it has ended; None: it has no limit
    preempt_s: float | None = None  # when it will be preempted
    time_limit: str = ""
    node_list: str = ""  # in Slurm's short form, such as node[1-3]
    nodes: tuple[str, ...] = ()  # its hosts
    requeued: int = 0  # how often it was requeued
    exit_code: int = 0  # once it has ended
    exit_signal: int = 0
    gpus: int = 0  # on all its nodes together
    cpus: int = 0  # on all its nodes together
    tasks: int = 0  # on all its nodes together
    tasks_per_node: int = 0  # 0: unknown
    log: str = ""  # the log file of its script

    @property
    def waits(self) -> bool:
        """Whether it is in the queue."""
        return self.state in WAITING

    @property
    def runs(self) -> bool:
        """Whether its script has begun, and its nodes are not yet free again."""
        return not (self.waits or self.is_over or self.state in (UNKNOWN, "CONFIGURING"))

    @property
    def is_over(self) -> bool:
        """Whether it has ended and its nodes are free."""
        return self.state in OVER

    def time_left_s(self, now_s: float) -> float | None:
        """Return how long it may run on, in seconds; None where it does not run or has no limit."""
        return None if self.end_s is None or not self.runs else max(0.0, self.end_s - now_s)


def from_scontrol(text: str) -> JobState:
    """Parse the output of ``scontrol show job -o`` for one job, with times in seconds since the epoch."""
    fields: dict[str, str] = {}
    for name, value in _FIELD.findall(text):
        fields.setdefault(name, "" if value in _NOTHING else value)  # keep the first: fields inside a comment come last
    code, _, number = fields.get("ExitCode", "").partition(":")
    log = _LOG.search(text)
    state = fields.get("JobState", UNKNOWN)
    # Without a limit, and until it has the partition's limit, Slurm reports an end that is a year away.
    endless = fields.get("TimeLimit") in ENDLESS and state not in OVER
    return JobState(
        job_id=fields.get("JobId", ""),
        state=state,
        reason=fields.get("Reason", ""),
        partition=fields.get("Partition", ""),
        start_s=_time(fields.get("StartTime", "")),
        end_s=None if endless else _time(fields.get("EndTime", "")),
        preempt_s=_time(fields.get("PreemptTime", "")),
        time_limit="" if endless else fields.get("TimeLimit", ""),
        node_list=fields.get("NodeList", ""),
        requeued=_first(fields.get("Restarts", "")),
        exit_code=_first(code),
        exit_signal=_first(number),
        gpus=_gpus_of(fields),
        cpus=_first(fields.get("NumCPUs", "")),
        tasks=_first(fields.get("NumTasks", "")),
        tasks_per_node=_first(fields.get("NtasksPerN:B:S:C", "")),
        log="" if log is None or log[1] in _NOTHING else log[1],
    )


def from_sacct(text: str) -> JobState | None:
    """Parse ``sacct -X -P -n -o`` with ``SACCT_FIELDS``; None if it is empty."""
    for line in text.splitlines():
        parts = ["" if part in _NOTHING else part for part in line.split("|")]
        if len(parts) < 6:  # noqa: PLR2004  (the number of requested fields)
            continue
        number, state, code, start, end, reason = parts[:6]
        code, _, signal = code.partition(":")
        return JobState(
            job_id=number,
            state=state.split()[0] if state else GONE,  # "CANCELLED by 1000"
            reason=reason,
            start_s=_time(start),
            end_s=_time(end),
            exit_code=_first(code),
            exit_signal=_first(signal),
        )
    return None


def _gpus_of(fields: Mapping[str, str]) -> int:
    """Return the number of GPUs of a job; 0 if Slurm does not report it.

    Slurm up to 22.05 names the allocated resources ``TRES``. A site that counts no ``gres/gpu`` has none there in any
    version; then only the request is known.
    """
    for name in ("AllocTRES", "TRES", "ReqTRES", "TresPerJob"):
        if found := gpus_in(fields.get(name, "")):
            return found
    return gpus_in(fields.get("TresPerNode", "")) * _first(fields.get("NumNodes", ""))


def gpus_in(resources: str) -> int:
    """Return the number of GPUs in ``"cpu=16,gres/gpu=8"``, ``"gres:gpu:4"`` or ``"gres/gpu:a100:4"``.

    Where both the total and the number of each type are listed, as in ``"gres/gpu=8,gres/gpu:a100=8"``, it is the
    total.
    """
    found = [match for part in resources.split(",") if (match := _GPUS.fullmatch(part))]
    plain = [match for match in found if match["type"] is None]
    return sum(int(match["count"] or 1) for match in plain or found)


def _first(text: str) -> int:
    """Return the number that a text such as ``"2-4"`` or ``"4:0:*:*"`` begins with; 0 if there is none."""
    found = re.match(r"\d+", text)
    return int(found[0]) if found else 0


def _time(text: str) -> float | None:
    return float(text) if text.isdecimal() else None
