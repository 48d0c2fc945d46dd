"""Complete and document cells for ranks as cells of the notebook are: at Tab and Shift-Tab.

Covers: which cells are for ranks, the kernel's complete and inspect requests, completion in a terminal.
Does not cover: finding completions (``features.introspection``).

IPython's completer and ipykernel's method for inspect requests are wrapped: by default front ends use nothing else. For
other cells they are called as before.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from IPython.core.completer import Completion

from ..config.rank_selection import parse_ranks
from ..errors import DisttrainError
from .magics.arguments import parse, ranks_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from IPython.core.interactiveshell import InteractiveShell

    from ..client import Cluster
    from .magics.clusters import Clusters

_MAGIC = re.compile(r"\s*%%(?P<name>distributed|rank)(?P<line>[^\S\n][^\n]*|[\[(\d][^\n]*)?\n")
_RED, _RESET = "\033[31m", "\033[39m"


class CellIntrospection:
    """Completion and inspection in the cells of one shell that run on ranks."""

    def __init__(self, shell: InteractiveShell, clusters: Clusters) -> None:
        self._clusters = clusters
        self._completer: Any = shell.Completer
        self._completions = self._completer.completions
        self._completer.completions = self._complete  # type: ignore[method-assign]
        self._kernel: Any = getattr(shell, "kernel", None)
        if self._kernel is not None:
            self._inspections = self._kernel.do_inspect
            self._kernel.do_inspect = self._inspect

    def remove(self) -> None:
        """Restore completion and inspection as they were."""
        del self._completer.completions
        if self._kernel is not None:
            del self._kernel.do_inspect

    def _complete(self, text: str, offset: int) -> Iterator[Completion]:
        found = self._addressed(text, offset)
        if found is None:
            yield from self._completions(text, offset)
            return
        cluster, ranks, begin = found
        completions = cluster.introspection.complete(text[begin:], offset - begin, ranks)
        start, end = completions.start + begin, completions.end + begin
        for match, kind in completions.matches:
            unbroken = kind.replace(" ", "\N{NO-BREAK SPACE}")  # JupyterLab shows the first line only
            yield Completion(start=start, end=end, text=match, type=unbroken, _origin="ranks")
        if not begin and text[:offset].lstrip().startswith("%") and "\n" not in text[:offset].strip():
            yield from self._completions(text, offset)  # it may become a magic of the notebook

    def _inspect(self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Sequence[str] = ()) -> Any:
        found = self._addressed(code, cursor_pos)
        if found is None:
            return self._inspections(code, cursor_pos, detail_level, omit_sections)
        cluster, ranks, begin = found
        sections = cluster.introspection.inspect(
            code[begin:], cursor_pos - begin, ranks, with_source=bool(detail_level)
        )
        data = {"text/plain": _text(sections)} if sections else {}
        return {"status": "ok", "found": bool(sections), "data": data, "metadata": {}}

    def _addressed(self, text: str, offset: int) -> tuple[Cluster, tuple[int, ...], int] | None:
        """Return the cluster and the ranks that a cell is for, and where its code begins; None if it is for none."""
        magic = _MAGIC.match(text)
        try:
            if magic is not None and offset >= magic.end():
                args = parse(magic["name"], magic["line"] or "")
                cluster = self._clusters.current(args.name)
                return (
                    None if cluster is None else (cluster, parse_ranks(ranks_of(args), cluster.world_size), magic.end())
                )
            if magic is None and self._clusters.transformers.runs_on_ranks(text):
                cluster = self._clusters.current(None)
                return None if cluster is None else (cluster, parse_ranks("all", cluster.world_size), 0)
        except DisttrainError:  # the cell reports it when it runs
            return None
        return None


def _text(sections: dict[str, str]) -> str:
    """Return sections as IPython shows them: long ones below their title."""
    lines = []
    for title, text in sections.items():
        separator = "\n" if "\n" in text else " " * max(1, 10 - len(title))
        lines.append(f"{_RED}{title}:{_RESET}{separator}{text}")
    return "\n".join(lines)
