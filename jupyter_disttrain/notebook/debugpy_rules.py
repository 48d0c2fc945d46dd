"""Keep debugpy, which debugs the notebook's own process, from this package's code, threads and processes.

Does not cover: the debugger of ranks (``debug_requests``).
"""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path
from typing import Any

_INTERNAL = ("jupyter_disttrain", "ipyparallel")


def leave_processes_alone() -> None:
    """Have debugpy not start the processes of this notebook under a debugger of their own: ranks would not start."""
    debugpy = importlib.import_module("debugpy")
    debugpy.configure(subProcess=False)  # if it starts later
    patches = sys.modules.get("_pydev_bundle.pydev_monkey")
    if patches is not None:  # if it has started
        patches._get_apply_arg_patching = lambda: False  # type: ignore[attr-defined]  # noqa: SLF001


def hide_internals(kernel: Any) -> None:
    """Have debugpy leave this package's code and threads alone, as ipykernel does with its own."""
    folders = tuple(str(Path(sys.modules[name].__file__ or "").parent) for name in _INTERNAL if name in sys.modules)
    files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    rules = kernel.debugger.kernel_modules
    rules += [file for file in files if file.startswith(folders) and file not in rules]
    hide_threads()


def hide_threads() -> None:
    """Have debugpy never stop the threads of this package that exist now: they serve the ranks."""
    for thread in threading.enumerate():
        if thread.name.startswith("disttrain"):
            thread.pydev_do_not_trace = thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
