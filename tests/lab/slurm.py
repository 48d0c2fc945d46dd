"""A real Slurm over the hosts of the lab.

Covers: its configuration, its daemons, waiting until every host is idle, ending its jobs.
Does not cover: accounting, cgroups, GPUs.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from typing import TYPE_CHECKING

from .places import TIMEOUT_S, LabError, Place, command

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CONTROLLER_PORT = 17000  # plus the number of the lab, as all controllers run on the head
HOST_PORT = 16818
CPUS = 4  # of each host, whatever this machine has

CONFIG = """
ClusterName=lab{lab_id}
SlurmctldHost=head({head})
SlurmctldPort={port}
SlurmdPort={host_port}
CommunicationParameters=NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd_%n.log
TmpFS={lab}/tmp
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=pmix
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,batch_sched_delay=0,sched_min_interval=100000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=5
KillWait=2
MinJobAge=60
{hosts}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes={names} MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""

CGROUP_CONFIG = """
CgroupPlugin=cgroup/v1
CgroupAutomount=no
"""

# The controller must run on the host named in the configuration.
CONTROLLER = """
hostname head
mount --bind {lab}/hosts /etc/hosts
exec slurmctld -D -i -f {folder}/slurm.conf
"""


class Slurm:
    """Slurm's daemons; ``environment`` has the variables for its commands.

    Its partitions are ``all``, the default, and ``urgent``, whose jobs requeue those of ``all`` to get room. ``enter``
    has for each host a function that returns the command line to run a program there.
    """

    def __init__(self, place: Place, enter: Mapping[str, Callable[..., list[str]]]) -> None:
        self.place = place
        self.folder = place.folder / "slurm"
        self.conf = self.folder / "slurm.conf"
        self._enter = enter
        self.daemons: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> dict[str, str]:
        """The variable by which sbatch, srun and the others find this Slurm."""
        return {"SLURM_CONF": str(self.conf)}

    def run(self, *arguments: str) -> str:
        """Run one of Slurm's commands on the head and return its output."""
        return command("env", f"SLURM_CONF={self.conf}", *arguments)

    def start(self) -> None:
        """Start the daemons and wait until every host is idle."""
        self._prepare()
        munge = self.folder / "munge"
        files = [f"--{name}-file={munge}/{name}" for name in ("key", "pid", "log", "seed")]
        self._spawn("munged", ["munged", "--foreground", "--force", *files, f"--socket={self.folder}/munge.sock"])
        script = CONTROLLER.format(lab=self.place.folder, folder=self.folder)
        own = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        own += ["--propagation", "slave"]
        self._until("munged", (self.folder / "munge.sock").exists)
        self._spawn("controller", [*own, "sh", "-ec", script])
        for host in self._enter:
            self.start_daemon(host)
        self.wait()

    def start_daemon(self, host: str) -> None:
        """Start the daemon of a host that has just booted."""
        self._spawn(host, self._enter[host]("slurmd", "-D", "-N", host, "-f", str(self.conf)))

    def wait(self) -> None:
        """Return as soon as every host is idle or has jobs."""
        self._until("Slurm", lambda: self._ready() == set(self._enter))

    def submit(self, *options: str) -> str:
        """Submit a job that does nothing; return its number."""
        return self.run("sbatch", "--parsable", "-o", "/dev/null", *options, "--wrap", "sleep 300").strip()

    def allocate(self, *options: str) -> str:
        """Make an allocation with salloc; return its job's number."""
        output = self.run("sh", "-c", f"salloc {' '.join(options)} --no-shell 2>&1")
        return output.split("Granted job allocation ")[1].split()[0]

    def cancel_all(self) -> None:
        """End all jobs, and wait until they have left the hosts and the queue."""
        self.run("scancel", "--full", "--user=root")
        self._until("scancel", lambda: not self.run("squeue", "-h", "--states=PENDING,RUNNING,COMPLETING"))

    def reap(self) -> None:
        """Wait for the ended processes."""
        for child in self.daemons:
            child.wait(TIMEOUT_S)

    def _ready(self) -> set[str]:
        try:
            for number in range(1, len(self._enter) + 1):
                socket.create_connection((self.place.address(number), HOST_PORT), timeout=1).close()
            return set(self.run("sinfo", "-h", "-r", "-N", "-p", "all", "-t", "idle,alloc,mix", "-o", "%N").split())
        except (OSError, LabError):
            return set()  # a daemon does not answer yet

    def _spawn(self, name: str, arguments: list[str]) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            child = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | self.environment,
            )
        self.daemons.append(child)

    def _until(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 3 * TIMEOUT_S
        while not holds():
            if time.monotonic() > deadline:
                logs = sorted((self.folder / "log").iterdir())
                texts = [f"{path.name}:\n{path.read_text(errors='replace')[-2000:]}" for path in logs]
                raise LabError(f"{what} is not ready after {3 * TIMEOUT_S:g} s; the logs:\n" + "\n".join(texts))
            time.sleep(0.02)

    def _prepare(self) -> None:
        for name in (".", "log", "state", "munge", *(f"spool_{host}" for host in self._enter)):
            (self.folder / name).mkdir(mode=0o755, exist_ok=True)
        (self.folder / "munge").chmod(0o700)
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        hosts = "\n".join(
            f"NodeName={host} NodeHostname={host} NodeAddr={self.place.address(number)} CPUs={CPUS} RealMemory=4000"
            for number, host in enumerate(self._enter, start=1)
        )
        text = CONFIG.format(
            lab_id=self.place.lab_id,
            head=self.place.head_address,
            port=CONTROLLER_PORT + self.place.lab_id,
            host_port=HOST_PORT,
            folder=self.folder,
            lab=self.place.folder,
            hosts=hosts,
            names=",".join(self._enter),
        )
        self.conf.write_text(text)
        (self.folder / "cgroup.conf").write_text(CGROUP_CONFIG)
