"""The start of a cell on a rank reaches its subscribers."""

from __future__ import annotations

from jupyter_disttrain.rank.cell_started import CellStarted, CellStarts
from jupyter_disttrain.rank.output import user_code

from ..records import cell_started


def test_each_subscriber_gets_every_cell_in_the_order_of_subscription() -> None:
    starts, seen = CellStarts(), list[tuple[str, CellStarted]]()
    starts.subscribe(lambda cell: seen.append(("first", cell)), lambda cell: seen.append(("second", cell)))
    starts.publish(first := cell_started(1))
    starts.subscribe(lambda cell: seen.append(("late", cell)), user_code.set_cells)
    starts.publish(second := cell_started(2))
    assert seen == [("first", first), ("second", first), ("first", second), ("second", second), ("late", second)]
    assert user_code.is_typed()
