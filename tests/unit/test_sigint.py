"""An interrupt at any moment: none falls between sending a cell and waiting for it."""

from __future__ import annotations

import signal

import pytest

from jupyter_disttrain.sigint import PATIENT_INTERRUPTS, held_interrupts

from ..support.process_tools import press


def test_what_comes_within_is_raised_at_the_end() -> None:
    seen = []

    def work() -> None:
        with held_interrupts():
            press()
            seen.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert seen == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_was_obeyed_is_not_raised() -> None:
    with held_interrupts() as held:
        press()
        with held_interrupts() as inner:
            assert inner is held
        assert held.waiting
        held.obeyed += 1


def test_who_presses_again_and_again_is_not_held_back() -> None:
    pressed = []

    def work() -> None:
        with held_interrupts():
            while True:
                pressed.append(1)
                press()

    with pytest.raises(KeyboardInterrupt):
        work()
    assert len(pressed) > PATIENT_INTERRUPTS
