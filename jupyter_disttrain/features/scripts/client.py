"""Run scripts on the ranks, and export what ran there as a script.

Covers: the request to the ranks, the rendezvous of the processes of one run; the contents of an exported script.
Does not cover: running it (``features.scripts.rank``), waiting for it (``client.cells.cell_run``), writing it
(``features.export.export``).
"""

from __future__ import annotations

import os
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...client.cells.history import CellEntry, Origin, is_whole, last_of_each
from ...client.cells.push_pull import ask
from ...config.rank_selection import parse_ranks
from ...errors import UsageError
from ...launchers.mpi import mpi_obstacle
from ...protocol.requests import OpenPort
from ..export.export import export, frame_of, remarks_on
from .mpi_job import MpiJob
from .start_method import read_sources

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ...client.cells.cell_run import CellRun
    from ...client.session import Session
    from ..export.export import Exported

HOW = ("auto", "fresh", "mpi", "node", "session")


class Scripts:
    """Runs scripts on the ranks of one session, and exports what ran there."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def run(
        self,
        target: str | os.PathLike[str],
        arguments: Sequence[str] = (),
        ranks: str | int | Iterable[int] = "all",
        *,
        is_module: bool = False,
        how: str = "auto",
        **options: Any,
    ) -> CellRun:
        """Run a script on ranks, as torchrun would.

        Parameters
        ----------
        target
            The script's path on the ranks' hosts, relative to the notebook's folder; or a module's name.
        arguments
            The script's ``sys.argv``; ``$LOCAL_RANK`` and similar variables are replaced with each rank's own value.
        ranks
            E.g. ``"0,2-3"``, ``0`` or ``"all"``.
        is_module
            ``target`` is a module's name, as with ``python -m``.
        how
            ``"fresh"``: in a new process for each rank. ``"mpi"``: so, under an mpiexec of its own. ``"auto"``: as
            ``"mpi"`` if its source imports mpi4py or Horovod and mpiexec can be used, else as ``"fresh"``.
            ``"node"``: in one for each node, which may start others. ``"session"``: in the ranks' own processes, with
            the variables of cells, as ``%run -i`` does.
        **options
            Options of :meth:`Cluster.run`.

        Raises
        ------
        RankFailure
            If the script failed on a rank, or exited with another code than 0.
        UsageError
            If the ranks are not there, still run an earlier cell, or can't run MPI.
        """
        if how not in HOW:
            raise UsageError(f"a script can't run {how!r}; choose one of {', '.join(map(repr, HOW))}")
        folder, target = _folder(), os.fspath(target)
        found = read_sources(target, folder, is_module=is_module)
        if how == "auto":
            how = "mpi" if found.uses_mpi and not mpi_obstacle(self._session.launch.config) else "fresh"
        nodes = 0
        if how == "node":
            ranks = self._first_of_each_node(ranks)
            nodes = len(ranks)
        run_id = uuid.uuid4().hex[:8]
        rendezvous, sockets = self._rendezvous(ranks, how)
        request: dict[str, Any] = {
            "target": target,
            "arguments": [str(argument) for argument in arguments],
            "is_module": is_module,
            "folder": folder,
            "how": how,
            "variables": found.variables,
            "run_id": run_id,
            "rendezvous": rendezvous | {"nodes": nodes},
        }
        arguments = ", ".join(f"{name}={value!r}" for name, value in request.items())
        options["origin"] = replace(
            options.get("origin", Origin()), is_cell=False, magic=f"%dist_run {target}", runs_program=how != "session"
        )
        code = f"get_ipython().scripts.run({arguments})"
        if not sockets:
            return self._session.run(code, ranks, values=False, **options)
        return self._run_with_mpi(code, sockets, folder, options)

    def _run_with_mpi(self, code: str, sockets: dict[int, str], folder: str, options: dict[str, Any]) -> CellRun:
        """Run a script under an mpiexec of its own; ``sockets`` are the names of the ranks' sockets."""
        launch, ranks = self._session.ready(list(sockets))
        job = MpiJob(launch, ranks, list(sockets.values()), folder)
        block = options.pop("block", True)
        run = None
        try:
            run = self._session.run(code, ranks, values=False, block=False, **options)
            job.follow(run)
        except BaseException:  # also an interrupt: nothing else ends mpiexec
            job.end()
            if run is not None:
                job.report_end(run.number)
            raise
        return run.wait() if block else run

    def export(self, path: str | os.PathLike[str], launch: str = "torchrun", *, every_run: bool = False) -> Exported:
        """Write the cells that ran on the ranks as one script, and a file that launches it.

        Parameters
        ----------
        path
            The script's path; files that belong to it are created beside it under its name.
        launch
            ``"torchrun"``, ``"slurm"``, ``"mpi"`` or ``"horovodrun"``.
        every_run
            Write every successful run of a notebook's cell, instead of its last version once.

        Returns
        -------
        Exported
            The files, the command that runs them, and remarks for the user.

        Raises
        ------
        UsageError
            If nothing ran, or something that ran can't be part of a script; the message names it.
        """
        journal = self._session.launch.journal
        done, endings = journal.entries()
        whole = [entry for entry in done if not isinstance(entry, CellEntry) or is_whole(entry, endings)]
        entries = whole if every_run else last_of_each(whole)
        remarks = remarks_on(done, entries, endings)
        if journal.began_late:
            remarks.insert(
                0, "cells from before %dist_attach are not included: only the kernel that ran them has their code"
            )
        frame = frame_of(self._session.launch)
        return export(Path(path), entries, frame, launch, remarks)

    def _first_of_each_node(self, ranks: str | int | Iterable[int]) -> list[int]:
        table = self._session.launch.table
        first: dict[int, int] = {}
        for rank in parse_ranks(ranks, len(table)):
            first.setdefault(table[rank].info.node_rank, rank)
        return sorted(first.values())

    def _rendezvous(self, ranks: str | int | Iterable[int], how: str) -> tuple[dict[str, Any], dict[int, str]]:
        """Have rank 0 open a port for the rendezvous of one run, and each rank what its program needs.

        Returns what the ranks have to know of each other's, and for a run with MPI the name of each rank's socket.
        """
        if how == "session":
            return {}, {}
        launch, wanted = self._session.ready(ranks)
        on_all = len(wanted) == len(launch.table) and how != "node"
        asked = wanted if on_all or how == "mpi" else self._session.ready(0)[1]
        replies = ask(launch, asked, OpenPort(served=how != "node", mpi=how == "mpi"))
        contents = {rank: replies[rank]["content"] for rank in asked}
        if 0 not in contents:
            contents[0] = ask(launch, self._session.ready(0)[1], OpenPort(served=True))[0]["content"]
        places = [contents[rank]["place"] for rank in asked] if on_all else []
        sockets = {rank: contents[rank]["socket"] for rank in wanted} if how == "mpi" else {}
        return {"port": contents[0]["port"], "places": places}, sockets


def _folder() -> str:
    try:
        return os.getcwd()  # noqa: PTH109  (keeps symbolic links, as the user sees the path)
    except FileNotFoundError:
        raise UsageError("the notebook's folder does not exist any more; os.chdir() to one that exists") from None
