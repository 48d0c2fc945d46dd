"""Draw a cell's output on a recorded sink."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any, cast

from jupyter_disttrain.client.cells.events import Printed
from jupyter_disttrain.notebook.output.renderer import RANKS_MIME, Screen


class RecordedSink:
    """Hold what is shown now, by name."""

    def __init__(self) -> None:
        self.shown: dict[str, dict[str, Any]] = {}

    def show(self, shown_as: str | None, data: dict[str, Any], _metadata: dict[str, Any]) -> str:
        name = shown_as or str(len(self.shown))
        self.shown[name] = data
        return name

    def clear(self, *, wait: bool) -> None:  # noqa: ARG002
        self.shown.clear()

    def where_it_was(self) -> str:
        return ""

    @property
    def lines(self) -> list[str]:
        text = "\n".join(data.get("text/plain", "") for data in self.shown.values())
        return re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()


def test_late_output_of_another_rank_is_labelled_in_a_cell_of_one_rank() -> None:
    sink = RecordedSink()
    screen = Screen(
        cast("Any", sink),
        [0],
        4,
        "logs",
        max_lines=100,
        max_bytes=10_000,
        progress_after_s=math.inf,
        forward_comm=lambda _event: None,
    )
    run = cast("Any", SimpleNamespace(state=SimpleNamespace(done=False), done=False, coming_back="", failures=()))
    run.timed_out, run.notes = False, []

    def show(rank: int, text: str) -> list[str]:
        screen._due = 0.0
        screen.on_events([Printed(rank=rank, time_s=1.0, stream="stdout", text=text)], run)
        return sink.lines

    assert show(0, "mine\n") == ["mine"]
    assert show(2, "late\n") == ["rank 0    │ mine", "rank 2    │ late"]
    (data,) = sink.shown.values()
    assert data[RANKS_MIME]["ranks"] == [0, 2], "a tab for each"
    screen.on_end(run)
    assert sink.lines == ["rank 0    │ mine", "rank 2    │ late"]
