"""Keep a rank alive when its mpiexec dies.

Covers: Open MPI 5, whose ranks are connected to mpiexec by PMIx.
Does not cover: other MPIs, whose mpiexec ends its ranks with it.

PMIx reports the lost connection as an event. Open MPI has registered a default handler for all events, which aborts
the process in its next call of MPI, although ranks reach each other without mpiexec. A handler of that one event comes
before default handlers and may end the chain (PMIx Standard 4.1, section 9.1).
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

_LOST_CONNECTION = -61  # PMIX_ERR_LOST_CONNECTION
_ACTION_COMPLETE = -334  # PMIX_EVENT_ACTION_COMPLETE: no further handler is called

_Done = ctypes.CFUNCTYPE(
    None, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)
_Handler = ctypes.CFUNCTYPE(
    *(None, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p),  # it returns nothing; its number, the event, the source
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t),  # information, results of other handlers
    *(_Done, ctypes.c_void_p),  # to be called once it is handled
)


def _complete(*arguments: Any) -> None:
    done, data = arguments[-2:]
    done(_ACTION_COMPLETE, None, 0, None, None, data)


_on_lost_connection = _Handler(_complete)  # PMIx calls it on its own thread as long as the process lives


def outlive_mpiexec() -> None:
    """Have MPI continue among the ranks when mpiexec has died; call it after MPI_Init; does nothing without PMIx."""
    try:
        register = ctypes.CDLL("libpmix.so.2", mode=os.RTLD_NOLOAD | os.RTLD_LOCAL).PMIx_Register_event_handler
    except (OSError, AttributeError):
        return  # an MPI that does not use PMIx, or has it within its own library
    register.argtypes = (
        *(ctypes.POINTER(ctypes.c_int), ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t),
        *(_Handler, ctypes.c_void_p, ctypes.c_void_p),
    )
    register(ctypes.byref(ctypes.c_int(_LOST_CONNECTION)), 1, None, 0, _on_lost_connection, None, None)
