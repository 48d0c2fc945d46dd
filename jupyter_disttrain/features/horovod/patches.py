"""Patch Horovod's source before it is built.

Covers: the end of Horovod's thread on each rank once a rank has died.
Does not cover: the build (``build``).

- A rank whose thread gets the error of the death ends its thread, and a rank that waited for a message of that one
  waited forever: nothing notified it. So a thread that ends because of an error revokes its communicators, where
  MPI supports that (MPI Forum's User-Level Failure Mitigation, in Open MPI from 5 on).
- Where process sets were added, all others aborted: at its end the thread agrees with all ranks on removing each set,
  and the exception when this fails was not caught.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import DisttrainError

if TYPE_CHECKING:
    from pathlib import Path

EDITION = 1  # number of the version of PATCHES: a wheel with another is not used


class HorovodBuildError(DisttrainError):
    """Horovod can't be built or installed here."""


PATCHES = (  # each a file in horovod/common, its text at one place, and what replaces that
    (
        "operations.cc",
        '#include "mpi.h"\n',
        """#include "mpi.h"
#if __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif
""",
    ),
    (
        "operations.cc",
        """        << "Horovod background loop uncaught exception: " << ex.what();
""",
        """        << "Horovod background loop uncaught exception: " << ex.what();
#if HAVE_MPI && defined(OMPI_HAVE_MPI_EXT_FTMPI)
    if (state.control_operation == LibType::MPI) {
      for (auto id : state.process_set_table.Ids()) {
        const auto& context = state.process_set_table.Get(id).mpi_context;
        for (auto which : {Communicator::GLOBAL, Communicator::LOCAL, Communicator::CROSS}) {
          MPI_Comm comm = context.GetMPICommunicator(which);
          if (comm != MPI_COMM_NULL) {
            MPIX_Comm_revoke(comm);
          }
        }
      }
    }
#endif
""",
    ),
    (
        "process_set.cc",
        """      InitializeRegisteredAndRemoveMarkedIfReady_(context, status);
      if (ProcessSetHasJustBeenRemoved()) {""",
        """      try {
        InitializeRegisteredAndRemoveMarkedIfReady_(context, status);
      } catch (const std::exception&) {
        id_to_process_set_[id].Finalize(status);
        DeregisterProcessSet(id);
        id_to_be_removed_ = SUCCESSFUL_REMOVAL;
      }
      if (ProcessSetHasJustBeenRemoved()) {""",
    ),
)


def patch(source: Path) -> None:
    """Patch the source that lies unpacked in a folder; raises ``HorovodBuildError`` if it is not the known one."""
    for file, old, new in PATCHES:
        path = source / "horovod" / "common" / file
        code = path.read_text()
        if code.count(old) != 1:
            raise HorovodBuildError(f"the source in {source.name} is not the expected version: {file} differs")
        path.write_text(code.replace(old, new))
