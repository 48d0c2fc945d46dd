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

NOT_FOUND, NOT_RUNNABLE = 127, 126  # exit codes of a shell for a command
OF_SSH = 255  # exit code of ssh for its own failures
_LONGEST = 300  # characters of ssh's output in a message
_NO_LOGIN = "account is currently not available"  # printed by nologin
_GIVEN, _BARE = "%n", "%h"  # the host as the user wrote it, and without the user name: tokens of ssh
_LOGIN = re.compile(r"(\S+)@\S+(?=: Permission denied)")  # contains the host as ~/.ssh/config names it


def explain(report: HostReport, ssh: Sequence[str], wanted: HostRequirements) -> tuple[str, str]:
    """Return the problem with a host that could not be queried, and the remedy.

    Neither contains the host's name, so that the same problem of several hosts is reported once: :func:`fill_in` adds
    it.
    """
    raw, output = report.failure, _without(report.name, report.failure)
    if _NO_LOGIN in raw:
        return (
            f"ssh works, but this user has no shell there ({_last(raw, [_NO_LOGIN])})",
            "name another user (USER@HOST), or set a login shell for this one there (chsh)",
        )
    if report.exit_code in (NOT_FOUND, NOT_RUNNABLE):
        return (
            f"ssh works, but {wanted.python} can't be run there ({_last(output, [])})",
            "install the same environment at that path, or put it into a folder that all hosts share",
        )
    for phrases, problem, remedy in _KNOWN:
        if report.exit_code in (OF_SSH, None) and any(phrase in raw for phrase in phrases):
            line = _without(report.name, _last(raw, phrases))
            return f"{problem} ({line})", remedy.format(ssh=" ".join(ssh), python=wanted.python)
    if "this is Python" in raw:
        version = _last(raw, ["this is Python"]).removeprefix("this is ")
        return (
            f"{wanted.python} is {version} there, here it is {wanted.python_version}",
            "install the same environment on all hosts",
        )
    by_hand = f"run it in a terminal: {' '.join(ssh)} {_GIVEN} {wanted.python} --version"
    if report.exit_code is None:
        return (
            f"no reply within {wanted.limit_s:g} s{_so_far(output)}",
            f"{by_hand}; a file system that hangs is another possible cause",
        )
    return (
        f"{wanted.python} failed over ssh with exit code {report.exit_code}{_so_far(output, ' and printed nothing')}",
        by_hand,
    )


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


def _so_far(output: str, nothing: str = "") -> str:
    return nothing if output == SILENT else f"; its last output: {_last(output, [])}"


# Phrases of ssh's output with the problem and the remedy; the first match counts.
_KNOWN: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("Could not resolve hostname",),
        "there is no host of this name",
        "correct the name, or give its address; ssh looks names up in /etc/hosts, DNS and ~/.ssh/config",
    ),
    (
        ("Connection refused",),
        "the ssh port there refuses connections",
        "start sshd there (systemctl start ssh), or name its other port in ~/.ssh/config",
    ),
    (
        ("No route to host", "Network is unreachable", "Connection timed out", "Operation timed out"),
        "can't be reached",
        "check that the host is on, that this machine can reach its network, and that no firewall drops ssh's port",
    ),
    (
        ("REMOTE HOST IDENTIFICATION HAS CHANGED", "host key for", "HOST IDENTIFICATION"),
        "the host key has changed",
        "if the host was reinstalled, remove the old key (ssh-keygen -R %h); if not, this may be an attack",
    ),
    (
        ("Host key verification failed", "host key is known for"),
        "the host key is not known here",
        "log in once in a terminal and confirm the key: {ssh} %n",
    ),
    (
        ("Permission denied", "Too many authentication failures"),
        "ssh was denied without a password",
        "check the user name (else USER@HOST), and copy your key there (ssh-copy-id %n) or load it (ssh-add)",
    ),
    (
        ("kex_exchange_identification", "Connection closed by", "Connection reset by"),
        "sshd there closed the connection before the login",
        "check its log for the reason (journalctl -u ssh): often MaxStartups, a banned address, or no free memory",
    ),
    (
        ("Bad owner or permissions", "Bad configuration option"),
        "ssh refuses its configuration on this machine",
        "correct the file that it names",
    ),
)
