"""Which question the user is asked next, and who gets the answer, without ranks."""

from __future__ import annotations

from jupyter_disttrain.client.cells.events import Asked, AskingEnded, Died, Replied
from jupyter_disttrain.client.cells.open_questions import OpenQuestions
from jupyter_disttrain.protocol.messages import Question, QuestionEnded
from jupyter_disttrain.protocol.rank_death import RankDeath

RANKS = (0, 1, 2)
LATER = 100.0  # after each wait


def asked(rank: int, number: int = 1, *, is_debugger: bool = False) -> Asked:
    return Asked(rank=rank, time_s=1.0, record=Question(number=number, prompt="? ", is_debugger=is_debugger))


def ended(rank: int, number: int) -> AskingEnded:
    return AskingEnded(rank=rank, time_s=1.0, record=QuestionEnded(number=number))


def questions_of(*events: Asked) -> OpenQuestions:
    questions = OpenQuestions()
    for event in events:
        questions.apply(event)
    assert questions.next(0.0, ()) is not None
    return questions


def debuggers(*ranks: int) -> OpenQuestions:
    return questions_of(*(asked(rank, is_debugger=True) for rank in ranks))


def rank_of(questions: OpenQuestions, now: float = LATER) -> int | None:
    question = questions.next(now, RANKS)
    return None if question is None else question.rank


def answer(questions: OpenQuestions, text: str, now: float = LATER) -> dict[int, tuple[int, str]]:
    question = questions.next(now, ())
    assert question is not None
    return questions.take_answer(question, text, now)


def test_first_question_waits_a_moment_for_lower_ranks() -> None:
    questions = OpenQuestions()
    questions.apply(asked(2))
    assert rank_of(questions, 1.0) is None
    questions.apply(asked(1))
    assert rank_of(questions, 1.1) is None
    assert rank_of(questions, 1.3) == 1
    questions.apply(asked(0))
    assert rank_of(questions, 1.3) == 0


def test_first_question_does_not_wait_if_all_have_asked() -> None:
    questions = OpenQuestions()
    for rank in RANKS:
        questions.apply(asked(rank))
    assert rank_of(questions, 1.0) == 0


def test_answer_goes_to_its_rank_and_the_next_is_asked() -> None:
    questions = questions_of(asked(0), asked(2, number=7))
    assert answer(questions, "a") == {0: (1, "a")}
    assert answer(questions, "cast b") == {2: (7, "cast b")}  # no debugger
    assert rank_of(questions) is None


def test_question_ends_with_its_rank() -> None:
    for end in (
        ended(0, 1),
        Replied(rank=0, time_s=1.0, content={"status": "ok"}, buffers=[], quiet=True),
        Died(rank=0, time_s=1.0, record=RankDeath(engine="e", pid=1, host="h")),
    ):
        questions = questions_of(asked(0))
        question = questions.next(LATER, ())
        assert question is not None
        questions.apply(end)
        assert not questions.is_open(question)
        assert questions.take_answer(question, "late", LATER) == {}
        assert rank_of(questions) is None


def test_end_of_an_earlier_question_changes_nothing() -> None:
    questions = questions_of(asked(0, number=2))
    questions.apply(ended(0, 1))
    assert rank_of(questions) == 0


def test_debugger_that_got_a_command_asks_next() -> None:
    questions = debuggers(0, 1)
    assert answer(questions, "n", 10.0) == {0: (1, "n")}
    assert rank_of(questions, 10.1) is None  # it may ask again soon
    questions.apply(asked(0, number=2, is_debugger=True))
    assert rank_of(questions, 10.1) == 0


def test_another_debugger_asks_if_the_code_does_not_come_back() -> None:
    questions = debuggers(0, 1)
    answer(questions, "n", 10.0)
    assert rank_of(questions, 10.6) == 1
    questions.apply(asked(0, number=2, is_debugger=True))
    assert rank_of(questions, 10.7) == 0  # its turn


def test_cast_reaches_all_debuggers_and_no_input() -> None:
    questions = questions_of(asked(0, is_debugger=True), asked(1), asked(2, is_debugger=True))
    assert answer(questions, " cast p x + 1", 10.0) == {0: (1, "p x + 1"), 2: (1, "p x + 1")}
    questions.apply(asked(0, number=2, is_debugger=True))
    assert rank_of(questions, 10.1) is None  # the output of both is shown together
    questions.apply(asked(2, number=2, is_debugger=True))
    assert rank_of(questions, 10.1) == 0


def test_rank_switches_to_another_debugger() -> None:
    questions = debuggers(0, 2)
    assert answer(questions, "rank 2") == {}
    assert rank_of(questions) == 2
    assert answer(questions, "rank 1") == {}
    question = questions.next(LATER, ())
    assert question is not None
    assert question.rank == 2
    assert questions.hint(question) == "rank 1 doesn't wait in a debugger; ranks 0,2 can be named"
    assert answer(questions, "rank") == {2: (1, "rank")}  # the variable


def test_interrupted_question_is_not_asked_again_soon() -> None:
    questions = questions_of(asked(0), asked(1))
    questions.on_interrupt(10.0)
    assert rank_of(questions, 10.1) is None
    questions.apply(asked(1, number=2))  # the code handled the interrupt and asks again
    assert questions.next(10.5, ()) is not None
    assert rank_of(questions, 13.0) == 0  # the interrupt had no effect


def test_hint_names_the_other_debuggers_once() -> None:
    questions = debuggers(0, 1, 2)
    first = questions.next(LATER, ())
    assert first is not None
    hint = questions.hint(first)
    assert hint.startswith("ranks 1-2 also wait in a debugger: 'cast COMMAND'")
    assert questions.hint(first) == ""
    assert questions_of(asked(0), asked(1)).hint(asked(0)) == ""
