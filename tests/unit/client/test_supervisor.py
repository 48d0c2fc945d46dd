"""What the supervisor reports to the user, with ranks that are only records."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain.client.recovery.state_machine import FORM_LIMIT, REPLACE_LIMIT
from jupyter_disttrain.errors import LaunchError

from .recorded import die

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_disttrain.client.lifecycle import Lifecycle


@pytest.mark.parametrize("part", ["replacer.replace", "assignment.form"])
@pytest.mark.parametrize("is_lost", [False, True])
def test_only_failures_after_which_nothing_is_tried_again_are_noted(
    part: str,
    is_lost: bool,
    started: Callable[..., Lifecycle],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lifecycle = started()
    session = lifecycle.session
    attempts: list[int] = []

    def fail(rank: int = 0) -> dict[str, list[int]]:
        attempts.append(rank)
        if is_lost or len(attempts) == 1:
            raise LaunchError("no more memory")
        return {}

    monkeypatch.setattr(session.launch.replacer, "replace", lambda _rank: None)
    monkeypatch.setattr(session.launch.assignment, "form", dict)
    monkeypatch.setattr(session.launch, "write", lambda: None)
    owner, name = part.split(".")
    monkeypatch.setattr(getattr(session.launch, owner), name, fail)
    die(lifecycle, 1)
    session.launch.table[1].state = session.launch.table[0].state  # as of the new process
    assert session.supervisor.wait_until_settled(60)
    notes = [note for note in session.supervisor.take_notes() if "no more memory" in note]
    assert len(attempts) == ({"replace": REPLACE_LIMIT, "form": FORM_LIMIT}[name] if is_lost else 2)
    assert len(notes) == is_lost
    assert all("%dist_reset starts the ranks again" in note for note in notes)
