"""Build the JupyterLab extension for sdists and wheels; called by hatch-jupyter-builder (pyproject.toml).

From a checkout the extension is built for every sdist and wheel, so that none contains an outdated one. An sdist
contains the built files, so that a wheel made from it does not need Node.js. A wheel from a checkout without Node.js
has no extension; everything but the buttons and the panel works without it. An editable install never builds the
extension: ``make labextension`` does.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from hatch_jupyter_builder import npm_builder

log = logging.getLogger(__name__)

# Relative to the project's root, where build front ends run a hook.
BUILT = Path("jupyter_disttrain/labextension/package.json")
IN_SDIST = Path("PKG-INFO")


def build_labextension(target_name: str, version: str) -> None:
    """Build the extension if this target needs it.

    Parameters
    ----------
    target_name
        ``"sdist"`` or ``"wheel"``.
    version
        ``"standard"`` or ``"editable"``.

    Raises
    ------
    RuntimeError
        If the target is an sdist and Node.js is missing.
    subprocess.CalledProcessError
        If the build fails.
    """
    if IN_SDIST.exists():
        return
    if version == "standard" and has_node():
        npm_builder(target_name, version, path="labextension", build_cmd="build:prod", npm=["jlpm"])
    elif target_name == "sdist":
        raise RuntimeError("an sdist contains the built JupyterLab extension; install Node.js 20 or newer to build it")
    elif BUILT.exists():
        log.warning("Node.js is missing: the JupyterLab extension is installed as it was last built")
    else:
        log.warning("Node.js is missing: the JupyterLab extension is left out; 'make labextension' builds it with Node.js 20 or newer")


def has_node() -> bool:
    """Return whether Node.js and jlpm, which needs it, are installed."""
    return bool((shutil.which("node") or shutil.which("nodejs")) and shutil.which("jlpm"))
