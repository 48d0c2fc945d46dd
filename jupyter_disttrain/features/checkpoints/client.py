"""Save and load checkpoints of the ranks' variables.

Covers: the calls that the client runs on the ranks.
Does not cover: their implementation (``features.checkpoints.rank``).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...client.cells.history import Origin
from ...client.cells.push_pull import check_names
from ...errors import RankFailure, UsageError
from ...protocol.ranks import label_ranks
from ...protocol.states import RankState

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from ...client.cells.cell_run import CellRun
    from ...client.session import Session


class Checkpoints:
    """Saves and loads checkpoints of the ranks of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._writes_beside = False  # whether a version may still be written in the background

    def save(
        self,
        path: str | os.PathLike[str],
        names: Sequence[str],
        *,
        beside: bool = False,
        keep: int | None = None,
        **options: Any,
    ) -> CellRun:
        """Save variables of all ranks as the next version in a checkpoint folder.

        Parameters
        ----------
        path
            The folder, which must be visible to all hosts.
        names
            Models, optimizers, schedulers and other values; the state of random number generators is saved as well.
        beside
            Write in the background while the next cells run. The next save or load reports errors of that.
        keep
            Number of versions to keep; None keeps all.
        **options
            As of :meth:`Cluster.run`.

        Raises
        ------
        UsageError
            If a name is no valid variable name, or the ranks have no process group.
        RankFailure
            If a rank has no such variable, or can't write.
        """
        check_names(names)
        if not names:
            raise UsageError("name the variables to save, e.g. model optimizer step")
        if keep is not None and keep < 1:
            raise UsageError(f"at least one version has to be kept, not {keep}")
        launch = self._session.launch
        self._writes_beside = self._writes_beside or (beside and launch.config.backend != "none")
        arguments = f"{list(names)!r}, beside={beside}, keep={keep}, session={launch.folders.run.name!r}"
        return self._run(f"save({_absolute(path)!r}, {arguments})", options)

    def finish(self, **options: Any) -> str:
        """Wait until versions that are written in the background are on disk, before ranks are ended.

        Returns a warning that a version may be incomplete, because ranks still run a cell or have died; mostly empty.
        ``options`` are those of :meth:`Cluster.run`.

        Raises
        ------
        RankFailure
            If a version could not be written.
        """
        launch = self._session.launch
        # This process does not know whether an earlier kernel has started a write.
        came_late = launch.journal.began_late and launch.config.backend != "none"
        if not (self._writes_beside or came_late) or launch.link is None:
            return ""
        others = [entry.info.rank for entry in launch.table if entry.state != RankState.IDLE]
        if others:
            return (
                f"{label_ranks(others)} not idle: a checkpoint that is being written in the background is aborted, and "
                "the previous version remains the latest"
            )
        try:
            self._run("wait()", options)
        except RankFailure as error:
            # An interrupt ends the wait; the version is still being written.
            self._writes_beside = any(failure.ename == "KeyboardInterrupt" for failure in error.failures)
            raise
        self._writes_beside = False
        return ""

    def load(
        self, path: str | os.PathLike[str], names: Sequence[str] = (), *, trust_owner: bool = False, **options: Any
    ) -> CellRun:
        """Load variables on all ranks, from the latest version in a checkpoint folder or from a given one.

        Parameters
        ----------
        path
            The folder, or a version in it.
        names
            The variables to load; by default all that were saved. Models and optimizers must exist; their state is
            loaded.
        trust_owner
            Also load a checkpoint of another user: loading runs code from its files.
        **options
            As of :meth:`Cluster.run`.

        Raises
        ------
        UsageError
            If a name is no valid variable name, or the ranks have no process group.
        RankFailure
            If there is no such checkpoint, it does not fit, or it belongs to another user.
        """
        check_names(names)
        call = f"load({_absolute(path)!r}, {list(names)!r}, trust_owner={trust_owner})"
        return self._run(call, options, f"%dist_load {path}")

    def _run(self, call: str, options: dict[str, Any], magic: str = "") -> CellRun:
        launch, _ = self._session.ready("all")
        if launch.config.backend == "none":
            raise UsageError("checkpoints need torch on the ranks; start them without --backend none")
        options["origin"] = replace(options.get("origin", Origin()), is_cell=False, magic=magic)
        return self._session.run(f"get_ipython().checkpoints.{call}", values=False, **options)


def _absolute(path: str | os.PathLike[str]) -> str:
    return str(Path(path).expanduser().absolute())
