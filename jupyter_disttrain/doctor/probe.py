"""Run another Python process or command, and read its output.

Covers: a command that fails, hangs or does not exist; what torch is built for and finds.
Does not cover: the programs of the other checks (``ranks``).
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from ..protocol.time_limits import TIMEOUT_SECONDS
from ..run_command import run_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_TORCH = """
import json, torch, torch.distributed as dist
from jupyter_disttrain.config.frameworks import accelerator_of
nccl = dist.is_available() and dist.is_nccl_available()
print(json.dumps({
    "accelerator": accelerator_of(torch),
    "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,  # NVML counts those of an old driver, too
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

    Raises a ProbeError if it can't be started, takes longer than ``timeout_s`` or ends with another status than 0.
    """
    try:
        done = run_command(command, timeout_s, environment)
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no reply within {timeout_s:.0f} s") from None
    except OSError as failure:
        raise ProbeError(failure.strerror or str(failure)) from None
    if done.returncode:
        raise ProbeError(_last_line(done.stderr) or _last_line(done.stdout) or f"exit status {done.returncode}")
    return done.stdout


def _last_line(text: str) -> str:
    """Return the last line with a letter or digit: of a traceback, the error; mpiexec ends with a line of dashes."""
    lines = [line.strip() for line in text.splitlines()]
    return next((line for line in reversed(lines) if any(char.isalnum() for char in line)), "")


@functools.cache
def torch_build() -> dict[str, Any]:
    """Return torch's build and the devices it finds; cached, since importing torch takes seconds.

    Raises a ProbeError if torch does not load.
    """
    try:
        build: dict[str, Any] = json.loads(_last_line(run([sys.executable, "-c", _TORCH])))
    except ProbeError as failure:
        raise ProbeError(f"torch does not load: {failure}") from None
    return build
