"""What happens to a cell's text before IPython reads it.

Covers: ``%%rank[0,1]`` without a space, every cell on the ranks after ``%dist_mode -e`` but those under ``%%local``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_GLUED = re.compile(r"^%%(rank|distributed)(?=[\[(\d])")  # a magic's name can't go on with these
_LOCAL = re.compile(r"^%%local\s*$")  # this cell runs in the notebook, whatever the mode
# Cells that stay in the notebook while %dist_mode is on: they steer it.
_STAYS = re.compile(
    r"^\s*(%%(distributed|rank)\b|%%(rank|distributed)[\[(]|%(dist_\w+|sync|load_ext|reload_ext|unload_ext|config)\b)"
)


class Transformers:
    """IPython's input transformers that belong to this extension."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self.everywhere = False  # every cell runs on the ranks

    def install(self) -> None:
        """Begin."""
        self._shell.input_transformers_cleanup.append(self._transform)

    def remove(self) -> None:
        """End."""
        self._shell.input_transformers_cleanup.remove(self._transform)

    def _transform(self, lines: list[str]) -> list[str]:
        if not lines:
            return lines
        first = next((index for index, line in enumerate(lines) if line.strip()), None)
        if first is None:
            return lines
        if _GLUED.match(lines[first]):
            glued = _GLUED.sub(r"%%\1 ", lines[first])
            return [*lines[:first], glued, *lines[first + 1 :]]
        if _LOCAL.match(lines[first]):
            return ["\n", *lines[first + 1 :]]
        if self.everywhere and not _STAYS.match(lines[first]):
            return ["%%distributed --bare\n", *lines]
        return lines
