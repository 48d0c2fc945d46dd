"""Have Linux show a forked process with its own command line and environment, in ``ps`` and in /proc.

A fork shows those of the warm process. Where Linux does not allow the change, this continues to be so.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

from ...process_table import stat_fields

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_FIRST = 3  # the number, in proc(5), of the first of ``stat_fields``
_PLACES = (26, 27, 45, 46, 47)  # start_code, end_code, start_data, end_data and start_brk in proc(5)
_START_STACK = 28


class _Map(ctypes.Structure):
    """``struct prctl_mm_map`` of linux/prctl.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk")),
        *((name, ctypes.c_uint64) for name in ("start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv")),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


def show(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Show these arguments and these environment variables for this process."""
    argument_data = _packed(arguments)
    data = argument_data + _packed([f"{name}={value}" for name, value in environment.items()])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype, libc.sbrk.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t]
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    # Linux shows only private memory of no file. It is never freed, as Python's is before the process ends.
    start = libc.malloc(len(data))
    ctypes.memmove(start, data, len(data))
    fields = stat_fields(os.getpid())
    if not fields:
        return
    code_start, code_end, data_start, data_end, brk_start = (int(fields[place - _FIRST]) for place in _PLACES)
    shown = _Map(
        *(code_start, code_end, data_start, data_end, brk_start, libc.sbrk(0) or 0, int(fields[_START_STACK - _FIRST])),
        *(start, start + len(argument_data), start + len(argument_data), start + len(data), 0),
        auxv_size=0,
        exe_fd=2**32 - 1,
    )
    libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(shown), ctypes.sizeof(shown), 0)


def _packed(texts: Sequence[str]) -> bytes:
    return b"".join(text.encode("utf-8", "surrogateescape") + b"\0" for text in texts)
