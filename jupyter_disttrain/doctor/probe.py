"""Run another Python process or command, and read its output.

Covers: running a few lines that print JSON; a command that fails, hangs or does not exist.
Does not cover: the code that is run (``versions``, ``gpus``, ``ranks``).
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from ..commands import run_command
from ..protocol.time_limits import TIMEOUT_SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_TORCH = """
import json, torch, torch.distributed as dist
from jupyter_disttrain.config.frameworks import accelerator_of
nccl = dist.is_available() and dist.is_nccl_available()
print(json.dumps({
    "cuda_build": torch.version.cuda or getattr(torch.version, "hip", None),
    "cuda_available": torch.cuda.is_available(),
    "gpus": torch.cuda.device_count(),
    "accelerator": accelerator_of(torch),
    "gloo": dist.is_available() and dist.is_gloo_available(),
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
}))
"""


class ProbeError(Exception):
    """A command failed; the message is its last line on stderr, or how it ended."""


def run(
    command: Sequence[str], environment: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_SECONDS
) -> str:
    """Run a command and return its output.

    Raises
    ------
    ProbeError
        If it can't be started, takes longer than ``timeout_s`` or ends with another status than 0.
    """
    try:
        done = run_command(command, timeout_s, environment)
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no reply within {timeout_s:.0f} s") from None
    except OSError as failure:
        raise ProbeError(failure.strerror or str(failure)) from None
    if done.returncode:
        raise ProbeError(last_line(done.stderr) or last_line(done.stdout) or f"exit status {done.returncode}")
    return done.stdout


def last_line(text: str) -> str:
    """Return the last line with a letter or digit: of a traceback, the error.

    Lines of dashes, as mpiexec prints them, are skipped.
    """
    lines = [line.strip() for line in text.splitlines()]
    return next((line for line in reversed(lines) if any(char.isalnum() for char in line)), "")


def ask_python(code: str) -> Any:
    """Run code in a fresh interpreter of this environment and return the JSON it prints last."""
    return json.loads(last_line(run([sys.executable, "-c", code])))


@functools.cache
def ask_torch() -> dict[str, Any]:
    """Return torch's build and the devices it finds; cached, since importing torch takes seconds."""
    answer: dict[str, Any] = ask_python(_TORCH)
    return answer
