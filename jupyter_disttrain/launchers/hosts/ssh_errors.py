"""Explain errors of ssh, and suggest remedies.

Covers: a host that could not be queried.
Does not cover: a host that replied (``preflight``).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .report import SILENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .report import HostReport, HostRequirements

    Problem = tuple[str, str]  # the problem, and its remedy

_LONGEST = 300  # characters of ssh's output in a message
_GIVEN, _BARE = "%n", "%h"  # the host as the user wrote it, and without the user name: tokens of ssh
_LOGIN = re.compile(r"(\S+)@\S+(?=: Permission denied)")  # contains the host as ~/.ssh/config names it


def explain(report: HostReport, ssh: Sequence[str], wanted: HostRequirements) -> tuple[str, str]:
    """Return the problem with a host that could not be queried, and the remedy.

    Neither contains the host's name, so that the same problem of several hosts is reported once: :func:`fill_in` adds
    it.
    """
    by_hand = f"run it in a terminal: {' '.join(ssh)} {_GIVEN} {wanted.python} --version"
    known = _KNOWN
    if report.exit_code in (255, None):  # ssh's own failures; None: it had to be killed
        known = _KNOWN | _OF_SSH
    elif report.exit_code in (126, 127):  # of a shell, for a command that it can't run or find
        known = _KNOWN | {("",): _OF_SHELL}
    for phrases, (problem, remedy) in known.items():
        if any(phrase in report.failure for phrase in phrases):
            line = _without(report.name, _last(report.failure, phrases)).removeprefix("this is ")
            words = {"ssh": " ".join(ssh), "python": wanted.python, "version": wanted.python_version}
            return problem.format(line=line, **words), remedy.format(**words)
    output = _without(report.name, _last(report.failure, []))
    so_far = "" if report.failure == SILENT else f"; its last output: {output}"
    if report.exit_code is None:
        hangs = f"{by_hand}; a file system that hangs is another possible cause"
        return f"no reply within {wanted.limit_s:g} s{so_far}", hangs
    so_far = so_far or " and printed nothing"
    return f"{wanted.python} failed over ssh with exit code {report.exit_code}{so_far}", by_hand


def fill_in(text: str, hosts: Sequence[str]) -> str:
    """Fill in the host's name, or ``HOST`` if there are several hosts."""
    (given, bare) = (hosts[0], hosts[0].rpartition("@")[2]) if len(hosts) == 1 else ("HOST", "HOST")
    return text.replace(_GIVEN, given).replace(_BARE, bare)


def _without(name: str, output: str) -> str:
    """Return ssh's output with the host's name replaced."""
    masked = _LOGIN.sub(rf"\1@{_BARE}", output)
    return re.sub(rf"(?<![\w.-]){re.escape(name.rpartition('@')[2])}(?![\w.-])", _BARE, masked)


def _last(output: str, phrases: Sequence[str]) -> str:
    """Return ssh's last line, preferring lines that contain one of the phrases."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    found = [line for line in lines if any(phrase in line for phrase in phrases)]
    return ([*lines, *found] or [""])[-1][:_LONGEST].removeprefix("ssh: ")


# Phrases of the output: the problem and the remedy; the first match counts. nologin prints the first.
_KNOWN: dict[tuple[str, ...], Problem] = {
    ("account is currently not available",): (
        "ssh works, but this user has no shell there ({line})",
        "name another user (USER@HOST), or set a login shell for this one there (chsh)",
    ),
    ("this is Python",): (
        "{python} is {line} there, here it is {version}",
        "install the same environment on all hosts",
    ),
}
_OF_SSH: dict[tuple[str, ...], Problem] = {
    ("Could not resolve hostname",): (
        "there is no host of this name ({line})",
        "correct the name, or give its address; ssh looks names up in /etc/hosts, DNS and ~/.ssh/config",
    ),
    ("Connection refused",): (
        "the ssh port there refuses connections ({line})",
        "start sshd there (systemctl start ssh), or name its other port in ~/.ssh/config",
    ),
    ("No route to host", "Network is unreachable", "Connection timed out", "Operation timed out"): (
        "can't be reached ({line})",
        "check that the host is on, that this machine can reach its network, and that no firewall drops ssh's port",
    ),
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "host key for", "HOST IDENTIFICATION"): (
        "the host key has changed ({line})",
        "if the host was reinstalled, remove the old key (ssh-keygen -R %h); if not, this may be an attack",
    ),
    ("Host key verification failed", "host key is known for"): (
        "the host key is not known here ({line})",
        "log in once in a terminal and confirm the key: {ssh} %n",
    ),
    ("Permission denied", "Too many authentication failures"): (
        "ssh was denied without a password ({line})",
        "check the user name (else USER@HOST), and copy your key there (ssh-copy-id %n) or load it (ssh-add)",
    ),
    ("kex_exchange_identification", "Connection closed by", "Connection reset by"): (
        "sshd there closed the connection before the login ({line})",
        "check its log for the reason (journalctl -u ssh): often MaxStartups, a banned address, or no free memory",
    ),
    ("Bad owner or permissions", "Bad configuration option"): (
        "ssh refuses its configuration on this machine ({line})",
        "correct the file that it names",
    ),
}
_OF_SHELL = (
    "ssh works, but {python} can't be run there ({line})",
    "install the same environment at that path, or put it into a folder that all hosts share",
)
