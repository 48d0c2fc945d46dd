"""Code of a cell asks the user: input(), getpass(), and what ends a question.

Covers: real kernels whose front end takes input, and some that don't.
Does not cover: debuggers (``test_debuggers``), JupyterLab's input line (``tests/browser``).
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from ...support.notebook_driver import Notebook, execute_notebook
from ...support.process_tools import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ...support.notebook_driver import Outcome

START = "%dist_init -n 3 --launcher local --backend none"
NO_INPUT = (
    "this front end takes no input, as nbconvert and papermill; read it in a notebook cell and send it with %dist_push"
)


@pytest.fixture(scope="module")
def asked() -> Iterator[Notebook]:
    """A notebook with three ranks."""
    with Notebook() as notebook:
        notebook.run(START).check()
        yield notebook
        notebook.run("%dist_shutdown").check()


def answering(*answers: str | None) -> Callable[[str, Outcome], str | None]:
    left = iter(answers)
    return lambda _prompt, _outcome: next(left)


def test_each_rank_that_asks_is_asked_with_its_label(asked: Notebook) -> None:
    code = "%%distributed\nprint('before')\nname = input('name? ')\nprint(f'hello {name}')"
    outcome = asked.run(code, answer=answering("a", "b", "c")).check()
    assert outcome.prompts == ["rank 0: name? ", "rank 1: name? ", "rank 2: name? "]
    assert outcome.lines[0] == "ranks 0-2 │ before"
    assert sorted(outcome.lines[1:]) == ["rank 0 │ hello a", "rank 1 │ hello b", "rank 2 │ hello c"]


def test_one_rank_asks(asked: Notebook) -> None:
    outcome = asked.run("%%rank 2\ninput()", answer=answering("x")).check()
    assert (outcome.prompts, outcome.lines) == (["rank 2: "], ["'x'"])


def test_password_is_not_echoed(asked: Notebook) -> None:
    seen = []
    get = asked.client.get_stdin_msg

    def record(**options: object) -> dict[str, object]:
        message = get(**options)
        seen.append(message["content"])
        return message  # type: ignore[no-any-return]

    asked.client.get_stdin_msg = record
    try:
        outcome = asked.run("%%rank 1\nimport getpass\nlen(getpass.getpass('PIN: '))", answer=answering("1234")).check()
    finally:
        del asked.client.get_stdin_msg
    assert seen == [{"prompt": "rank 1: PIN: ", "password": True}]
    assert outcome.lines == ["4"]


@pytest.mark.parametrize(
    ("code", "what", "reason"),
    [
        ("input('name? ')", "input('name? ')", NO_INPUT),
        ("import getpass; getpass.getpass('PIN? ')", "getpass('PIN? ')", NO_INPUT),
        ("import sys; sys.stdin.read()", "reading sys.stdin", "use input(), which asks in the notebook"),
        ("import sys\nfor line in sys.stdin: pass", "reading sys.stdin", "use input(), which asks in the notebook"),
    ],
)
def test_refused_question_reports_the_reason(asked: Notebook, code: str, what: str, reason: str) -> None:
    outcome = asked.run(f"%%distributed\n{code}\nx = 1")
    assert outcome.error.endswith(f"InputOnRankError: {what} can't be answered on a rank: {reason}")
    assert outcome.text.startswith("ranks 0-2 (")
    assert "jupyter_disttrain" not in outcome.text  # no frames of ours


def test_nbclient_refuses_and_code_can_do_without_an_answer() -> None:
    code = "%%distributed\ntry: answer = input('sure? ')\nexcept EOFError: answer = 'yes'\nanswer"
    notebook = execute_notebook(["%load_ext jupyter_disttrain", START, code, "%dist_shutdown"])
    assert "'yes'" in str(notebook.cells[2].outputs)


def test_only_the_main_thread_of_the_rank_asks(asked: Notebook) -> None:
    code = """%%rank 0
import concurrent.futures, os
with concurrent.futures.ThreadPoolExecutor(1) as pool:
    print(pool.submit(input, 'x? ').exception())
if not os.fork():
    try: input('x? ')
    except EOFError as error: print(error, flush=True)
    os._exit(0)
os.wait()[1]"""
    outcome = asked.run(code, answer=answering()).check()
    assert "can't be answered on a rank: only the main thread can ask" in outcome.text
    assert "can't be answered on a rank: only the rank itself can ask" in outcome.text


def test_interrupt_ends_the_question_and_the_cell(asked: Notebook) -> None:
    def interrupt(_prompt: str, _outcome: Outcome) -> None:
        asked.interrupt()

    outcome = asked.run("%%distributed\nkept = rank\ninput('x? ')", answer=interrupt)
    assert outcome.error.endswith("KeyboardInterrupt")
    assert "ranks 0-2" in outcome.text
    assert len(outcome.prompts) == 1
    assert asked.run("%%distributed\nkept").check().lines == ["rank 0 │ 0", "rank 1 │ 1", "rank 2 │ 2"]


def test_question_of_a_rank_that_dies_is_withdrawn(asked: Notebook) -> None:
    asked.run("%%distributed -o pids\nimport os; os.getpid()").check()
    pid = int(asked.run("print(pids[1])").check().text)

    def kill(prompt: str, _outcome: Outcome) -> str | None:
        if prompt.startswith("rank 0"):
            return "answer"
        os.kill(pid, signal.SIGKILL)
        return None

    outcome = asked.run("%%rank [0,1]\ninput('x? ')", answer=kill)
    assert outcome.prompts == ["rank 0: x? ", "rank 1: x? "]
    assert "rank 1" in outcome.error
    assert "SIGKILL" in outcome.error
    assert asked.run("%%distributed\nrank").check().lines == ["rank 0 │ 0", "rank 1 │ 1", "rank 2 │ 2"]


def test_timeout_of_the_cell_withdraws_the_question(asked: Notebook) -> None:
    outcome = asked.run("%%rank 0 --timeout 0.5\ninput('x? ')", answer=answering(None))
    assert "ran longer than 0.5 s" in outcome.error
    assert asked.run("%%rank 0\n1 + 1").check().lines == ["2"]


def test_cell_in_the_background_asks_when_it_is_waited_for(asked: Notebook) -> None:
    asked.run("%%distributed --noblock\nprint('x is', input('x? '))", answer=answering()).check()
    outcome = asked.run("%dist_wait", answer=answering("1", "2", "3")).check()
    assert outcome.prompts == ["rank 0: x? ", "rank 1: x? ", "rank 2: x? "]
    assert outcome.lines == ["rank 0 │ x is 1", "rank 1 │ x is 2", "rank 2 │ x is 3"]


def test_where_names_what_waits_for_the_user(asked: Notebook) -> None:
    asked.run("%%distributed --noblock\nif rank: breakpoint()\nelse: input('x? ')", answer=answering()).check()
    expected = "rank 0: input() waits for the user at line 3: else: input('x? ')\n"
    expected += "ranks 1-2: a debugger waits for the user at line 2: if rank: breakpoint()"
    assert wait_until(lambda: asked.run("%dist_where").check().text == expected)
    asked.run("%dist_wait", answer=answering("1", "cast c")).check()


class NotebookLeftError(Exception):
    """The kernel was killed while it asked."""


def test_open_question_is_asked_in_the_next_notebook() -> None:
    first = Notebook()

    def answer_one(prompt: str, _outcome: Outcome) -> str:
        if prompt == "rank 0: one? ":
            return "1"
        os.kill(first.pid, signal.SIGKILL)
        raise NotebookLeftError

    code = "%%distributed\none = input('one? ') if rank == 0 else 0\ntwo = input('two? ')\nprint(one, two)"
    try:
        first.run(f"{START} --keep --name passed-on").check()
        with pytest.raises(NotebookLeftError):
            first.run(code, answer=answer_one)
    finally:
        first.close()
    with Notebook() as second:
        outcome = second.run("%dist_attach passed-on", answer=answering("2", "3", "4")).check()
        assert outcome.prompts == ["rank 0: two? ", "rank 1: two? ", "rank 2: two? "]
        assert outcome.lines[-3:] == ["rank 0 │ 1 2", "rank 1 │ 0 3", "rank 2 │ 0 4"]
        second.run("%dist_shutdown").check()
