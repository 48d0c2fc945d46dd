"""Stop gives the prompt back while ranks go on: the notebook still reaches them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from .recovery_tools import STUBBORN

if TYPE_CHECKING:
    from pathlib import Path

    from .notebook_driver import Notebook, Outcome


def test_ranks_whose_cell_has_given_the_prompt_back_are_waited_for_and_interrupted(
    notebook: Notebook, tmp_path: Path
) -> None:
    path = tmp_path / "let-go"
    pressed: list[str] = []

    def press_after(*words: str) -> Any:
        def on_message(_message: dict[str, Any], outcome: Outcome) -> None:
            for word in words:
                if word not in pressed and word in outcome.text:
                    pressed.append(word)
                    notebook.interrupt()

        return on_message

    given_up = notebook.run(
        f"%%rank 1\n{STUBBORN}kept = rank * 11\nheard = stay({str(path)!r})",
        on_message=press_after("heard 0", "heard 1", "heard 2"),
    )
    assert given_up.error.startswith("GivenUpError: interrupted three times; rank 1 has not come back yet: ")
    assert "%dist_interrupt interrupts again" in given_up.error
    where = notebook.run("%dist_where").check().text
    assert re.search(r"rank 1: in Python code at line \d", where), where
    # Stop reaches the ranks that a cell waits for, and what they print is shown there.
    waits = notebook.client.execute("%dist_wait", allow_stdin=False)
    press = press_after("rank 1 running")

    def press_and_let_go(message: dict[str, Any], outcome: Outcome) -> None:
        press(message, outcome)
        if "heard 4" in outcome.text:
            path.touch()

    assert "heard 4" in notebook.outcome(waits, on_message=press_and_let_go).check().text
    assert notebook.run("%%rank 1\nprint(kept, heard)").check().text == "11 4"
    assert notebook.run("%dist_wait").error.startswith("UsageError: no cell runs in the background")
