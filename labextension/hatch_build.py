"""Put the JupyterLab extension into what is distributed; called by hatch-jupyter-builder (pyproject.toml).

From a checkout each sdist and each wheel is built anew, so that none carries an outdated extension. An sdist carries
the built files, so a wheel from it needs no Node.js. Nor does a wheel from a checkout: where Node.js is missing it
goes without the extension, since all but the buttons works without it. An editable install never builds:
``make labextension`` does.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from hatch_jupyter_builder import npm_builder

log = logging.getLogger(__name__)

# Relative to the project's root, where build front ends run a hook.
BUILT = Path("jupyter_disttrain/labextension/package.json")
MADE_BY_SDIST = Path("PKG-INFO")


def build_labextension(target_name: str, version: str) -> None:
    """Build the extension where that is due.

    Parameters
    ----------
    target_name
        ``"sdist"`` or ``"wheel"``.
    version
        ``"standard"`` or ``"editable"``.

    Raises
    ------
    RuntimeError
        If Node.js is missing and an sdist was asked for.
    subprocess.CalledProcessError
        If the build fails.
    """
    if MADE_BY_SDIST.exists():
        return
    if version == "standard" and has_node():
        npm_builder(target_name, version, path="labextension", build_cmd="build:prod", npm=["jlpm"])
    elif target_name == "sdist":
        raise RuntimeError("an sdist carries the built JupyterLab extension; install Node.js 20 or newer to build it")
    elif BUILT.exists():
        log.warning("the JupyterLab buttons are installed as they were last built")
    else:
        log.warning("the JupyterLab buttons are left out; 'make labextension' builds them, with Node.js 20 or newer")


def has_node() -> bool:
    """Tell whether Node.js and jlpm, which runs on it, are there."""
    return bool((shutil.which("node") or shutil.which("nodejs")) and shutil.which("jlpm"))
