"""Checks of ``jupyter disttrain doctor``.

Does not cover: the command as a user runs it (``tests/integration/test_doctor.py``), machines with GPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jupyter_disttrain.doctor import examine
from jupyter_disttrain.doctor.finding import Finding, ok

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_check_that_raises_is_an_error_and_other_checks_run() -> None:
    def fail_midway() -> Iterator[Finding]:
        yield ok("first", "seen")
        raise KeyError("lost")

    first, second = examine("made up", fail_midway)
    assert first == ok("first", "seen")
    assert second.status == "error"
    assert "KeyError: 'lost'" in second.text
    assert second.remedy is not None
