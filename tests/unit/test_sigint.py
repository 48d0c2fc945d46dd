"""Deferred SIGINT: no interrupt is lost between sending a cell and waiting for it."""

from __future__ import annotations

import signal

import pytest

from jupyter_disttrain.sigint import PATIENT_INTERRUPTS, held_interrupts

from ..support.process_tools import send_sigint


def test_deferred_interrupt_is_raised_at_the_end() -> None:
    seen = []

    def work() -> None:
        with held_interrupts():
            send_sigint()
            seen.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert seen == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handled_interrupt_is_not_raised() -> None:
    with held_interrupts() as held:
        send_sigint()
        with held_interrupts() as inner:
            assert inner is held
        assert held.waiting
        held.obeyed += 1


def test_repeated_interrupts_are_not_deferred() -> None:
    sent = []

    def work() -> None:
        with held_interrupts():
            while True:
                sent.append(1)
                send_sigint()

    with pytest.raises(KeyboardInterrupt):
        work()
    assert len(sent) > PATIENT_INTERRUPTS


def test_interrupt_is_raised_where_it_is_allowed_and_counts() -> None:
    with held_interrupts() as held:
        with pytest.raises(KeyboardInterrupt), held.raising():
            send_sigint()
        assert held.waiting
        send_sigint()  # deferred again
        assert held.pressed == 2
        held.obeyed = held.pressed


def test_withdrawing_ends_the_block_without_an_interrupt() -> None:
    with held_interrupts() as held:
        with pytest.raises(KeyboardInterrupt), held.raising():
            held.withdraw()
        assert not held.waiting
        held.withdraw()  # too late: the block was left
        assert not held.waiting
        send_sigint()
        assert held.waiting
        held.obeyed = held.pressed


def test_a_program_with_its_own_handler_is_left_alone() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: seen.append(number))
    try:
        with held_interrupts() as held, held.raising():
            held.withdraw()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == []
