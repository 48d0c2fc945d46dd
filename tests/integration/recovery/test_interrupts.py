"""An interrupt at any moment: none is lost between sending a cell and waiting for it."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from jupyter_disttrain.errors import RankFailure
from jupyter_disttrain.sigint import PATIENT_INTERRUPTS

from ...support.listeners import IgnoringListener
from ...support.notebook_driver import plain
from ...support.process_tools import send_sigint, wait_until
from ...support.recovery_tools import failure_of, stop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from jupyter_disttrain import Cluster
    from jupyter_disttrain.client.cells.cell_run import CellRun
    from jupyter_disttrain.client.cells.events import Event
    from jupyter_disttrain.client.startup.rank_table import RankEntry
    from jupyter_disttrain.client.transport.link import Message


def test_two_simultaneous_interrupts_are_two_for_the_ranks(
    torchless: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begin = f"open({str(tmp_path)!r} + f'/{{rank}}', 'w').close()"
    stubborn = f"import time\n{begin}\ntry: time.sleep(100)\nexcept KeyboardInterrupt: pass\ntime.sleep(100)"
    cells = torchless._session.open_cells
    interrupt = cells._interrupt

    def interrupt_and_signal(chosen: object, *, forced: bool) -> None:
        interrupt(chosen, forced=forced)
        if not forced:
            send_sigint()  # a double click

    monkeypatch.setattr(cells, "_interrupt", interrupt_and_signal)

    def interrupt_once_both_run() -> None:
        assert wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        send_sigint()

    user = threading.Thread(target=interrupt_once_both_run)
    user.start()
    with pytest.raises(RankFailure, match="KeyboardInterrupt") as caught:
        torchless.run(stubborn)
    user.join()
    (failure,) = caught.value.failures
    assert (failure.ranks, failure.line) == ((0, 1), 5)


class InterruptBurst(IgnoringListener):
    """Interrupt repeatedly once the cell has printed something, as a held key does."""

    def __init__(self, count: int = 2 * PATIENT_INTERRUPTS) -> None:
        self.sent = 0
        self._count = count

    def on_events(self, events: Sequence[Event], run: CellRun) -> None:  # noqa: ARG002
        while events and self.sent < self._count:
            self.sent += 1
            signal.raise_signal(signal.SIGINT)


def test_burst_of_interrupts_does_not_abandon_responding_ranks(torchless: Cluster) -> None:
    burst = InterruptBurst()
    with pytest.raises(RankFailure, match="KeyboardInterrupt"):
        torchless.run("import time\nprint('on', flush=True)\nwhile True: time.sleep(0.01)", listener=burst)
    assert burst.sent == 2 * PATIENT_INTERRUPTS
    assert torchless.run("rank").results == {0: 0, 1: 1}


def test_ranks_that_react_late_to_a_burst_are_not_abandoned(torchless: Cluster) -> None:
    code = """import time
heard = 0
while heard < 3:
    try:
        print('on', flush=True)
        time.sleep(100)
    except KeyboardInterrupt: heard += 1
time.sleep(2)
heard"""
    assert torchless.run(code, 0, listener=InterruptBurst(count=3)).results == {0: 3}


def test_interrupt_at_the_end_of_a_loop_is_shown_with_its_line(torchless: Cluster, tmp_path: Path) -> None:
    """Python 3.11 handles signals in the jump back, which has no line of its own if the loop ends with an if."""
    begin = f"open({str(tmp_path)!r} + f'/{{rank}}', 'w').close()"
    run = torchless.run(f"{begin}\nfor i in range(10**12):\n    if i < 0:\n        pass", block=False)
    assert wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    failures = stop(torchless, run).failures
    assert {failure.ename for failure in failures} == {"KeyboardInterrupt"}
    assert {failure.line for failure in failures} <= {1, 2, 3, 4}
    assert all("----> " in plain("".join(failure.traceback)) for failure in failures)


def test_interrupt_while_an_error_is_reported_loses_neither(torchless: Cluster) -> None:
    """The error's text is read while its traceback is formatted: that is when the interrupt comes."""
    interrupting = """
import signal
class SlowError(Exception):
    is_read = False
    def __str__(self):
        is_read, self.is_read = self.is_read, True
        if not is_read:
            signal.raise_signal(signal.SIGINT)
        return "what happened"
def later():
    return len(range(3))
"""
    torchless.run(interrupting)
    outcome = failure_of(torchless, "raise SlowError()")
    (failure,) = outcome.failures
    assert (failure.ename, failure.evalue, failure.line) == ("SlowError", "what happened", 1)
    assert failure.traceback[-1].endswith("SlowError\x1b[39m: what happened")
    # An interrupt while a handled error is formatted still interrupts the cell.
    error = failure_of(
        torchless, "try: raise SlowError()\nexcept SlowError: get_ipython().showtraceback()\nwhile later(): pass"
    )
    (failure,) = error.failures
    assert failure.ename == "KeyboardInterrupt"
    assert torchless.run("later()").results == {0: 3, 1: 3}


def test_interrupt_while_a_cell_is_sent_interrupts_it_on_every_rank(
    torchless: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = torchless._session.open_cells
    begin = cells._begin

    def begin_and_interrupt(run: CellRun, entry: RankEntry, *rest: Any) -> Callable[[Message], None]:
        if entry.info.rank == 1:
            send_sigint()  # rank 0 has its request by now
        return begin(run, entry, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(cells, "_begin", begin_and_interrupt)
        failure = failure_of(torchless, "import time\nwhile True: time.sleep(0.01)")
    assert set(failure.by_rank) == {0, 1}
    assert torchless.run("rank").results == {0: 0, 1: 1}


def test_interrupt_right_before_a_build_leaves_no_lock_file(started: Callable[[str], Cluster], tmp_path: Path) -> None:
    ranks = started("local")  # with torch, whose builds they are
    ranks.run("""
import functools, signal
from pathlib import Path
from torch.utils.file_baton import FileBaton
is_symlink = Path.is_symlink  # called right before the file is made
press = functools.partial(signal.raise_signal, signal.SIGINT)
def build(folder):
    baton = FileBaton(f"{folder}/lock")
    if baton.try_acquire():
        try:
            raise RuntimeError("nobody was interrupted")
        finally:
            baton.release()
""")
    # In this package's code, where it is deferred, and in the cell's.
    for way in ("press", "lambda path: press()"):
        ranks.run(f"Path.is_symlink = {way}")
        with pytest.raises(RankFailure, match="KeyboardInterrupt"):
            ranks.run(f"build({str(tmp_path)!r})", ranks=0)
        ranks.run("Path.is_symlink = is_symlink")
        assert not (tmp_path / "lock").is_symlink()
    with pytest.raises(RankFailure, match="nobody was interrupted"):
        ranks.run(f"build({str(tmp_path)!r})", ranks=1)


def test_build_of_a_killed_rank_is_taken_over(started: Callable[[str], Cluster], tmp_path: Path) -> None:
    ranks = started("local")
    ranks.run(f"import os\nfrom torch.utils.file_baton import FileBaton\nbaton = FileBaton({str(tmp_path / 'lock')!r})")
    with pytest.raises(RankFailure, match="SIGKILL"):
        ranks.run("baton.try_acquire() and os.kill(os.getpid(), 9)", ranks=0)
    assert ranks.run("baton.try_acquire() and baton.release() is None", ranks=1).results == {1: True}
    assert wait_until(lambda: ranks.table[0].state == "idle", 60)


@pytest.mark.parametrize(
    "code",
    [
        "import asyncio; print('begun', flush=True); await asyncio.sleep(100)",
        "import asyncio; print('begun', flush=True); await asyncio.gather(asyncio.sleep(100), asyncio.sleep(100))",
        "%%bash\necho begun; sleep 100",
    ],
)
def test_await_and_bash_are_interrupted_like_any_other_code(torchless: Cluster, code: str) -> None:
    run = torchless.run(code, block=False)
    assert wait_until(lambda: set(run.stdout.values()) == {"begun\n"})
    error = stop(torchless, run)
    (failure,) = error.failures
    assert (failure.ranks, failure.line, failure.ename) == ((0, 1), 1, "KeyboardInterrupt")
    assert not any("site-packages" in line or "asyncio/" in line for line in failure.traceback)


def test_interrupt_that_has_not_ended_a_system_call_ends_it_a_moment_later(torchless: Cluster) -> None:
    """As one that arrives just before the call: Python has noted it, and the system has begun the call."""
    wait = "import os, signal\nsignal.siginterrupt(signal.SIGINT, False)\nprint('begun')\nos.read(os.pipe()[0], 1)"
    run = torchless.run(wait, block=False)
    assert wait_until(lambda: set(run.stdout.values()) == {"begun\n"})
    (failure,) = stop(torchless, run).failures
    assert (failure.ranks, failure.line, failure.ename) == ((0, 1), 4, "KeyboardInterrupt")
