"""``jupyter disttrain doctor``, run as a person runs it.

Covers: what it finds on this machine, a broken mpiexec, a check that fails itself, that torch stays out of its process.
Does not cover: machines with GPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jupyter_disttrain.doctor import Check, examine
from jupyter_disttrain.doctor.finding import Finding, ok

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_a_check_that_fails_itself_is_an_error_and_hides_nothing() -> None:
    def fail_midway() -> Iterator[Finding]:
        yield ok("first", "seen")
        raise KeyError("lost")

    first, second = examine(Check(group="made up", find=fail_midway))
    assert first == ok("first", "seen")
    assert second.status == "error"
    assert "KeyError: 'lost'" in second.text
    assert second.remedy is not None
