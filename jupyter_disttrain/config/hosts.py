"""Parse the hosts that ranks run on.

Covers: ``"node1:4,node2:4"``, hostfiles, the number of hosts and of ranks on each, the ssh command that reaches them.
Does not cover: whether they can be used (``launchers.hosts.preflight``).
"""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..protocol.ranks import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MOST_SLOTS = 4096  # ranks on one host
# Neither a user nor a name begins with a dash: ssh would take it for an option.
_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_HOST = re.compile(
    rf"(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*@)?(?:(?P<name>{_NAME})|\[(?P<ipv6>[^\[\]]+)\])(?::(?P<slots>[^:]*))?"
)
_LOCAL_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")
_HOW = "write e.g. node1:4,node2:4, and an IPv6 address in brackets: [fd00::1]:4"
_HOW_IN_FILE = "write a host on each line, e.g. node1 slots=4, and an IPv6 address in brackets: [fd00::1] slots=4"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSlots:
    """A host and its slots for ranks."""

    name: str  # as ssh accepts it: a name or an address, with "user@" where it was given
    slots: int | None  # ranks; None: as many as it has GPUs


def total_slots(hosts: Sequence[HostSlots]) -> int | None:
    """Return how many ranks the hosts take; None where that is not determined, or there are no hosts."""
    counts = [host.slots for host in hosts]
    return sum(count or 0 for count in counts) or None if None not in counts else None


def parse_hosts(text: str) -> tuple[HostSlots, ...]:
    """Parse the hosts of ``--hosts``; returns each once, in the order of the text, at least one.

    They are separated by commas or spaces; each may have its number of ranks after a colon, and a user before an ``@``.
    A host that is named several times gets the sum; each mention without a number counts as one. Raises a UsageError if
    a part can't be parsed, or if localhost is named beside other hosts.

    >>> parse_hosts("node1:4,node2:4")
    (HostSlots(name='node1', slots=4), HostSlots(name='node2', slots=4))
    """
    parts = text.replace(",", " ").split()
    if not parts:
        raise UsageError(f"no host is named in {text!r}; {_HOW}")
    return _gathered((_one(part, f"in --hosts {text}") for part in parts), f"--hosts {text}")


def parse_hostfile(path: str | Path) -> tuple[HostSlots, ...]:
    """Read a hostfile: Open MPI's form (``node1 slots=4``), MPICH's (``node1:4``), or a host on each line.

    Returns each host once, with the sum of its lines, in the order of the file, at least one. Raises a UsageError if
    the file can't be read, or a line of it can't be parsed; the message names the line.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise UsageError(f"cannot read the hostfile {path}: {why}") from error
    found = [
        _hostfile_line(fields, f"in line {number} of {path}")
        for number, line in enumerate(lines, 1)
        # ``slots = 4`` is one field, as for Open MPI.
        if (fields := re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split())
    ]
    if not found:
        raise UsageError(f"no host is named in the hostfile {path}; write one on each line, e.g. node1 slots=4")
    return _gathered(found, f"the hostfile {path}")


def take_hosts(
    hosts: Sequence[HostSlots], node_count: int | None = None, process_count_per_node: int | None = None
) -> tuple[HostSlots, ...]:
    """Take the first ``node_count`` hosts, each with ``process_count_per_node`` ranks; None changes nothing.

    Raises a UsageError if there are fewer hosts than asked for, or if a number is below 1.
    """
    if node_count is not None and not 1 <= node_count <= len(hosts):
        named = ", ".join(host.name for host in hosts)
        there = "1 host is" if len(hosts) == 1 else f"{len(hosts)} hosts are"
        asked = f"{counted(node_count, 'node')} {'was' if node_count == 1 else 'were'}"
        raise UsageError(f"{asked} requested, and {there} named ({named}); change one of the two")
    if process_count_per_node is not None and not 1 <= process_count_per_node <= MOST_SLOTS:
        raise UsageError(f"a node can have 1 to {MOST_SLOTS} ranks, not {process_count_per_node}")
    taken = tuple(hosts[:node_count])
    if process_count_per_node is None:
        return taken
    return tuple(replace(host, slots=process_count_per_node) for host in taken)


def split_command(text: str) -> list[str]:
    """Split an ssh command, with its options and variables, into arguments.

    Raises a UsageError if a quote does not end, or it is empty.
    """
    try:
        arguments = [os.path.expandvars(argument) for argument in shlex.split(text)]
    except ValueError as error:
        raise UsageError(f"cannot read --ssh {text!r}: {error}") from error
    if not arguments:
        raise UsageError("--ssh names no command; leave it out, or write e.g. --ssh 'ssh -p 2222'")
    return arguments


def is_local(name: str) -> bool:
    """Whether a name means whichever machine uses it, so that other hosts can't reach this one by it."""
    bare = name.rpartition("@")[2]
    if bare.lower() in _LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(bare.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _hostfile_line(fields: list[str], where: str) -> HostSlots:
    host = _one(fields[0], where)
    for field in fields[1:]:
        key, _, value = field.partition("=")
        if key in ("slots", "cpu", "count") and host.slots is None:
            host = replace(host, slots=_number(value, field, where))
        elif key in ("max_slots", "max-slots", "cpu_max", "count_max"):
            _number(value, field, where)  # how far Open MPI may exceed the slots, which is never requested
        else:
            raise UsageError(f"cannot read {field!r} {where}; write e.g. node1 slots=4")
    return host


def _one(text: str, where: str) -> HostSlots:
    """Parse one host."""
    found = _HOST.fullmatch(text)
    if found is None or (found["ipv6"] and not _is_ipv6(found["ipv6"])):
        raise UsageError(f"cannot read {text!r} {where}; {_HOW if '--hosts' in where else _HOW_IN_FILE}")
    slots = found["slots"]
    return HostSlots(
        name=(found["user"] or "") + (found["name"] or found["ipv6"]),
        slots=None if slots is None else _number(slots, text, where),
    )


def _number(text: str, whole: str, where: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= MOST_SLOTS:
        raise UsageError(
            f"cannot read the number of ranks in {whole!r} {where}; it must be 1 to {MOST_SLOTS}; leave out "
            "hosts without ranks"
        )
    return int(text)


def _is_ipv6(text: str) -> bool:
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        return False
    # ssh substitutes the name in commands of its configuration (ProxyCommand ... %h), which a shell runs.
    return address.scope_id is None or re.fullmatch(_NAME, address.scope_id) is not None


def _gathered(found: Iterable[HostSlots], what: str) -> tuple[HostSlots, ...]:
    """Return each host once, in the order of its first mention."""
    mentions = list(found)
    times = Counter(host.name for host in mentions)
    slots: dict[str, int | None] = {}
    for host in mentions:
        one = host.slots if times[host.name] == 1 else host.slots or 1
        before = slots.get(host.name)
        slots[host.name] = one if before is None else before + (one or 0)
    local = [name for name in slots if is_local(name)]
    if local and len(slots) > 1:
        raise UsageError(
            f"{what} names {local[0]} beside other hosts, which can't reach it by that name; give this machine's name"
        )
    for name, count in slots.items():
        if (count or 0) > MOST_SLOTS:
            raise UsageError(f"a node can have 1 to {MOST_SLOTS} ranks, not {count} ({name})")
    return tuple(HostSlots(name=name, slots=count) for name, count in slots.items())
