"""Transform a cell's text before IPython parses it.

Covers: ``%%rank[0,1]`` without a space, every cell on the ranks after ``%dist_mode -e`` but those under ``%%local``,
magics of the notebook in a cell for the ranks.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from IPython.core.inputtransformer2 import TransformerManager

from ...errors import UsageError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_GLUED = re.compile(r"^%%(rank|distributed)(?=[\[(\d])")  # a magic's name can't continue with these
_LOCAL = re.compile(r"^%%local\s*$")  # this cell runs in the notebook, whatever the mode
_MAY_CALL = re.compile(r"^\s*%(dist_|sync\b)", re.MULTILINE)
_SECOND = re.compile(r"\s*%%(distributed|rank|local)\b")
_CALL = re.compile(r"get_ipython\(\)\.run_line_magic\('(dist_\w+|sync)'")  # IPython's transformed form of a magic
# Cells that stay in the notebook while %dist_mode is on: they control it.
_STAYS = re.compile(r"^\s*(%%(distributed|rank)|%(dist_\w+|sync|load_ext|reload_ext|unload_ext|config))\b")


class Transformers:
    """IPython's input transformers of this extension."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self.everywhere = False  # every cell runs on the ranks
        self._shell.input_transformers_cleanup.append(self._transform)

    def remove(self) -> None:
        """Remove the transformers."""
        self._shell.input_transformers_cleanup.remove(self._transform)

    def _transform(self, lines: list[str]) -> list[str]:
        first = next((index for index, line in enumerate(lines) if line.strip()), None)
        if first is None:
            return lines
        if _GLUED.match(lines[first]):
            return [*lines[:first], _GLUED.sub(r"%%\1 ", lines[first]), *lines[first + 1 :]]
        if _LOCAL.match(lines[first]):
            return ["\n", *lines[first + 1 :]]
        if self._is_for_ranks(lines[first]):
            return ["%%distributed --bare\n", *lines]
        return lines

    def runs_on_ranks(self, cell: str) -> bool:
        """Whether a cell runs on the ranks though it has no magic for that."""
        first = next((line for line in cell.split("\n") if line.strip()), "")
        return not _LOCAL.match(first) and self._is_for_ranks(first)

    def _is_for_ranks(self, first_line: str) -> bool:
        return self.everywhere and not _STAYS.match(first_line)


def check_magics(code: str, *, is_bare: bool) -> None:
    """Refuse a magic of the notebook within a cell for the ranks, before any of it runs.

    ``is_bare``: the cell has no magic of its own, and runs on the ranks because every cell does.

    Raises a UsageError if there is one; the message states where it can be used.
    """
    if _SECOND.match(code):
        raise UsageError("two magics of this cell select where it runs; remove one")
    if not _MAY_CALL.search(code):
        return
    found = _CALL.search(TransformerManager().transform_cell(code))
    if found is not None and found[0] not in code:
        also = ", or begin this one with %%local to run all of it in the notebook" if is_bare else ""
        raise UsageError(
            f"%{found[1]} runs in the notebook, but this cell runs on the ranks; move it to its own cell{also}"
        )
