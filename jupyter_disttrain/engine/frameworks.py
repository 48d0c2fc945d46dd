"""Frameworks that a cell wants and this host has not, or has too old, or that can't be started again.

Covers: which version works with the ranks, how to get it; those that start once in a process.
Does not cover: the error itself (``cell_errors``).
"""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Framework:
    """One that runs on ranks."""

    distribution: str  # its name for pip
    least: tuple[int, ...]  # the oldest version that is known to work
    needs_torch: bool = True
    command: str = ""  # that installs it, where pip alone can't

    @property
    def remedy(self) -> str:
        """How to get it, in words; torch is named so that pip does not bring another one along."""
        if self.command:
            return self.command
        version = ".".join(map(str, self.least))
        torch = sys.modules.get("torch")
        also = f" torch=={torch.__version__.partition('+')[0]}" if self.needs_torch and torch is not None else ""
        return f"pip install '{self.distribution}>={version}'{also}"


FRAMEWORKS = {
    "accelerate": Framework("accelerate", (1, 0)),
    "deepspeed": Framework("deepspeed", (0, 15)),
    "horovod": Framework("horovod", (0, 28), command="jupyter disttrain horovod (builds and installs it, in minutes)"),
    "jax": Framework("jax", (0, 4, 30), needs_torch=False),
    "lightning": Framework("lightning", (2, 4)),
    "pytorch_lightning": Framework("pytorch-lightning", (2, 4)),
    "tensorflow": Framework("tensorflow", (2, 16), needs_torch=False),
    "transformers": Framework("transformers", (4, 46)),
}


class MissingFrameworkError(RuntimeError):
    """A person has asked for something that needs a framework which is not there."""


# What frameworks say that start once in a process, which ranks are for days.
_ONCE = {
    "jax.distributed.initialize() must be called before": "JAX starts once in a process",
    "jax.distributed.initialize should only be called once": "JAX starts once in a process",
    "Collective ops must be configured at program startup": "TensorFlow's collectives start once in a process",
}
_DIGITS = re.compile(r"\d+")


def hint(error: BaseException, text: str) -> str:
    """Return what a person can do about a framework that is missing, too old or started again; empty if nothing."""
    for said, why in _ONCE.items():
        if said in text:
            return f"{why}: go on with what is there, take %dist_run --fresh for a script, or begin with %dist_reset"
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or "").partition(".")[0]
        if name in FRAMEWORKS and not _is_installed(name):
            return f"on this rank's host: {FRAMEWORKS[name].remedy}"
        said = _say_old(name)  # it has no such part
        if said:
            return said
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for name in FRAMEWORKS:
            said = _say_old(name) if f"/{name}/" in frame.f_code.co_filename else ""
            if said:
                return said
    return ""


def _is_installed(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module without a spec, which somebody has put there
        return True
    return spec is not None and spec.origin is not None  # else it is a folder that happens to have this name


def _say_old(name: str) -> str:
    """Say so if a framework that was imported is older than what is known to work; empty if not."""
    framework, module = FRAMEWORKS.get(name), sys.modules.get(name)
    if framework is None or not _is_old(module, framework):
        return ""
    found = getattr(module, "__version__", "")
    return f"{framework.distribution} {found} is older than what is known to work; {framework.remedy}"


def check_tensorflow() -> None:
    """Raise a MissingFrameworkError where there is no TensorFlow that could read TF_CONFIG."""
    if importlib.util.find_spec("tensorflow") is None:
        raise MissingFrameworkError(
            f"TF_CONFIG was asked for, and there is no TensorFlow: {FRAMEWORKS['tensorflow'].remedy}, "
            "or leave --tf-config out"
        )


def _is_old(module: Any, framework: Framework) -> bool:
    version = getattr(module, "__version__", None)
    if not isinstance(version, str):
        return False
    found = tuple(int(part) for part in _DIGITS.findall(version)[:3])
    return found < framework.least
