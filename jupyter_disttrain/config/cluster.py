"""Validate the request for a cluster before anything starts.

Covers: :class:`ClusterConfig`.
Does not cover: counting the GPUs (``client.startup.gpus``), defaults set as traitlets
(``notebook.magics.cluster_magics``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import UsageError
from ..protocol.ranks import counted
from .hosts import HostSlots, split_command, total_slots
from .slurm import SlurmOptions

LAUNCHER_NAMES = ("mpi", "local", "ssh", "slurm")  # their classes: ``launchers.LAUNCHERS``
ON_RANK_DEATH = ("replace", "reset", "stop")
BACKENDS = ("auto", "nccl", "gloo", "none")
MAX_RANKS = 4096
CONTROLLER_PORTS = 8  # ports for ranks on other hosts
SHORTEST_SAMPLE_SECONDS = 0.1
TF_ROLES = ("chief", "worker", "ps", "evaluator")
Roles = tuple[tuple[str, int], ...]  # roles of TensorFlow, each with its number of ranks
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """A validated request for a cluster.

    Raises a UsageError if a value can't be used; the message names the value and valid ones.
    """

    n: int | None = None  # ranks; None: one per GPU, or 2 without GPUs
    launcher: str = "mpi"
    hosts: tuple[HostSlots, ...] = ()  # reached by ssh; empty: this machine only
    spares: tuple[str, ...] = ()  # hosts that replace lost ones, with the launcher "ssh"
    interface: str | None = None  # interface of the hosts' network, or the network as in "10.1.0.0/16"; None: chosen
    controller_ports: tuple[int, int] | None = None  # first and last, for ranks on other hosts; None: any
    ssh: str = "ssh"  # the command, with its options
    forward: tuple[str, ...] = ()  # variables for ranks on other hosts: "NAME" or "NAME=VALUE"
    slurm: SlurmOptions | None = None  # options of the job, for the launcher "slurm"
    backend: str = "auto"  # "none": ranks without torch and without a process group
    gpus: tuple[int, ...] | None = None  # indices among the visible GPUs; None: all
    share_gpus: bool = False  # allow more ranks than GPUs
    address: str | None = None  # MASTER_ADDR; None: chosen
    port: int = 0  # MASTER_PORT; 0: a free one
    timeout_s: float = 1800.0  # timeout of the process group's collectives
    start_timeout_s: float = 120.0
    grace_s: float = 3.0  # time for ranks to finish by themselves once another has failed, before they are released
    hang_after_s: float = 30.0  # in one collective, before the cell lists the waiting and the missing ranks
    on_rank_death: str = "replace"  # by a new process; "reset": all ranks are restarted; "stop": the cluster ends
    tf_roles: Roles = ()  # TF_CONFIG is set for these; empty: it isn't
    sample_s: float = 1.0  # between two metrics messages of each rank and node; 0: none are sent
    warm: bool = True  # fork ranks from one process per node that has imported torch
    preload: tuple[str, ...] = ()  # further modules that this process imports
    name: str = "default"
    keep: bool = False  # the ranks outlive the notebook's kernel
    idle_timeout_s: float = 0.0  # without use, before the cluster ends; 0: it never does
    job: str = ""  # launcher of the ranks in a job started elsewhere, e.g. "srun"; empty: this package started them
    job_file: str = ""  # the file that this job wrote

    def __post_init__(self) -> None:
        """Refuse invalid values and combinations."""
        if self.n is not None and not 1 <= self.n <= MAX_RANKS:
            raise UsageError(f"cannot start {self.n} ranks; choose 1 to {MAX_RANKS}, e.g. %dist_init -n 2")
        self._check_roles()
        self._check_hosts()
        self._check_slurm()
        _choose("launcher", self.launcher, LAUNCHER_NAMES)
        _choose("on_rank_death", self.on_rank_death, ON_RANK_DEATH)
        _choose("backend", self.backend, BACKENDS)
        if self.gpus is not None:
            self._check_gpus(self.gpus)
        if self.timeout_s <= 0 or self.start_timeout_s <= 0:
            raise UsageError(
                f"a timeout must be a positive number of seconds, not {min(self.timeout_s, self.start_timeout_s)}"
            )
        if self.grace_s < 0 or self.hang_after_s < 0:
            raise UsageError(f"a wait must be 0 seconds or more, not {min(self.grace_s, self.hang_after_s):g}")
        if self.idle_timeout_s < 0:
            raise UsageError(f"an idle timeout must be a number of seconds, or 0 for none, not {self.idle_timeout_s:g}")
        if self.sample_s and self.sample_s < SHORTEST_SAMPLE_SECONDS:
            raise UsageError(
                f"the sampling interval must be at least {SHORTEST_SAMPLE_SECONDS:g} s, or 0 for none, not "
                f"{self.sample_s:g} s"
            )
        if not 0 <= self.port < 2**16:
            raise UsageError(f"there is no port {self.port}; choose 1 to 65535, or 0 for a free one")
        for module in self.preload:
            if not all(part.isidentifier() for part in module.split(".")):
                raise UsageError(f"there can't be a module {module!r} to preload; name it as in an import")
        check_name(self.name)

    @property
    def count(self) -> int | None:
        """The requested number of ranks; None: as many as there are GPUs."""
        return self.n or sum(count for _, count in self.tf_roles) or total_slots(self.hosts)

    @property
    def has_mpi(self) -> bool:
        """Whether the ranks are one MPI job."""
        return self.launcher == "mpi" or (self.launcher == "slurm" and self.sbatch.start == "mpirun")

    @property
    def rank_launcher(self) -> str:
        """The launcher as the ranks see it: ``"mpi"``, ``"local"`` or ``"ssh"``."""
        return "mpi" if self.has_mpi else "local" if self.launcher == "slurm" else self.launcher

    @property
    def sbatch(self) -> SlurmOptions:
        """The options for Slurm."""
        return self.slurm or SlurmOptions()

    def _check_hosts(self) -> None:
        if not self.hosts:
            if self.launcher == "ssh":
                raise UsageError("the launcher ssh starts ranks on hosts; name them, e.g. --hosts node1:4,node2:4")
            if self.spares or (self.interface and self.launcher != "slurm"):
                raise UsageError("--spare and --interface are for ranks on hosts; name those, e.g. --hosts node1,node2")
            return
        first, last = self.controller_ports or (1, CONTROLLER_PORTS)
        if not 0 < first <= last < 2**16 or last - first + 1 < CONTROLLER_PORTS:
            raise UsageError(
                f"the controller needs {CONTROLLER_PORTS} ports, not {first} to {last}; name e.g. 40000-40007"
            )
        if self.launcher == "local":
            raise UsageError("the launcher local starts ranks on this machine; for hosts use --launcher mpi, or ssh")
        ipv6 = [host.name for host in self.hosts if ":" in host.name]
        if ipv6 and self.launcher == "mpi":
            raise UsageError(
                f"Open MPI does not accept an IPv6 address as a host's name ({ipv6[0]}); give the host a name in "
                "~/.ssh/config, or start without MPI: --launcher ssh"
            )
        self._check_spares()
        spaced = [argument for argument in split_command(self.ssh) if not argument or any(map(str.isspace, argument))]
        if spaced and self.launcher == "mpi":  # mpiexec splits its argument at spaces and supports no quotes
            raise UsageError(
                f"mpiexec can't pass on {spaced[0]!r} of --ssh, because it has spaces; put it into ~/.ssh/config, or "
                "start without MPI: --launcher ssh"
            )
        there = total_slots(self.hosts)
        if there and self.n not in (None, there):
            takes = "the host takes" if len(self.hosts) == 1 else "the hosts take"
            raise UsageError(f"{takes} {counted(there, 'rank')}, and -n requests {self.n}; leave -n out")
        if self.gpus is not None:
            raise UsageError("-g names GPUs of one machine; on hosts set CUDA_VISIBLE_DEVICES with -x, or leave -g out")

    def _check_spares(self) -> None:
        if self.spares and self.launcher != "ssh":
            raise UsageError("an MPI job can't be extended to another host; --spare needs --launcher ssh")
        both = [host.name for host in self.hosts if host.name in self.spares]
        if both:
            raise UsageError(f"{', '.join(both)} can't be host and spare at once; name others after --spare")

    def _check_slurm(self) -> None:
        if self.launcher != "slurm":
            if self.slurm is not None:
                raise UsageError(
                    "-N, --ntasks-per-node, --partition and similar options are for a Slurm job; add --launcher slurm"
                )
            return
        if self.hosts:
            raise UsageError("Slurm chooses the hosts; leave --hosts out, or name them with --sbatch '--nodelist=...'")
        if self.gpus is not None:
            raise UsageError("Slurm chooses the GPUs; leave -g out, and use --gpus-per-node")

    def _check_roles(self) -> None:
        wanted = sum(count for _, count in self.tf_roles)
        if self.tf_roles and self.n not in (None, wanted):
            roles = ",".join(f"{role}={count}" for role, count in self.tf_roles)
            raise UsageError(
                f"--tf-config {roles} is for {counted(wanted, 'rank')}, not {self.n}; leave -n out, or change one"
            )

    def _check_gpus(self, gpus: tuple[int, ...]) -> None:
        if self.backend in ("gloo", "none"):
            raise UsageError(
                f"GPUs {list(gpus)} were named, but the backend {self.backend!r} uses none; leave -g or --backend out"
            )
        if not gpus or min(gpus) < 0 or len(set(gpus)) != len(gpus):
            raise UsageError(f"cannot use GPUs {list(gpus)}; name each once, e.g. -g 0,1")


def check_name(name: str) -> None:
    """Refuse an invalid cluster name: folders are named after it.

    Raises a UsageError if the name is invalid.
    """
    if not _NAME.match(name):
        raise UsageError(
            f"a cluster can't be named {name!r}; use up to 40 letters, digits, '.', '_' and '-', "
            "a letter or digit first"
        )


def parse_roles(text: str | None) -> Roles:
    """Parse TensorFlow's roles, such as ``"worker=2,ps=1"``, each with its number of ranks; empty for no text.

    Raises a UsageError if a part can't be parsed; the message names it.
    """
    roles: dict[str, int] = {}
    for part in (text or "").replace(" ", "").split(",") if text else ():
        role, _, count = part.partition("=")
        if role not in TF_ROLES or not count.isdecimal() or not int(count) or role in roles:
            raise UsageError(
                f"cannot read {part!r} in --tf-config {text}; write each role once with its ranks, e.g. worker=2,ps=1 "
                f"(roles: {', '.join(TF_ROLES)})"
            )
        roles[role] = int(count)
    return tuple(roles.items())


def _choose(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"there is no {what} {value!r}; choose one of {', '.join(choices)}")
