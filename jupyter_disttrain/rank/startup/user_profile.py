"""Apply the user's IPython profile: its configuration, and the code it runs at the start of a session.

Covers: ``ipython_config.py`` and ``ipython_kernel_config.py``, extensions, startup files, ``exec_lines``, matplotlib.
Does not cover: how failures are shown (``client``), which profile the notebook uses (``notebook``).

An error in the profile disables only the setting, file or line that it is in, and is reported.
"""

from __future__ import annotations

import logging
import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ipykernel.kernelapp import IPKernelApp
from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.core.application import ENV_CONFIG_DIRS, SYSTEM_CONFIG_DIRS
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.shellapp import InteractiveShellApp
from traitlets import TraitError
from traitlets.config import Config
from traitlets.config.loader import ConfigFileNotFound, JSONFileConfigLoader, PyFileConfigLoader

from ...protocol.environment import IPYTHON_PROFILE
from ..kernel.shell import RankProfile

if TYPE_CHECKING:
    from ..kernel.shell import RankShell

# Sections that must not apply on ranks: the cluster has its own key, sockets, folders and kernel.
_NOT_ON_RANKS = (
    *("Application", "BaseIPythonApplication", "ProfileDir"),
    *("ConnectionFileMixin", "Session", "Kernel", "IPythonKernel"),
    *("IPEngine", "IPController", "IPCluster"),
    *("HistoryManager", "HistoryAccessor"),  # one database, which all ranks would write
)
# The first three name a file that all ranks would write, the last prompts after an error.
_NOT_OF_SHELL = ("logstart", "logfile", "logappend", "pdb")
_GUIS = ("auto", "gtk", "gtk3", "gtk4", "osx", "qt", "qt4", "qt5", "qt6", "tk", "wx")  # a rank has no screen


class UserProfile:
    """The profile, as this host has it."""

    def __init__(self) -> None:
        home = os.environ.get("IPYTHONDIR") or Path.home() / ".ipython"
        self.folder = Path(os.environ.get(IPYTHON_PROFILE) or Path(home) / "profile_default")  # it may not exist here
        self.troubles: list[str] = []  # what failed, and why
        self.config = Config()
        folders = [str(self.folder), *ENV_CONFIG_DIRS, *SYSTEM_CONFIG_DIRS]
        for name in ("ipython_config", "ipython_kernel_config"):
            for folder in reversed(folders):
                self._load(PyFileConfigLoader(f"{name}.py", path=folder), f"{folder}/{name}.py")
                self._load(JSONFileConfigLoader(f"{name}.json", path=folder), f"{folder}/{name}.json")
        self._leave_out()
        for kind in (InteractiveShell, ZMQInteractiveShell, InteractiveShellApp, IPKernelApp):
            self._check(kind)

    def _load(self, loader: PyFileConfigLoader | JSONFileConfigLoader, file: str) -> None:
        try:
            self.config.merge(loader.load_config())
        except ConfigFileNotFound:
            return
        except (Exception, SystemExit) as error:  # noqa: BLE001  (the file is the user's code)
            self.troubles.append(_failure_text(file, error))

    def _leave_out(self) -> None:
        for section in _NOT_ON_RANKS:
            self.config.pop(section, None)
        for section in ("InteractiveShell", "ZMQInteractiveShell"):
            for name in _NOT_OF_SHELL:
                self.config.get(section, {}).pop(name, None)
        of_app = set(InteractiveShellApp.class_trait_names()) - {"gui"}  # an event loop of a window system
        for section in ("InteractiveShellApp", "IPKernelApp"):
            found = self.config.get(section, {})
            for name in found.keys() - of_app:  # settings of a kernel's own process: transport, ports, connection file
                del found[name]
            for name in {"matplotlib", "pylab"} & found.keys():
                found[name] = "inline" if str(found[name]).lower() in _GUIS else found[name]

    def _check(self, kind: Any) -> None:
        """Remove values that IPython would refuse, as the rank could not start."""
        section = self.config.get(kind.__name__, {})
        traits = kind.class_traits(config=True)
        for name in section.keys() & traits.keys():
            try:
                if not hasattr(section[name], "get_value"):  # else it adds to a list
                    traits[name]._validate(kind.__new__(kind), section[name])  # noqa: SLF001
            except TraitError as error:
                self.troubles.append(f"c.{kind.__name__}.{name} in {self.folder}: {error}")
                del section[name]

    def run(self, app: ProfileApp, shell: RankShell) -> list[str]:
        """Run the profile's code; returns what failed."""
        app.profile_dir = RankProfile(location=str(self.folder))
        app.default_extensions = []
        app.troubles, app.log = self.troubles, logging.Logger("jupyter_disttrain.profile")  # noqa: LOG001
        app.log.addHandler(_Collector(self.troubles))
        shell.forget_error()
        app.init_gui_pylab()  # type: ignore[no-untyped-call]
        app.init_extensions()  # type: ignore[no-untyped-call]
        app.init_code()  # type: ignore[no-untyped-call]
        return self.troubles


class ProfileApp(IPKernelApp):
    """Runs startup files and lines one by one: IPython stops at the first that fails."""

    troubles: list[str]

    def _exec_file(self, fname: str, shell_futures: bool = False) -> None:
        try:
            super()._exec_file(fname, shell_futures)  # type: ignore[no-untyped-call]
        except (Exception, SystemExit) as error:  # noqa: BLE001  (the file is the user's code)
            self.troubles.append(_failure_text(fname, error))
            self.shell.forget_error()  # type: ignore[union-attr]
        self._note(fname)

    def _run_exec_lines(self) -> None:
        for line in self.exec_lines:
            self.shell.run_cell(line, store_history=False)  # type: ignore[union-attr]
            self._note(f"exec_lines {line!r}")

    def _note(self, what: str) -> None:
        shell: Any = self.shell
        if shell.any_error is not None:
            self.troubles.append(_failure_text(what, shell.any_error))
        shell.forget_error()


def _failure_text(what: str, error: BaseException) -> str:
    """Return what failed, with its line."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == what]
    at = [error.lineno] if isinstance(error, SyntaxError) and error.lineno else lines
    where = f", line {at[-1]}" if at else ""
    return f"{what}{where}: {type(error).__name__}: {error}"


class _Collector(logging.Handler):
    def __init__(self, troubles: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._troubles = troubles

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        why = "" if error is None else f": {type(error).__name__}: {error}"
        self._troubles.append(record.getMessage().split("\n")[0] + why)
