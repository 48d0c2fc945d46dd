"""An interrupt at any moment: none falls between sending a cell and waiting for it."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.cluster.interrupts import PATIENT_INTERRUPTS, held_interrupts
from jupyter_disttrain.errors import RankFailure

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def ranks() -> Iterator[Cluster]:
    """Two ranks without torch or MPI."""
    with Cluster(n=2, launcher="local", backend="none", name="interrupts") as cluster:
        yield cluster


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


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
    assert len(pressed) == PATIENT_INTERRUPTS + 1


def test_an_interrupt_while_a_cell_is_sent_interrupts_it_on_every_rank(
    ranks: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = ranks._open_cells
    send = cells._send_to_rank

    def send_and_press(run: object, rank: int, *rest: object) -> None:
        if rank == 1:
            press()  # rank 0 has its request by now
        send(run, rank, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(cells, "_send_to_rank", send_and_press)
        with pytest.raises(RankFailure) as caught:
            ranks.run("import time\nwhile True: time.sleep(0.01)")
    assert set(caught.value.by_rank) == {0, 1}
    assert ranks.run("rank").results == {0: 0, 1: 1}
