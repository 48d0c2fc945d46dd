"""Give advice on frameworks that are missing, too old, or can't be started again in a process.

Covers: the versions that work with the ranks, how to install them; frameworks that start once per process.
Does not cover: the error itself (``rank.kernel.cell_errors``).
"""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback

OLDEST = {  # versions known to work, by the module's name
    "accelerate": (1, 0),
    "deepspeed": (0, 15),
    "horovod": (0, 28),
    "jax": (0, 4, 30),
    "lightning": (2, 4),
    "pytorch_lightning": (2, 4),
    "tensorflow": (2, 16),
    "transformers": (4, 46),
}
_WITHOUT_TORCH = ("jax", "tensorflow")


class MissingFrameworkError(RuntimeError):
    """The user requested a feature whose framework is not installed."""


# Messages of frameworks that start once per process; a rank's process runs for days.
_ONCE = {
    "jax.distributed.initialize() must be called before": "JAX starts only once per process",
    "jax.distributed.initialize should only be called once": "JAX starts only once per process",
    "Collective ops must be configured at program startup": "TensorFlow's collectives start only once per process",
}
_DIGITS = re.compile(r"\d+")


def _remedy(name: str) -> str:
    """Return the command that installs a framework; it pins torch so that pip does not install another version."""
    if name == "horovod":
        return "jupyter disttrain horovod (builds and installs it, in minutes)"
    version = ".".join(map(str, OLDEST[name]))
    torch = None if name in _WITHOUT_TORCH else sys.modules.get("torch")
    also = "" if torch is None else f" torch=={torch.__version__.partition('+')[0]}"
    return f"pip install '{_distribution(name)}>={version}'{also}"


def _distribution(name: str) -> str:
    """Return a framework's name for pip."""
    return name.replace("_", "-")


def hint(error: BaseException, text: str) -> str:
    """Return advice on a framework that is missing, too old or started twice; empty if the error is not about one."""
    for advice, why in _ONCE.items():
        if advice in text:
            return f"{why}: continue with the running one, use %dist_run for a script, or run %dist_reset"
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or "").partition(".")[0]
        if name in OLDEST and not _is_installed(name):
            return f"on this rank's host: {_remedy(name)}"
        if advice := _too_old(name):  # an installed framework lacks the module
            return advice
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for name in OLDEST:
            if f"/{name}/" in frame.f_code.co_filename and (advice := _too_old(name)):
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
    version = getattr(sys.modules.get(name), "__version__", None)
    if name not in OLDEST or not isinstance(version, str):
        return ""
    if tuple(int(part) for part in _DIGITS.findall(version)[:3]) >= OLDEST[name]:
        return ""
    return f"{_distribution(name)} {version} is older than the versions known to work; {_remedy(name)}"


def check_tensorflow() -> None:
    """Raise a MissingFrameworkError if TensorFlow, which reads TF_CONFIG, is not installed."""
    if importlib.util.find_spec("tensorflow") is None:
        raise MissingFrameworkError(
            f"TF_CONFIG was requested, but TensorFlow is not installed: {_remedy('tensorflow')}, "
            "or leave --tf-config out"
        )
