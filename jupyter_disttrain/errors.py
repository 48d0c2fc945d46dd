"""Define every error that this package raises for its user.

Covers: errors of a request, of the start of a cluster, of a rank.
Does not cover: grouping the failures of several ranks (``client.cells.cell_run``).

Each message states what happened, with which value or on which rank and host, and what to do next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .protocol.messages import CellFailure


RED, BOLD, RESET = "\x1b[31m", "\x1b[1m", "\x1b[0m"


class DisttrainError(Exception):
    """The base of every error this package raises."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows in place of a traceback: the message gives the remedy, our frames would not."""
        return [f"{RED}{type(self).__name__}{RESET}: {self}"]


def _render_note(note: str) -> str:
    """Return a note with its first line in bold; what follows is a list."""
    first, *more = note.split("\n")
    return "\n".join([f"{BOLD}{first}{RESET}", *more])


class UsageError(DisttrainError, ValueError):
    """The request can't be carried out as it was made."""


class LaunchError(DisttrainError, RuntimeError):
    """The ranks could not be started."""


class IrreplaceableError(LaunchError):
    """A dead rank can't be replaced, however often that is tried; the message gives the remedy."""


class HostLostError(IrreplaceableError):
    """No host is left on which a rank could be started again."""


class StartInterruptedError(DisttrainError, KeyboardInterrupt):
    """The start of a cluster was interrupted."""


class ClusterClosedError(DisttrainError, RuntimeError):
    """The cluster was shut down, or its controller has ended."""


class UnserializableValueError(DisttrainError, TypeError):
    """A value can't be sent between a rank and the notebook."""


class StageError(DisttrainError, RuntimeError):
    """A data set could not be copied to the nodes."""


class CodeError(DisttrainError, ImportError):
    """An edited module can't be reloaded on the ranks."""


class CellTimeoutError(DisttrainError, TimeoutError):
    """A cell ran longer than its ``--timeout``.

    Attributes
    ----------
    notes : list of str
        Which ranks had waited for which others, and what was done to continue the session.
    run : CellRun or None
        The cell: what each rank printed is in ``run.stdout`` and ``run.stderr``.
    """

    def __init__(self, message: str, notes: Sequence[str] = (), run: Any = None) -> None:
        self.notes = list(notes)
        self.run = run
        super().__init__(message)

    def _render_traceback_(self) -> list[str]:
        """Return what happened, and a line for each note."""
        return [*super()._render_traceback_(), *map(_render_note, self.notes)]


class RankFailure(DisttrainError):  # noqa: N818  (the term of the design)
    """A cell failed on at least one rank.

    Attributes
    ----------
    failures : tuple of CellFailure
        Each distinct failure once, in the order in which they happened: the root cause first.
    by_rank : dict of int to CellFailure
        The same failures, by rank.
    waited : dict of int to CellFailure
        Ranks that waited for the failed ranks, and were released.
    notes : list of str
        What was done to continue the session.
    run : CellRun or None
        The cell: what each rank printed is in ``run.stdout`` and ``run.stderr``, by rank.
    after_death : str
        What follows from the death of a rank for the other ranks; empty if unknown.
    """

    def __init__(
        self,
        failures: Sequence[CellFailure],
        by_rank: Mapping[int, CellFailure],
        waited: Mapping[int, CellFailure] | None = None,
        notes: Sequence[str] = (),
        run: Any = None,
        after_death: str = "",
    ) -> None:
        self.run = run
        self.after_death = after_death
        self.failures = tuple(failures)
        self.by_rank = dict(by_rank)
        self.waited = dict(waited or {})
        self.notes = list(notes)
        super().__init__("; ".join(failure.headline for failure in self.failures))

    def _render_traceback_(self) -> list[str]:
        """Return each distinct failure once: its ranks, place, and the rank's own traceback."""
        lines: list[str] = []
        interrupted = [failure for failure in self.failures if failure.ename == "KeyboardInterrupt"]
        for failure in self.failures:
            if failure in interrupted[1:]:
                lines.append(f"{BOLD}{failure.headline}{RESET}")  # all ranks were, so one traceback is enough
                continue
            lines += (f"{BOLD}{failure.where}{RESET}", *failure.traceback)
            if failure.ename == "RankDied":
                after = f"; {self.after_death}" if self.after_death else ""
                lines.append(f"{BOLD}RankDied{RESET}: {failure.evalue}{after}")
            elif not failure.traceback:
                lines.append(f"{BOLD}{failure.ename}{RESET}: {failure.evalue}")
            lines += _variants(failure)
        return [*lines, *self._render_waited(), *map(_render_note, self.notes)]

    def _render_waited(self) -> list[str]:
        """Return one line for the ranks that waited at the same line of the cell."""
        from .protocol.ranks import label_ranks  # noqa: PLC0415  (it would delay the start of each rank)

        culprits = label_ranks({rank for failure in self.failures for rank in failure.ranks})
        by_line: dict[str, list[int]] = {}
        for rank, failure in sorted(self.waited.items()):
            by_line.setdefault(failure.place, []).append(rank)
        return [
            f"{label_ranks(ranks)} waited for {culprits}{f' at {line}' if line else ''} "
            f"and {'was' if len(ranks) == 1 else 'were'} released"
            for line, ranks in by_line.items()
        ]


VARIANTS = 24  # lines below a traceback


def _variants(failure: CellFailure) -> list[str]:
    """Return a line for each difference of other ranks' failures, with those ranks."""
    from .protocol.ranks import label_ranks  # noqa: PLC0415

    ranks: dict[str, list[int]] = {}
    for rank, text in failure.variants:
        ranks.setdefault(text, []).append(rank)
    named = f"{failure.ename}: "
    lines = [
        f"{label_ranks(those)}: {text.replace(named, f'{RED}{failure.ename}{RESET}: ', 1)}"
        for text, those in ranks.items()
    ]
    if len(lines) > VARIANTS:
        rest = [rank for those in list(ranks.values())[VARIANTS - 1 :] for rank in those]
        lines[VARIANTS - 1 :] = [f"{label_ranks(rest)}: others; each rank's is in by_rank of this RankFailure"]
    return lines


class InputRefusedError(DisttrainError):
    """The front end can't ask the user what a rank asks."""


class GivenUpError(DisttrainError, KeyboardInterrupt):
    """The wait for ranks that no interrupt reached was aborted.

    Attributes
    ----------
    failures : tuple of CellFailure
        What had failed by then: often the reason why the others wait.
    run : CellRun or None
        The cell: what each rank printed so far is in ``run.stdout`` and ``run.stderr``.
    """

    def __init__(self, what: str, failures: Sequence[CellFailure] = (), run: Any = None) -> None:
        self.failures = tuple(failures)
        self.run = run
        super().__init__(what)

    def _render_traceback_(self) -> list[str]:
        """Return the failures, the root cause first, and then the message."""
        return [*RankFailure(self.failures, {})._render_traceback_(), *super()._render_traceback_()]
