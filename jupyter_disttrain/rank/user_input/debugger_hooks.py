"""Let debuggers run in cells: ``breakpoint()``, ``pdb.set_trace()``, ``pdb.post_mortem()``, ``%debug``.

Covers: which debugger they start; how an interrupt ends any debugger that derives from pdb's, as that of
``torch.distributed.breakpoint`` does.
Does not cover: the debugger of cells (``rank_pdb``), asking for commands (``questions``).
"""

from __future__ import annotations

import bdb
import functools
import pdb  # noqa: T100
import sys
from typing import TYPE_CHECKING, Any

from ..libraries.import_hooks import on_import
from .questions import DebuggerRefusedError

if TYPE_CHECKING:
    from types import TracebackType

    from ...features.debugger.rank.debugger import RankDebugger
    from .questions import Questions


def let_debuggers_ask(questions: Questions, remote: RankDebugger) -> None:
    """Make debuggers of cells ask the user at the notebook, or in JupyterLab's debugger if ``remote`` is attached."""

    def stop_here(*_args: Any, header: str | None = None, **_options: Any) -> None:
        from .rank_pdb import RankPdb  # noqa: PLC0415  (imports a part of IPython that few cells need)

        if reason := questions.refusal():
            raise DebuggerRefusedError(reason)
        if remote.is_attached:
            remote.stop_at(sys._getframe(1), header or "")  # noqa: SLF001
            return
        debugger = RankPdb()
        if header is not None:
            debugger.message(header)
        debugger.stop_at(sys._getframe(1))  # noqa: SLF001

    def post_mortem(t: TracebackType | BaseException | None = None) -> None:
        from .rank_pdb import RankPdb  # noqa: PLC0415

        found = sys.exc_info()[2] if t is None else t.__traceback__ if isinstance(t, BaseException) else t
        if found is None:
            raise ValueError("A valid traceback must be passed if no exception is being handled")
        RankPdb().look_at(found)

    def change_ipython(module: Any) -> None:
        module.set_trace = stop_here
        module.Pdb._cmdloop = _loop  # noqa: SLF001

    sys.breakpointhook = pdb.set_trace = stop_here
    pdb.post_mortem = post_mortem
    on_import("IPython.core.debugger", change_ipython)
    base: Any = pdb.Pdb
    base._cmdloop = _loop  # noqa: SLF001
    initialize = base.__init__

    @functools.wraps(initialize)
    def without_handler(self: Any, *args: Any, **options: Any) -> None:
        initialize(self, *args, **options)
        self.nosigint = True  # else "continue" would take over SIGINT, which interrupts the cell

    base.__init__ = without_handler


def _loop(debugger: Any) -> None:
    """Ask for commands until one lets the code go on; an interrupt or a refusal ends the debugger and the cell."""
    try:
        debugger.cmdloop()
    except (KeyboardInterrupt, DebuggerRefusedError):
        debugger.forget()
        sys.settrace(None)
        raise


def stop_tracing() -> None:
    """End the tracing that a debugger with breakpoints has left on; it would slow down every later cell."""
    if isinstance(getattr(sys.gettrace(), "__self__", None), bdb.Bdb):
        sys.settrace(None)
