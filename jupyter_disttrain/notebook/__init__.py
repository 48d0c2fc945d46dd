"""Define the notebook's side: magics, output, completion.

Imports ``client`` and IPython; only the package itself imports it, when the extension is loaded.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_ATTRIBUTE = "_disttrain_magics"


def load(shell: InteractiveShell) -> None:
    """Register the magics, once."""
    from ..protocol.environment import IPYTHON_PROFILE  # noqa: PLC0415
    from .magics.cluster_magics import DistributedMagics  # noqa: PLC0415

    if hasattr(shell, _ATTRIBUTE):
        return
    if shell.profile_dir is not None:
        os.environ[IPYTHON_PROFILE] = str(shell.profile_dir.location)  # ranks load it, too
    magics = DistributedMagics(shell=shell, parent=shell)
    shell.register_magics(magics)
    shell.configurables.append(magics)  # type: ignore[arg-type]  # IPython's list is typed too narrowly
    setattr(shell, _ATTRIBUTE, magics)
    magics.transformers.install()
    from .magics.completion import install  # noqa: PLC0415

    install(shell)


def unload(shell: InteractiveShell) -> None:
    """End the clusters and remove the magics."""
    magics = getattr(shell, _ATTRIBUTE, None)
    if magics is None:
        return
    magics.shutdown_all()
    magics.transformers.remove()
    magics.views.close()
    for kind, names in magics.magics.items():
        for name in names:
            shell.magics_manager.magics[kind].pop(name, None)
    shell.configurables.remove(magics)
    delattr(shell, _ATTRIBUTE)
