"""Define and recognize errors of process groups and communicators.

Covers: the errors of a rank that was released, and of a group that can't be made; whether an error comes from a group
that is no longer usable.
Does not cover: reporting it in the reply (``rank.kernel.cell_errors``), releasing ranks (``group``).
"""

from __future__ import annotations

import re
import signal
import sys

from ..kernel.error_chain import chain

# Python calls its handler on the main thread before a GPU's groups are aborted; the signal is never sent to a process.
RELEASE_SIGNAL = signal.SIGRTMAX - 5


class ReleasedError(RuntimeError):
    """A rank waited for others that did not join it, and was released."""


class RendezvousError(RuntimeError):
    """The process group could not be made."""


_OF_A_GROUP = re.compile(r"gloo/|Connection (was likely )?closed|Connection reset|Socket|NCCL|ProcessGroup|c10d")
_OF_MPI = re.compile(r"MPI_ERR_(REVOKED|PROC_FAILED|PROC_FAILED_PENDING|OTHER)\b")


def is_of_group(error: BaseException) -> bool:
    """Whether this error, or one that led to it, comes from a process group or communicator that is unusable now."""
    dist, mpi = sys.modules.get("torch.distributed"), sys.modules.get("mpi4py.MPI")
    horovod = sys.modules.get("horovod.common.exceptions")
    for link in chain(error):
        if isinstance(link, ReleasedError) or (dist is not None and isinstance(link, dist.DistError)):
            return True
        if type(link) is RuntimeError and _OF_A_GROUP.search(str(link)):
            return True
        if horovod is not None and isinstance(link, horovod.HorovodInternalError):
            return True
        if mpi is not None and isinstance(link, mpi.Exception) and _OF_MPI.search(str(link)):
            return True
    return False
