"""Find environment variables that name network interfaces which this host does not have.

Covers: the variables by which Gloo, NCCL and TensorPipe choose an interface.
Does not cover: choosing one (``launchers.hosts.network``, ``startup_args``).
"""

from __future__ import annotations

import os
import socket

import psutil

from .startup_args import INTERFACE_VARIABLES

NCCL = "NCCL_SOCKET_IFNAME"  # takes prefixes of names; "=" before complete names, "^" before names to exclude


def wrong_interfaces() -> str:
    """Return a message about variables that name no interface of this host; empty if all are right."""
    there = psutil.net_if_addrs()
    wrong = [f"{name}={value}" for name in INTERFACE_VARIABLES if (value := _missing(name, list(there)))]
    if not wrong:
        return ""
    found = ", ".join(
        f"{name} ({', '.join(each.address for each in addresses if each.family == socket.AF_INET) or 'no IPv4'})"
        for name, addresses in there.items()
    )
    names = " and ".join(wrong)
    verb = "names" if len(wrong) == 1 else "name"
    return f"{names} {verb} no network interface of {socket.gethostname()}, which has {found}; set or unset it before"


def _missing(variable: str, there: list[str]) -> str:
    """Return a variable's value if this host lacks the interfaces that it names; else an empty string."""
    value = os.environ.get(variable, "")
    if not value or value.startswith("^"):
        return ""
    names = value.removeprefix("=").split(",")
    if variable == NCCL and not value.startswith("="):
        has_one = any(each.startswith(tuple(names)) for each in there)
    elif variable == NCCL:
        has_one = any(name in there for name in names)
    else:
        has_one = all(name in there for name in names)  # Gloo listens on each of them
    return "" if has_one else value
