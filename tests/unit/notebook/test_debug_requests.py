"""At which line a breakpoint stops, and which of several stopped ranks is shown.

Does not cover: requests (``tests/integration/features/debugger``).
"""

from __future__ import annotations

from typing import Any

import pytest

from jupyter_disttrain.features.debugger.breakpoint_lines import line_of_statement
from jupyter_disttrain.notebook.debugged_cells import magic_call
from jupyter_disttrain.notebook.shown_rank import ShownRank

CODE = """#%%distributed

# a comment
def f(
    a,
):
    '''text

    of f'''
    return a

if (f(1) and
        f(2)):
    x = [
        1,
    ]
else:
    try:
        y = 2
    except ValueError:
        y = 3
    finally:
        z = 4
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        *((1, 4), (3, 4), (4, 4), (5, 4), (8, 7), (10, 10), (11, 12), (13, 12), (14, 14), (15, 14)),
        *((17, 18), (18, 18), (19, 19), (20, 21), (21, 21), (22, 23), (23, 23), (30, 30)),
    ],
)
def test_breakpoint_moves_to_a_statement(line: int, expected: int) -> None:
    assert line_of_statement(CODE, line) == expected


def test_code_that_is_not_python_is_left_alone() -> None:
    assert line_of_statement("%%bash\nls -l\n", 1) == 1


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("get_ipython().run_cell_magic('rank', '1 -o x', 'y = 2\\n')\n", ("rank", "1 -o x", "y = 2\n")),
        ("get_ipython().run_cell_magic('time', '', 'y = 2\\n')\n", None),
        ("x = 1\n", None),
        ("x = (", None),
    ],
)
def test_cells_for_ranks_are_recognized(code: str, expected: tuple[str, str, str] | None) -> None:
    assert magic_call(code) == expected


def event(name: str, rank: int) -> dict[str, Any]:
    return {"type": "event", "event": name, "body": {"threadId": 1_000_000 + rank}}


def stopped(*ranks: int) -> dict[int, dict[str, Any]]:
    return {rank: event("stopped", rank)["body"] for rank in ranks}


def test_first_rank_that_stops_is_shown_and_stays_during_its_steps() -> None:
    shown = ShownRank()
    assert shown.take(1, event("stopped", 1), stopped(1)) == [event("stopped", 1)]
    assert shown.take(0, event("stopped", 0), stopped(0, 1)) == []
    assert shown.again(stopped(0, 1)) == [event("stopped", 1)]  # with the frames of both
    step = shown.step(1)
    assert shown.again(stopped(0)) == []
    assert shown.take(1, event("stopped", 1), stopped(0, 1)) == [event("stopped", 1)]
    assert shown.pass_turn(step, stopped(0, 1)) == []
    assert shown.rank == 1


def test_rank_that_does_not_stop_after_its_step_passes_the_turn() -> None:
    shown = ShownRank()
    shown.take(1, event("stopped", 1), stopped(1))
    earlier, step = shown.step(1), shown.step(1)
    assert shown.pass_turn(earlier, stopped(2, 3)) == []
    assert shown.pass_turn(step, stopped(2, 3)) == [event("stopped", 2)]
    assert shown.take(1, event("stopped", 1), stopped(1, 2, 3)) == []


def test_rank_that_goes_on_by_itself_is_followed_by_the_next_or_none() -> None:
    shown = ShownRank()
    shown.take(2, event("stopped", 2), stopped(2))
    assert shown.take(0, event("continued", 0), stopped(2)) == []
    assert shown.take(2, event("continued", 2), stopped(3)) == [event("stopped", 3)]
    continued = shown.take(3, event("continued", 3), {})
    assert [each["event"] for each in continued] == ["continued"]
    assert shown.rank is None


def test_frame_of_another_rank_shows_that_rank() -> None:
    shown = ShownRank()
    shown.look_at(1, {})
    assert shown.rank is None
    shown.take(0, event("stopped", 0), stopped(0, 1))
    shown.look_at(1, stopped(0, 1))
    assert shown.rank == 1
    shown.go_on()
    assert shown.take(1, event("stopped", 1), stopped(1)) == [event("stopped", 1)]


def test_choosing_a_frame_of_a_running_rank_keeps_its_step() -> None:
    shown = ShownRank()
    shown.take(0, event("stopped", 0), stopped(0))
    step = shown.step(0)
    shown.look_at(0, stopped(1))
    assert shown.pass_turn(step, stopped(1)) == [event("stopped", 1)]


def test_rank_that_runs_gives_way_to_one_that_stops() -> None:
    shown = ShownRank()
    shown.take(0, event("stopped", 0), stopped(0))
    assert shown.take(1, event("stopped", 1), stopped(1)) == [event("stopped", 1)]
