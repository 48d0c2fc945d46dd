"""Wait for a cell whose ranks are simulated, enforce its timeout, ask ranks that die meanwhile."""

from __future__ import annotations

import queue
import signal
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from jupyter_disttrain.client.cells import cell_run, push_pull
from jupyter_disttrain.client.cells.cell_run import CellRun
from jupyter_disttrain.client.cells.events import Asked, Event, Printed, Replied
from jupyter_disttrain.client.cells.executor import Cells
from jupyter_disttrain.client.startup.rank_table import RankEntry
from jupyter_disttrain.errors import CellTimeoutError, ClusterClosedError, InputRefusedError, UsageError
from jupyter_disttrain.features.telemetry.client import Telemetry
from jupyter_disttrain.protocol.messages import Question
from jupyter_disttrain.protocol.requests import AnswerQuestion, Pull
from jupyter_disttrain.protocol.states import RankState

from ..records import rank_info

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from jupyter_disttrain.client.cells.cell_run import Listener

REMARKS = SimpleNamespace(of_values=lambda _cell: [])
CALM = SimpleNamespace(
    remarks=REMARKS, wait_until_settled=lambda _timeout_s: True, take_notes=list, out_of_step=list, waits_for=""
)


def run_of(
    ranks: tuple[int, ...], interrupt: Callable[..., None] = lambda *_, **__: None, listener: Listener | None = None
) -> CellRun:
    hosts = dict.fromkeys(ranks, "vm")
    to_ranks = cast("Any", SimpleNamespace(interrupt=interrupt, answer=lambda *_: None))
    return CellRun(1, ranks, hosts, to_ranks, cast("Any", CALM), listener, lambda _: "%dist_reset", lambda _: None)


def replied(rank: int, **content: object) -> Replied:
    return Replied(rank=rank, time_s=1.0, content={"status": "ok", **content}, buffers=[], quiet=True)


def printed(rank: int, text: str) -> Printed:
    return Printed(rank=rank, time_s=1.0, stream="stdout", text=text)


class InterruptedQueue(queue.SimpleQueue[Any]):
    """A queue whose reader is interrupted as it takes the first reply."""

    was_interrupted = False

    def get(self, *args: Any, **options: Any) -> Any:
        event = super().get(*args, **options)
        if isinstance(event, Replied) and not self.was_interrupted:
            self.was_interrupted = True
            raise KeyboardInterrupt
        return event


def test_interrupt_while_an_event_is_handled_keeps_no_cell_from_ending() -> None:
    run = run_of((0, 1))
    run._events = InterruptedQueue()
    run.put(replied(0))
    run.put(replied(1))
    with pytest.raises(KeyboardInterrupt):
        run.wait()
    assert run.done


class UnpausedQueue(queue.SimpleQueue):  # type: ignore[type-arg]
    """A queue that nothing waits for."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        assert not block or timeout == 0.0
        return super().get(block, timeout)


def test_wait_for_a_cell_that_has_ended_or_was_abandoned_does_not_pause() -> None:
    ended, abandoned = run_of((0,)), run_of((0,))
    ended.put(replied(0))
    ended.wait()
    abandoned.abandon("was detached")
    for run in (ended, abandoned):
        run._events = UnpausedQueue()
    assert ended.wait() is ended
    with pytest.raises(ClusterClosedError, match="was detached"):
        abandoned.wait()


class Recorder:
    """A listener that records the running ranks at each event, and ends the cell at the first."""

    def __init__(self) -> None:
        self.seen: list[tuple[Event, frozenset[int]]] = []

    def on_events(self, events: Sequence[Event], run: CellRun) -> None:
        for event in events:
            if not self.seen:
                run.put(replied(1))
            self.seen.append((event, run.state.running))

    def on_end(self, run: CellRun) -> None:
        pass

    def on_late(self, event: Event) -> None:
        pass


def test_listener_gets_every_event_although_the_state_is_ahead() -> None:
    recorder = Recorder()
    run = run_of((0, 1), listener=recorder)
    events = [printed(1, "a\n"), replied(0), printed(1, "b\n")]
    for event in events:
        run.put(event)
    running = run.state.running
    assert run.wait().stdout == {0: "", 1: "a\nb\n"}
    assert [event for event, _ in recorder.seen] == [*events, recorder.seen[-1][0]]
    assert [running for _, running in recorder.seen] == [frozenset()] * 4
    assert running == {1}, "a set that was read stays as it was"


def test_late_output_waits_until_what_came_before_the_end_is_shown() -> None:
    is_late = threading.Event()

    class Slow(Recorder):
        """Takes what is left at the end while the next event arrives."""

        def on_events(self, events: Sequence[Event], run: CellRun) -> None:  # noqa: ARG002
            assert [getattr(event, "text", "") for event in events] == ["", "last"]
            thread.start()
            assert not is_late.wait(0.1)

    run = run_of((0,), listener=Slow())
    thread = threading.Thread(target=lambda: (run.put(printed(0, "late")), is_late.set()))
    run.put(replied(0))
    run.put(printed(0, "last"))
    run._end()
    assert is_late.wait(30)
    thread.join()


class Interrupts:
    """The interrupts that a cell sends to its ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cell_run, "INTERRUPT_GRACE_SECONDS", 0.0)
        self.sent: queue.SimpleQueue[tuple[set[int], bool]] = queue.SimpleQueue()

    def __call__(self, ranks: Collection[int], *, forced: bool) -> None:
        self.sent.put((set(ranks), forced))

    def take(self) -> list[tuple[set[int], bool]]:
        return [self.sent.get(timeout=30) for _ in range(2)]


def test_timeout_interrupts_ranks_although_no_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts = Interrupts(monkeypatch)
    run = run_of((0, 1), interrupts)
    run.put(replied(0))
    run.limit(0.0)
    assert interrupts.take() == [({1}, False), ({1}, True)]
    run.put(replied(1, status="error", ename="KeyboardInterrupt"))
    with pytest.raises(CellTimeoutError, match=r"^the cell ran longer than 0 s and was interrupted$"):
        run.wait()


def test_timeout_of_a_cell_that_has_ended_interrupts_nothing() -> None:
    sent: list[object] = []
    run = run_of((0,), lambda ranks, **_: sent.append(ranks))
    run.limit(1000.0)
    (thread,) = [each for each in threading.enumerate() if each.name == "disttrain cell timeout"]
    run.put(replied(0))
    thread.join()
    assert run.wait().timed_out is False
    assert sent == []


def test_wait_after_a_timeout_waits_and_a_second_timeout_interrupts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts = Interrupts(monkeypatch)
    run = run_of((0, 1), interrupts)
    for _ in range(2):
        with pytest.raises(CellTimeoutError, match="interrupted after its timeout; ranks 0-1 have not ended the cell"):
            run.wait(0.0)
        assert interrupts.take() == [({0, 1}, False), ({0, 1}, True)]
    run.put(replied(0))
    run.put(replied(1))
    with pytest.raises(CellTimeoutError, match=r"^the cell ran longer than 0 s and was interrupted$"):
        run.wait()


def entry(rank: int) -> RankEntry:
    info = rank_info(rank, 2)
    return RankEntry(info=info, engine=f"engine{rank}", nanny=f"nanny{rank}", nanny_pid=rank)


def test_request_to_a_rank_that_is_replaced_meanwhile_fails() -> None:
    table = [entry(0), entry(1)]

    def request(engine: str, *_: Any, **__: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if engine == "engine0":
            future.set_result({"content": {"status": "ok"}})
        else:
            table[1].state, table[1] = RankState.DEAD, entry(1)
        return future

    launch = SimpleNamespace(table=table, open_link=SimpleNamespace(request=request))
    with pytest.raises(UsageError, match=r"rank 1 \(vm\) died before it replied"):
        push_pull.ask(cast("Any", launch), [0, 1], Pull(names=["x"]))


def cells_of(table: list[RankEntry], interrupt: Callable[..., None] = lambda _ranks: None, **supervisor: Any) -> Cells:
    launch = SimpleNamespace(table=table, stuck_remedy=lambda _ranks: "%dist_reset")
    supervising: Any = SimpleNamespace(**supervisor)
    return Cells(cast("Any", launch), supervising, Telemetry(1.0, print), cast("Any", None), 0, interrupt)


def test_rank_that_dies_after_an_interrupt_is_not_reported_as_having_ended_its_cell() -> None:
    table = [entry(0), entry(1)]
    for each in table:
        each.state, each.cell = RankState.RUNNING, 3

    def until_idle(_ranks: Collection[int], _timeout_s: float) -> bool:
        table[0].state = RankState.IDLE
        table[1].state, table[1] = RankState.DEAD, entry(1)
        return True

    cells = cells_of(table, wait_until_idle=until_idle)
    assert cells.interrupt_and_wait((0, 1)) == [
        "rank 0 has ended cell 3",
        "rank 1 died in cell 3",
    ]


def test_interrupt_of_a_cell_reaches_no_rank_that_runs_the_next_one() -> None:
    table, sent = [entry(0), entry(1)], list[list[int]]()
    cells = cells_of(table, lambda ranks, **_: sent.append(ranks))
    run = cells._open(1, (0, 1), None)
    for each in table:
        each.request = f"first{each.info.rank}"
        cells._cells[each.request] = (run, each.info.rank)
    table[0].request = "second0"
    run._to_ranks.interrupt((0, 1), forced=False)
    assert sent == [[1]]


def test_output_without_a_place_goes_to_the_cell_that_was_sent_last_or_to_the_next() -> None:
    table = [entry(0), entry(1)]
    cells = cells_of(table, on_death=None)
    background, current = cells._open(1, (1,), None), cells._open(2, (0,), None)
    cells._cells |= {"background": (background, 1), "current": (current, 0)}
    late = [printed(0, "a"), printed(0, "b")]
    message = {"parent_header": {"msg_id": "gone"}}
    cells.count = 2
    cells.take(table[0], message, late[0])
    assert current.stdout == {0: "a"}
    cells.count = 3
    cells.take(table[0], message, late[1])
    assert background.stdout == {1: ""}
    assert list(cells._late) == [late[1]]


class Asker(Recorder):
    """A listener that asks; ``answer`` gives each answer, or raises."""

    def __init__(self, answer: Callable[[Asked], str]) -> None:
        super().__init__()
        self.answer = answer

    def on_events(self, events: Sequence[Event], run: CellRun) -> None:
        pass

    def before_question(self, hint: str) -> None:
        pass

    def ask(self, question: Asked) -> str:
        return self.answer(question)


def ask_of(listener: Listener | None) -> tuple[CellRun, list[AnswerQuestion]]:
    """Return a cell of one rank that asks, and its answers; the cell ends with the answer."""
    answers: list[AnswerQuestion] = []
    run = run_of((0,), listener=listener)

    def take(_rank: int, answer: AnswerQuestion) -> None:
        answers.append(answer)
        run.put(replied(0))

    run._to_ranks.answer = take  # type: ignore[method-assign]
    run.put(Asked(rank=0, time_s=1.0, record=Question(number=1, prompt="x? ")))
    return run, answers


def test_answer_of_the_user_is_sent() -> None:
    run, answers = ask_of(Asker(lambda question: f"to {question.record.prompt}"))
    run.wait()
    assert answers == [AnswerQuestion(number=1, text="to x? ")]


def test_end_of_input_is_sent() -> None:
    def end(_question: Asked) -> str:
        raise EOFError

    run, answers = ask_of(Asker(end))
    run.wait()
    assert answers == [AnswerQuestion(number=1, is_end=True)]


@pytest.mark.parametrize("listener", [None, Recorder(), "refuses"])
def test_question_that_cannot_be_asked_is_refused(listener: Listener | str | None) -> None:
    def refuse(_question: Asked) -> str:
        raise InputRefusedError("this front end takes no input")

    run, answers = ask_of(Asker(refuse) if isinstance(listener, str) else listener)
    run.wait()
    assert "read it in a notebook cell" in answers[0].refusal


def test_lost_cluster_ends_the_prompt() -> None:
    def lose(_question: Asked) -> str:
        run.abandon("the cluster is lost")
        signal.pause()  # the withdrawal ends it
        return "never"

    run, answers = ask_of(Asker(lose))
    with pytest.raises(ClusterClosedError):
        run.wait()
    assert answers == []
