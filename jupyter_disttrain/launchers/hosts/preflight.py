"""Check, before anything starts, that ranks can be started on the hosts.

Covers: judging the hosts' reports, one message with each problem, its hosts and its remedy; the network between them.
Does not cover: querying the hosts (``probe_runner``), how the network is chosen (``network``).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import LaunchError
from ...protocol.time_limits import MOST_CLOCK_SECONDS
from ..placement import Placement
from ..slurm.srun_errors import explain_step
from .network import choose_network, describe, device_environment
from .report import own_addresses
from .ssh_errors import explain, fill_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .network import Network
    from .report import HostReport, HostRequirements

    Problem = tuple[str, str]  # the problem and its remedy; neither contains the host's name

MOST_NAMED = 8  # hosts listed per problem
SSH = ("ssh",)
WITHOUT_MPI = {"ssh": "--launcher ssh", "srun": "--ranks-by srun"}  # by the command that reaches the hosts


def check(reports: Sequence[HostReport], wanted: HostRequirements, ssh: Sequence[str] = SSH) -> list[str]:
    """Return warnings on hosts, surveyed with ``wanted`` and ``ssh``, that do not prevent a start of ranks there.

    Raises
    ------
    LaunchError
        If there is a problem; the message has a line for each, with the hosts that have it and the remedy.
    """
    problems: dict[Problem, list[str]] = {}
    for report in reports:
        found = list(_problems(report, reports, wanted)) if report.answered else [_unasked(report, ssh, wanted)]
        for problem in dict.fromkeys(found):
            problems.setdefault(problem, []).append(report.name)
    if problems:
        bad = {host for hosts in problems.values() for host in hosts}
        who = "the host" if len(reports) == 1 else f"{len(bad)} of {len(reports)} hosts"
        lines = [
            f"{_named(hosts)}: {fill_in(f'{what}; {remedy}', hosts)}" for (what, remedy), hosts in problems.items()
        ]
        raise LaunchError("\n  ".join([f"{who} can't be used as requested, so nothing was started", *lines]))
    return list(_warnings(reports))


def _unasked(report: HostReport, ssh: Sequence[str], wanted: HostRequirements) -> Problem:
    return explain_step(report, wanted) if wanted.by == "srun" else explain(report, ssh, wanted)


def _named(hosts: Sequence[str]) -> str:
    more = f" and {len(hosts) - MOST_NAMED} more" if len(hosts) > MOST_NAMED else ""
    return ", ".join(hosts[:MOST_NAMED]) + more


def _problems(report: HostReport, reports: Sequence[HostReport], wanted: HostRequirements) -> Iterator[Problem]:
    """Yield the problems that prevent a start on a host that replied."""
    same = next(each for each in reports if each.answered and _identity(each) == _identity(report))
    if same is not report and report.addresses:
        yield f"the same host as {same.name}", "name each host once, with all of its ranks, e.g. node1:4"
    yield from _python(report, wanted)
    if wanted.torch is not None:
        yield from _torch(report, reports, wanted.torch, wanted.python)
    if wanted.mpiexec is not None and report.daemon != wanted.mpi_version:
        where = "an ssh login" if wanted.by == "ssh" else "the job"
        folder = Path(wanted.mpiexec).parent
        what = f"Open MPI is {report.daemon} there, here it is {wanted.mpi_version}"
        missing = f"Open MPI's daemon prted is neither in {folder} nor on the PATH of {where}"
        yield (
            what if report.daemon else missing,
            f"install the same Open MPI on all hosts, or start without MPI: {WITHOUT_MPI[wanted.by]}",
        )
    yield from report.problems


def _identity(report: HostReport) -> tuple[str, frozenset[tuple[str, str]]]:
    return report.hostname, frozenset((each.interface, each.address) for each in report.addresses)


def _python(report: HostReport, wanted: HostRequirements) -> Iterator[Problem]:
    if report.python != wanted.python_version:
        yield (
            f"{wanted.python} is {report.python} there, here it is {wanted.python_version}",
            "install the same environment on all hosts",
        )
    if not report.package_folder:
        yield (
            f"jupyter_disttrain is not installed in {wanted.python}",
            f"install it there: {wanted.python} -m pip install jupyter_disttrain=={wanted.package_version}",
        )
    elif report.package_version != wanted.package_version:
        there = report.package_version or "of no version"
        yield (
            f"jupyter_disttrain is {there} there, here it is {wanted.package_version}",
            f"install the same: {wanted.python} -m pip install jupyter_disttrain=={wanted.package_version}",
        )
    elif report.package_digest != wanted.package_digest:
        elsewhere = report.package_folder != wanted.package_folder
        here = f"the one in {wanted.package_folder} here" if elsewhere else "here"
        remedy = "copy the same state of it to all hosts"
        remedy += ", and check that PYTHONPATH contains the same folder" if elsewhere else ""
        yield f"jupyter_disttrain in {report.package_folder} differs from {here}", remedy


def _torch(report: HostReport, reports: Sequence[HostReport], here: str, python: str) -> Iterator[Problem]:
    """Yield problems with torch; its build (the part after the plus) has to be the same on the hosts only."""
    if not report.torch:
        yield f"torch is not installed in {python}", f"install the same on all hosts: torch {here}".rstrip()
    elif here and _release(report.torch) != _release(here):
        yield (
            f"torch is {report.torch} there, here it is {here}",
            f"install the same on all hosts, e.g. pip install torch=={_release(here)}",
        )
    else:
        release = _release(here or report.torch)
        builds = Counter(each.torch for each in reports if _release(each.torch) == release)
        usual = builds.most_common(1)[0][0]
        if report.torch != usual:
            names = ", ".join(each.name for each in reports if each.torch == usual)
            yield f"torch is {report.torch} there, on {names} it is {usual}", "install the same build on all hosts"


def _release(version: str) -> str:
    return version.partition("+")[0]


def _warnings(reports: Sequence[HostReport]) -> Iterator[str]:
    ahead = {report.name: report.clock_ahead_s for report in reports if abs(report.clock_ahead_s) > MOST_CLOCK_SECONDS}
    if ahead:
        values = ", ".join(f"{name} is {abs(by):.0f} s {'ahead' if by > 0 else 'behind'}" for name, by in ahead.items())
        yield f"clocks differ from this machine's: {values}; so do times in logs and metrics; run chrony or NTP"
    counts = {report.gpus for report in reports}
    if len(counts) > 1:
        values = ", ".join(f"{report.name} {report.gpus}" for report in reports)
        yield f"the hosts have different numbers of GPUs: {values}"


def over(reports: Sequence[HostReport], wanted: HostRequirements, launcher: str, ssh: Sequence[str] = ()) -> Placement:
    """Check the hosts, and choose the network between them; the placement has no ranks yet.

    Raises
    ------
    LaunchError
        If a host can't be used, or they share no network; the message names each and what to do.
    """
    notes = check(reports, wanted, ssh)
    network = choose_network(own_addresses(), reports, wanted.interface)
    check_version(network, launcher)
    return Placement(
        listen=network.client_address,
        network=network.cidr,
        addresses={host: address.address for host, address in network.addresses.items()},
        variables=device_environment(network),
        description="; ".join([describe(network), *notes]),
    )


def check_version(network: Network, launcher: str) -> None:
    """Raise an error for IPv6 with MPI jobs, which ranks in Slurm may be too: their socket filter accepts IPv4 only.

    Raises
    ------
    LaunchError
        If the network is IPv6 and the launcher is not ssh.
    """
    if ":" in network.client_address and launcher != "ssh":
        needs = "ranks in Slurm need" if launcher == "slurm" else "an MPI job over hosts needs"
        raise LaunchError(
            f"the hosts would communicate over {network.cidr}, and {needs} IPv4; start without MPI (--launcher ssh), "
            "or name an IPv4 network that all hosts are in, e.g. --interface 10.1.0.0/16"
        )
