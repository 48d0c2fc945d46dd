"""Register the magics in a shell, and remove them.

Covers: the settings, the clusters of the notebook, the magics of every subject, input transformers, completion.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from ..protocol.environment import IPYTHON_PROFILE
from .cell_completion import CellIntrospection
from .debug_requests import DebugRequests
from .magics.arguments import PARSERS, complete_options
from .magics.cell_magics import CellMagics
from .magics.cluster_magics import ClusterMagics
from .magics.clusters import Clusters
from .magics.file_magics import FileMagics
from .magics.script_magics import RankScriptMagics
from .magics.settings import DistributedMagics
from .output.displays import watch_cells

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

MAGICS = (ClusterMagics, CellMagics, RankScriptMagics, FileMagics)
_ATTRIBUTE = "_disttrain"  # of the shell
_NAMES_OF_RANKS = ("rank", "world_size", "local_rank", "device", "dist", "comm", "log_metrics")


def load(shell: InteractiveShell) -> None:
    """Register the magics, once."""
    if hasattr(shell, _ATTRIBUTE):
        return
    if shell.profile_dir is not None:
        os.environ[IPYTHON_PROFILE] = str(shell.profile_dir.location)  # ranks load it, too
    setattr(shell, _ATTRIBUTE, Extension(shell))


def unload(shell: InteractiveShell) -> None:
    """End the clusters and remove the magics."""
    extension = getattr(shell, _ATTRIBUTE, None)
    if extension is not None:
        extension.close()
        delattr(shell, _ATTRIBUTE)


class Extension:
    """The parts of this extension in one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self.settings = DistributedMagics(parent=shell)
        self.clusters = Clusters(shell, self.settings)
        self._magics = [kind(shell, self.clusters) for kind in MAGICS]
        watch_cells(shell)
        self._introspection = CellIntrospection(shell, self.clusters)
        self._debug_requests = DebugRequests(shell, self.clusters) if hasattr(shell, "kernel") else None
        shell.events.register("post_run_cell", self._explain)
        shell.register_magics(*self._magics)
        shell.configurables.append(self.settings)  # type: ignore[arg-type]  # IPython's list is typed too narrowly
        for name in PARSERS:
            for prefix in ("%%", "%"):
                shell.set_hook("complete_command", complete_options, str_key=f"{prefix}{name}")

    def _explain(self, result: ExecutionResult) -> None:
        """Explain why a cell in the notebook does not find a name that every rank has."""
        error = result.error_in_exec
        if isinstance(error, NameError) and error.name in _NAMES_OF_RANKS and self.clusters.open:
            sys.stderr.write(f"{error.name!r} exists on the ranks; begin the cell with %%distributed to run it there\n")

    def close(self) -> None:
        """End the clusters and remove the magics."""
        self._shell.events.unregister("post_run_cell", self._explain)
        self._introspection.remove()
        if self._debug_requests is not None:
            self._debug_requests.remove()
        self.clusters.close()
        self.clusters.transformers.remove()
        for magics in self._magics:
            for kind, names in magics.magics.items():
                for name in names:
                    self._shell.magics_manager.magics[kind].pop(name, None)
            self._shell.magics_manager.registry.pop(type(magics).__name__, None)
        for configurable in (*self._magics, self.settings):  # IPython has added the magics
            self._shell.configurables.remove(configurable)  # type: ignore[arg-type]  # as above
