"""The lab for tests: hosts, and Slurm over them, for a whole session.

Covers: the fixtures ``lab``, ``breakable``, ``slurm`` and ``batch``.
Does not cover: leftovers after all tests (``tests.support.leftovers``).
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from .lab import Lab

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .slurm import Slurm

HOSTS = 3
FOR_HOSTS = ("ip", "ss", "nft", "sshd", "ssh", "ssh-keygen", "unshare", "nsenter")
FOR_SLURM = ("munged", "slurmctld", "slurmd", "sbatch", "srun")


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """Start three hosts, shared by all tests that do not break them."""
    if os.geteuid() != 0:
        pytest.skip("the hosts of the lab are made of namespaces, which takes root")
    _need(FOR_HOSTS)
    with Lab(HOSTS) as lab:
        yield lab
        left = {host: found for host in [*lab.hosts, "head"] if (found := lab.left_on(host))}
        assert not left, f"left on the hosts of the lab: {left}"


@pytest.fixture
def breakable(lab: Lab) -> Iterator[Lab]:
    """Lend the same hosts to a test that cuts, kills, closes or fills them, and restore them after it."""
    yield lab
    lab.restore()


@pytest.fixture(scope="session")
def slurm(lab: Lab) -> Slurm:
    """Start Slurm over the three hosts."""
    _need(FOR_SLURM)
    return lab.start_slurm()


def _need(programs: tuple[str, ...]) -> None:
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"the lab needs {', '.join(missing)}; scripts/test.sh names the packages and installs them as root")


@pytest.fixture
def batch(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """Slurm, checked for leftovers at the end."""
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    yield slurm
    left = [line for line in slurm.run("squeue", "-h", "-o", "%j %T").splitlines() if "disttrain-" in line]
    slurm.cancel_all()
    assert not left
