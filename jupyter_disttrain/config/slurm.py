"""Validate options for Slurm before a job is submitted.

Covers: nodes, ranks and GPUs on each, partition, time, account, any other option of sbatch; contradictions.
Does not cover: what an allocation has, the script of the job (``launchers.slurm``).
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

STARTS = ("mpirun", "srun")
OWN_OPTIONS = {  # options of %dist_init, by their names in sbatch
    "nodes": "-N",
    "ntasks-per-node": "--ntasks-per-node",
    "gpus-per-node": "--gpus-per-node",
    "partition": "--partition",
    "time": "--time",
    "account": "--account",
}
_REASONS = {  # other options that the user can't set
    "the job's output goes into the folder of the cluster's logs": "output error open-mode",
    "the ranks are reached over the network": "input",
    "the ranks run in the notebook's folder": "chdir",
    "the script is written here": "wrap",
    "a cluster is one job": "array",
    "the wait for the job is shown here": "wait",
    "the job is to run": "test-only",
    "the job's number is read here": "parsable quiet",
    "a job that starts a second time would have new ranks without variables; %dist_reset submits a new job": "requeue",
    "it is set already": "no-requeue",
    "it is set by how the ranks are started": "no-kill",
    "the ranks have the notebook's environment": "export export-file",
    "the job must run on the cluster of this host": "clusters",
    "the ranks are counted by -N and --ntasks-per-node": "ntasks ntasks-per-gpu ntasks-per-core ntasks-per-socket",
    "GPUs are counted by --gpus-per-node": "gpus gpus-per-socket",
    "each rank uses the GPU of its node that its local_rank selects; use --gpus-per-node": "gpus-per-task",
    "it asks for sbatch's help; call sbatch in a terminal": "help usage",
    "it asks for sbatch's version; call sbatch in a terminal": "version",
}
REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
_FLAG_OR_VALUE = re.compile(r"--([a-z][a-z0-9-]*)(?:=(.*))?", re.DOTALL)
_GPUS = re.compile(r"(?:[A-Za-z][\w.-]*:)?(\d+)")
_TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(?::\d\d){0,2}|(?i:unlimited|infinite)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """A validated request.

    Raises a UsageError if a value can't be used; the message names the option and valid values.
    """

    nodes: int | None = None  # None: those of the allocation, or 1
    ntasks_per_node: int | None = None  # ranks; None: one per GPU, as the allocation has, or 1
    gpus_per_node: str | None = None  # "4" or "a100:4"; None: none are requested
    partition: str | None = None
    time: str | None = None  # in sbatch's format: minutes, HH:MM:SS, D-HH:MM:SS
    account: str | None = None
    more: tuple[str, ...] = ()  # other options of sbatch: "--name=value" or "--name"
    start: str = "mpirun"  # how the ranks are started within the job; "srun": without MPI
    new_job: bool = False  # submit one, also from inside an allocation

    def __post_init__(self) -> None:
        """Refuse invalid values and combinations."""
        for name, value in (("-N", self.nodes), ("--ntasks-per-node", self.ntasks_per_node)):
            if value is not None and value < 1:
                raise UsageError(f"{name} must be 1 or more, not {value}")
        if self.start not in STARTS:
            raise UsageError(f"ranks of a Slurm job are started by {' or '.join(STARTS)}, not by {self.start!r}")
        if self.gpus_per_node is not None:
            gpu_count(self.gpus_per_node)
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise UsageError(
                f"cannot read --time {self.time}; write minutes, HH:MM:SS or D-HH:MM:SS, e.g. --time 2:00:00"
            )
        for option in self.lines:
            if not option.isprintable():
                raise UsageError(f"an option of sbatch must be one line of text, not {option!r}")
        if len(set(map(name_of, self.more))) < len(self.more):
            raise UsageError(f"give each option of sbatch once, not {shlex.join(self.more)}")

    @property
    def lines(self) -> tuple[str, ...]:
        """Options of sbatch except the numbers of nodes and ranks, in the form ``--name=value``."""
        named = {
            "gpus-per-node": self.gpus_per_node,
            "partition": self.partition,
            "time": self.time,
            "account": self.account,
        }
        return tuple(f"--{name}={value}" for name, value in named.items() if value is not None) + self.more

    @property
    def gpu_option(self) -> str:
        """The option that requests GPUs, as it is given; empty where none does."""
        asks = (option for option in self.lines if name_of(option).startswith(("gpus", "gres", "tres-per")))
        return next((option for option in asks if "gpu" in option), "")

    @property
    def per_node(self) -> int | None:
        """Ranks per node: the requested number, else one per GPU; None where neither is given."""
        return self.ntasks_per_node or (None if self.gpus_per_node is None else gpu_count(self.gpus_per_node))

    def shape(self, ranks: int | None = None) -> tuple[int, int]:
        """Return nodes and ranks per node of a job to be submitted; ``ranks`` is the total where the user gave ``-n``.

        Raises a UsageError if the three numbers contradict each other.
        """
        per_node = self.per_node
        if ranks is None:
            return self.nodes or 1, per_node or 1
        nodes = self.nodes or max(1, ranks // (per_node or ranks))
        per_node = per_node or max(1, ranks // nodes)
        if nodes * per_node != ranks:
            raise UsageError(
                f"-n {ranks} is not {nodes} {'node' if nodes == 1 else 'nodes'} with {per_node} each; "
                "leave -n out, or change -N or --ntasks-per-node"
            )
        return nodes, per_node


def gpu_count(gpus_per_node: str) -> int:
    """Return the number of GPUs of ``"4"``, ``"a100:4"`` or ``"a100:2,v100:2"``.

    Raises a UsageError if it can't be parsed, or is zero.
    """
    found = [_GPUS.fullmatch(part) for part in gpus_per_node.split(",")]
    count = sum(int(each[1]) for each in found if each)
    if not all(found) or not count:
        raise UsageError(f"cannot read --gpus-per-node {gpus_per_node}; write e.g. 4 or a100:4")
    return count


def parse_more(arguments: Iterable[str]) -> tuple[str, ...]:
    """Parse options of sbatch, such as ``["--qos", "high"]``; returns each as ``--name=value`` or ``--name``.

    Raises a UsageError if an argument is no long option nor the value of one, or if the user can't set the option; the
    message gives the reason.
    """
    found: list[str] = []
    takes_value = False  # whether the option before could take a value
    for argument in arguments:
        if not argument.startswith("-") and takes_value:
            found[-1] += f"={argument}"
            takes_value = False
            continue
        parts = _FLAG_OR_VALUE.fullmatch(argument)
        if parts is None:
            raise UsageError(
                f"cannot read {argument!r} as an option of sbatch; write its long form, "
                "e.g. --qos=high or --sbatch '--constraint=a100 --exclusive'"
            )
        _refuse(parts[1])
        found.append(argument)
        takes_value = parts[2] is None
    return tuple(found)


def split_more(text: str) -> tuple[str, ...]:
    """Parse the value of ``--sbatch "..."``; raises as :func:`parse_more`."""
    try:
        arguments = shlex.split(text)
    except ValueError as error:  # a quote that does not end
        raise UsageError(f"cannot read --sbatch {text!r}: {error}") from error
    return parse_more(arguments)


def name_of(option: str) -> str:
    """Return the name of ``--name=value``."""
    return option.removeprefix("--").partition("=")[0]


def _refuse(name: str) -> None:
    """Refuse options that are set here, or that %dist_init has itself; sbatch accepts any prefix of a name."""
    if name in OWN_OPTIONS:
        raise UsageError(f"pass --{name} to %dist_init itself: {OWN_OPTIONS[name]}")
    meant = [name] if name in REFUSED else [each for each in (*REFUSED, *OWN_OPTIONS) if each.startswith(name)]
    if meant:
        reason = REFUSED.get(meant[0], f"write its whole name, --{meant[0]}")
        raise UsageError(f"--{name} can't be passed to sbatch here: {reason}")
