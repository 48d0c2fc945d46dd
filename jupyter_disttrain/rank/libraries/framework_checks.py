"""Give advice on frameworks that are missing, too old, or can't be started again in a process.

Covers: the versions that work with the ranks, how to install them; frameworks that start once per process.
Does not cover: the error itself (``rank.kernel.cell_errors``).
"""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework that runs on ranks."""

    distribution: str  # its name for pip
    least: tuple[int, ...]  # the oldest version known to work
    needs_torch: bool = True
    command: str = ""  # the command that installs it, if pip alone can't

    @property
    def remedy(self) -> str:
        """The command that installs it; it pins torch so that pip does not install another version."""
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
    """The user requested a feature whose framework is not installed."""


# Messages of frameworks that start once per process; a rank's process runs for days.
_ONCE = {
    "jax.distributed.initialize() must be called before": "JAX starts only once per process",
    "jax.distributed.initialize should only be called once": "JAX starts only once per process",
    "Collective ops must be configured at program startup": "TensorFlow's collectives start only once per process",
}
_DIGITS = re.compile(r"\d+")


def hint(error: BaseException, text: str) -> str:
    """Return advice on a framework that is missing, too old or started twice; empty if the error is not about one."""
    for advice, why in _ONCE.items():
        if advice in text:
            return f"{why}: continue with the running one, use %dist_run for a script, or run %dist_reset"
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or "").partition(".")[0]
        if name in FRAMEWORKS and not _is_installed(name):
            return f"on this rank's host: {FRAMEWORKS[name].remedy}"
        advice = _too_old(name)  # an installed framework lacks the module
        if advice:
            return advice
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for name in FRAMEWORKS:
            advice = _too_old(name) if f"/{name}/" in frame.f_code.co_filename else ""
            if advice:
                return advice
    return ""


def _is_installed(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module without a spec in sys.modules
        return True
    return spec is not None and spec.origin is not None  # without origin it is only a folder of this name


def _too_old(name: str) -> str:
    """Return advice if an imported framework is older than the versions known to work; empty if not."""
    framework, version = FRAMEWORKS.get(name), getattr(sys.modules.get(name), "__version__", None)
    if framework is None or not isinstance(version, str):
        return ""
    if tuple(int(part) for part in _DIGITS.findall(version)[:3]) >= framework.least:
        return ""
    return f"{framework.distribution} {version} is older than the versions known to work; {framework.remedy}"


def check_tensorflow() -> None:
    """Raise a MissingFrameworkError if TensorFlow, which reads TF_CONFIG, is not installed."""
    if importlib.util.find_spec("tensorflow") is None:
        raise MissingFrameworkError(
            f"TF_CONFIG was requested, but TensorFlow is not installed: {FRAMEWORKS['tensorflow'].remedy}, "
            "or leave --tf-config out"
        )
