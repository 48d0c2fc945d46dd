"""Define the notebook's side: magics, output, completion.

Imports ``client`` and IPython; only the package itself imports it, when the extension is loaded.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_ATTRIBUTE = "_disttrain"  # of the shell


def load(shell: InteractiveShell) -> None:
    """Register the magics, once."""
    from ..protocol.environment import IPYTHON_PROFILE  # noqa: PLC0415
    from .extension import Extension  # noqa: PLC0415

    if hasattr(shell, _ATTRIBUTE):
        return
    if shell.profile_dir is not None:
        os.environ[IPYTHON_PROFILE] = str(shell.profile_dir.location)  # ranks load it, too
    setattr(shell, _ATTRIBUTE, Extension(shell))


def unload(shell: InteractiveShell) -> None:
    """End the clusters and remove the magics."""
    extension = getattr(shell, _ATTRIBUTE, None)
    if extension is None:
        return
    extension.close()
    delattr(shell, _ATTRIBUTE)
