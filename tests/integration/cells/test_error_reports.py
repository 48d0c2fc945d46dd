"""Which error a cell ends with, and how it and errors printed by the cell itself are shown."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import pytest

from jupyter_disttrain.errors import CellTimeoutError, RankFailure

from ...support.notebook_driver import plain
from ...support.process_tools import wait_until
from ...support.recovery_tools import failure_of, stop

if TYPE_CHECKING:
    from pathlib import Path

    from jupyter_disttrain import Cluster
    from jupyter_disttrain.protocol.messages import CellFailure

    from ...support.notebook_driver import Notebook


def shown(error: RankFailure) -> list[str]:
    """Return the lines that a notebook shows, without colours and the host name."""
    lines = "\n".join(error._render_traceback_()).splitlines()
    return [plain(re.sub(r" \(\S+\)(?=, line|$)", "", line)) for line in lines]


def only_failure(cluster: Cluster, code: str, **options: Any) -> CellFailure:
    (failure,) = failure_of(cluster, code, **options).failures
    return failure


KEEPS = """
def step():
    own = "of step"
    raise ValueError("kept")
def train(errors):
    own = "of train"
    try: step()
    except ValueError as error:
        errors.append(error)
        raise RuntimeError("ends the cell") from error
kept = []
train(kept)
"""
OWN = "tuple([frame.f_locals.get('own') for frame, _ in __import__('traceback').walk_tb({}.__traceback__)][-2:])"


def traceback_of(failure: CellFailure) -> str:
    return plain("\n".join(failure.traceback))


# Which error


def test_usage_error_is_attributed_to_its_cell_whatever_was_shown_before(torchless: Cluster) -> None:
    failure_of(torchless, "if rank == 1: raise ValueError('of another cell')")
    torchless.run("%tb")
    error = failure_of(torchless, "x = 1\n%timeit --nosuch 1")
    assert shown(error) == [
        "ranks 0-1, line 2",
        'UsageError: option --nosuch not recognized (allowed: "n:r:tcp:qov:")',
    ]
    assert not error.waited
    assert not any(error.run.stderr.values())  # it is not shown a second time
    torchless.run("try: raise RuntimeError('handled')\nexcept RuntimeError: get_ipython().showtraceback()")
    assert only_failure(torchless, "%nosuch").evalue == "Line magic function `%nosuch` not found."
    failure = only_failure(torchless, "try: raise KeyError('handled')\nexcept KeyError: pass\n%nosuch")
    assert (failure.ename, failure.line) == ("UsageError", 3)


HANDLERS = {
    "rich": "from rich import traceback; _ = traceback.install()",
    "custom": "get_ipython().set_custom_exc((Exception,), lambda self, kind, error, trace, tb_offset=None: None)",
    "hook": "import sys; sys.excepthook = lambda *error: print('hook')",
    "xmode": "%xmode Minimal",
}
RESTORE = """
import sys
shell, sys.excepthook = get_ipython(), sys.__excepthook__
for name in ("showtraceback", "_showtraceback", "showsyntaxerror"): vars(shell).pop(name, None)
shell.set_custom_exc((), None)
%xmode Context
"""


@pytest.mark.parametrize("handler", HANDLERS)
def test_error_is_known_whatever_shows_tracebacks(three: Cluster, handler: str) -> None:
    three.run(HANDLERS[handler])
    try:
        three.run("import weakref, gc\nclass Big: pass\nseen = []")
        code = "def fail():\n    big = Big(); seen.append(weakref.ref(big))\n    raise ValueError('one fails')\n"
        error = failure_of(three, f"{code}if rank == 1: fail()\ndist.barrier()")
        lines = shown(error)
        assert lines[0] == "rank 1, line 3"
        assert "ValueError: one fails" in lines
        assert "ranks 0,2 waited for rank 1 at line 5 and were released" in lines
        assert three.run("gc.collect(); [each() for each in seen]").results == {0: [], 1: [None], 2: []}
        failure = only_failure(three, "x = 1\ny = )")
        assert (failure.ename, failure.line) == ("SyntaxError", 2)
    finally:
        three.run(RESTORE)


@pytest.mark.parametrize(
    ("code", "where"),
    [
        ("import asyncio\nawait asyncio.sleep(0)\n1/0", "line 3: ZeroDivisionError: division by zero"),
        ("%%time\n1/0", "line 1: ZeroDivisionError: division by zero"),
        ("x = 1\n%run -i {file}\nnosuch", "line 3: NameError: name 'nosuch' is not defined"),
        ("class A:\n    def __repr__(self): return 1/0\nA()", "line 2: ZeroDivisionError: division by zero"),
        ("get_ipython().run_cell('1/0')\nraise KeyError(2)", "line 2: KeyError: 2"),
        (
            "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass E(Exception): x: int\nraise E(1)",
            "line 4: E: 1",
        ),
        ("e = ValueError('x')\ne.__notes__ = [1, None]\nraise e", "line 3: ValueError: x"),
        ("import sys\ndef f(): sys.exit('bye')\nf()", "line 2: SystemExit: bye"),
    ],
)
def test_error_is_the_one_that_left_the_cell(torchless: Cluster, tmp_path: Path, code: str, where: str) -> None:
    (tmp_path / "fails.py").write_text("1/0")
    failure = only_failure(torchless, code.replace("{file}", str(tmp_path / "fails.py")))
    assert failure.headline.partition(", ")[2] == where
    assert "jupyter_disttrain" not in traceback_of(failure)


def test_error_kept_by_the_user_keeps_its_variables(torchless: Cluster) -> None:
    failure_of(torchless, KEEPS)
    assert torchless.run(OWN.format("kept[0]")).results == dict.fromkeys((0, 1), ("of train", "of step"))
    failure_of(torchless, "kept = kept.pop()\nraise kept")
    assert torchless.run(OWN.format("kept")).results == dict.fromkeys((0, 1), ("of train", "of step"))
    failure_of(torchless, "del kept\n" + KEEPS.replace("kept = []\ntrain(kept)", "train([])"))
    assert torchless.run(OWN.format("__import__('sys').last_value.__cause__")).results == dict.fromkeys(
        (0, 1), (None, None)
    )


def test_traceback_printed_by_a_cell_keeps_its_position(notebook: Notebook, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("print('in the script')\n1/0")
    code = f"""%%distributed
print('first')
%run {tmp_path}/fails.py
print('second')
try: raise RuntimeError('handled')
except RuntimeError: get_ipython().showtraceback()
print('third')
_ = get_ipython().run_cell('raise KeyError(3)')
print('last')"""
    lines = notebook.run(code).check().lines
    assert all(line.startswith("ranks 0-1 ") or re.match(r" [│┃]", line) for line in lines), lines
    texts = [re.sub(r"^\D*0-1 [│┃] ", "", line) for line in lines]
    order = [
        "first",
        "in the script",
        "ZeroDivisionError: division by zero",
        "second",
        "RuntimeError: handled",
        "third",
    ]
    places = [texts.index(line) for line in [*order, "KeyError: 3", "last"]]
    assert places == sorted(places)


def test_exit_after_an_interrupt_is_at_the_line_of_this_cell(torchless: Cluster, tmp_path: Path) -> None:
    library = "import sys\ndef fit(step):\n    try: step()\n    except KeyboardInterrupt: sys.exit(1)\n"
    (tmp_path / "library_that_exits.py").write_text(library)
    torchless.run(
        f"import os, signal, sys; sys.path.insert(0, {str(tmp_path)!r})\nimport library_that_exits\n\n"
        "def step():\n    os.kill(os.getpid(), signal.SIGINT)\n    while True: pass"
    )
    failure = only_failure(torchless, "x = 1\nlibrary_that_exits.fit(step)")
    assert failure.headline.partition(", ")[2] == "line 2: KeyboardInterrupt"
    text = traceback_of(failure)
    assert "jupyter_disttrain" not in text
    places = [text.index(part) for part in ("----> 2 library_that_exits.fit(step)", "in fit(step)", "in step()")]
    assert places == sorted(places)


def test_lightning_exit_after_an_interrupt_ends_the_cell_and_not_the_rank(cluster: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    pids = cluster.run(f"""
import os
import lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        if index == 2: open({str(tmp_path)!r} + f'/{{tries}}-{{rank}}', 'w').close()
        return self.layer(batch).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=4)
tries, module = 0, Module()
options = dict(
    accelerator="cpu", strategy="ddp", devices=2, max_epochs=-1, logger=False,
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
)
os.getpid()
""").results
    for tries in (1, 2):  # after the first interrupt Lightning has the process ignore SIGINT
        code = "tries += 1\ntrainer = lightning.Trainer(**options)\ntrainer.fit(module, loader)"
        run = cluster.run(code, block=False)
        assert wait_until(lambda begun=2 * tries: len(list(tmp_path.iterdir())) == begun)
        error = stop(cluster, run)
        assert len(error.failures) == 1, [each.headline for each in error.failures]
        (failure,) = error.failures
        assert (failure.ranks, failure.ename, failure.line) == ((0, 1), "KeyboardInterrupt", 3)
        text = traceback_of(failure)
        assert "jupyter_disttrain" not in text
        assert "----> 3 trainer.fit(module, loader)" in text
        after = cluster.run("total = torch.ones(()); dist.all_reduce(total); os.getpid(), tries, total.item()").results
        assert after == {rank: (pid, tries, 2.0) for rank, pid in pids.items()}


# What is shown


def test_deep_recursion_is_collapsed_and_an_irregular_one_is_bounded(torchless: Cluster) -> None:
    lines = shown(failure_of(torchless, "def f(): return g()\ndef g(): return f()\nf()"))
    assert sum("similar frames: f at line 1 (" in line for line in lines) == 1
    assert len(lines) < 40
    irregular = (
        "def f(n):\n    if n == 0: 1/0\n    return (f if n * n % 7 < 3 else g)(n - 1)\n"
        "def g(n): return f(n) if n % 5 else g(n - 1)\nf(500)"
    )
    lines = shown(failure_of(torchless, irregular))
    assert any(re.search(r"skipping \d+ frames", line) for line in lines)
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert len(lines) < 250
    chained = (
        "for i in range(100):\n    try: raise KeyError(i) from error\n    except KeyError as e: error = e\nraise error"
    )
    lines = shown(failure_of(torchless, f"error = None\n{chained}"))
    assert lines[1] == "[... 94 earlier errors that led to these are not shown]"
    assert lines[-1] == "KeyError: 99"
    assert len(lines) < 80


def test_no_frame_of_the_package_is_shown(torchless: Cluster) -> None:
    for code in (
        "input('name? ')",
        "try: input()\nexcept EOFError as error: raise ValueError('outer') from error",
        "try: input()\nexcept EOFError: raise ValueError('outer')",
        "try: input()\nexcept EOFError as error: raise ExceptionGroup('both', [error, ValueError('other')])",
        "try: get_ipython().showtraceback(('', input(), ''))\nexcept EOFError: get_ipython().showtraceback(); raise",
    ):
        error = failure_of(torchless, code)
        assert "can't be answered on a rank" in traceback_of(error.failures[0])
        assert "disttrain/" not in traceback_of(error.failures[0]) + error.run.stderr[0]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes and groups of exceptions came with Python 3.11")
@pytest.mark.parametrize(
    ("code", "rest"),
    [
        ("e = ValueError('x'); e.add_note(f'of {rank}'); raise e", ["ValueError: x", "of 0", "rank 1: note: of 1"]),
        ("raise ValueError(['cat', 'dog'][rank])", ["ValueError: cat", "rank 1: ValueError: dog"]),
        ("raise ValueError(f'no data {rank}')", ["ValueError: no data 0", "rank 1: ValueError: no data 1"]),
        ("{}['ab'[rank]]", ["KeyError: 'a'", "rank 1: KeyError: 'b'"]),
        (
            "try: {}['ab'[rank]]\nexcept KeyError as error: raise ValueError('outer') from error",
            ["ValueError: outer", "rank 1: KeyError: 'b'"],
        ),
        (
            "raise ExceptionGroup('both', [ValueError('same'), KeyError(rank)])",
            ["    +------------------------------------", "rank 1: KeyError: 1"],
        ),
        (
            "raise RuntimeError('Expected an end. ' * 40 + f'Missing on {rank}: 0 1.' + ' See it.' * 9)",
            ["rank 1: RuntimeError: … an end. Expected an end. Missing on 1: 0 1. See it. See it. See it. See it. …"],
        ),
    ],
    ids=["notes", "words", "numbers", "keys", "causes", "members", "long texts"],
)
def test_errors_of_one_type_at_one_line_share_a_traceback(torchless: Cluster, code: str, rest: list[str]) -> None:
    lines = shown(failure_of(torchless, code))
    assert lines[0].startswith("ranks 0-1, line ")
    assert lines[-len(rest) :] == rest
    assert sum(line.startswith("ranks ") for line in lines) == 1


def test_ranks_that_fail_at_different_places_of_one_call_are_listed(torchless: Cluster, tmp_path: Path) -> None:
    (tmp_path / "loader_of_two.py").write_text("def load(n):\n    if n:\n        int('one')\n    int('zero')\n")
    lines = shown(
        failure_of(
            torchless,
            f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport loader_of_two\nloader_of_two.load(rank)",
        )
    )
    assert lines[0] == "ranks 0-1, line 3"
    assert lines[-1] == (
        "rank 1: ValueError: invalid literal for int() with base 10: 'one'; "
        f"raised at {tmp_path}/loader_of_two.py, line 3, in load"
    )


def test_lone_surrogate_is_shown_as_print_shows_it(notebook: Notebook) -> None:
    half = r"\ud83d"
    outcome = notebook.run(f'%%distributed\nraise ValueError("bad token {half}")')
    assert outcome.error.endswith(f"line 2: ValueError: bad token {half}")
    assert outcome.text.splitlines()[-1] == f"ValueError: bad token {half}"
    for code in (
        f'print("{half}")',
        f'display({{"text/plain": "{half}"}}, raw=True)',
        f'class A:\n    def __repr__(self): return "{half}"\nA()',
    ):
        assert notebook.run(f"%%distributed\n{code}").check().lines == [f"ranks 0-1 │ {half}"]
    assert notebook.run(f'%%distributed -o half\n"{half}"').check()
    assert notebook.run("print([ascii(each) for each in half.values()])").check().lines == [str([rf"'{half}'"] * 2)]


def test_warning_about_what_an_error_left_is_at_the_cell_line(torchless: Cluster) -> None:
    failure_of(torchless, "import asyncio\nasync def never(): pass\nprint(asyncio.run(never()))")
    run = torchless.run("pass")  # the frames are kept for %debug until here
    assert re.search(r"ipykernel_\d+/\d+\.py:3: RuntimeWarning: coroutine 'never' was never awaited", run.stderr[0])
    code = (
        "import warnings\nwarnings.simplefilter('always')\ndef fail():\n    left = open('/dev/null')\n    1/0\nfail()"
    )
    try:
        failure_of(torchless, code)
    finally:
        stderr = torchless.run("warnings.resetwarnings()").stderr[0]
    assert "ResourceWarning: unclosed file" in stderr
    assert "jupyter_disttrain" not in stderr


HOLDERS = """
import contextlib, os, signal, weakref
seen, kept = {}, {}
def big(name):
    tensor = torch.ones(1 << 18)
    seen[name] = weakref.ref(tensor)
    return tensor
def inner():
    of_inner, kept["by the user"] = big("of inner"), big("kept by the user")
    raise ValueError("one fails")
def chained(hides):
    of_outer = big("of outer")
    try: inner()
    except ValueError as error:
        of_handler = big("of handler")
        raise RuntimeError("outer") from (None if hides else error)
async def waits():
    of_coroutine = big("of coroutine")
    inner()
def interrupted():
    of_interrupted = big("of interrupted")
    os.kill(os.getpid(), signal.SIGINT)
    while True: pass
class Fails(torch.autograd.Function):
    @staticmethod
    def forward(context, given):
        context.save_for_backward(big("saved for backward"))
        return given * 2
    @staticmethod
    def backward(context, gradient):
        of_backward = big("of backward")
        inner()
def step():
    of_step = big("of step").requires_grad_()
    loss = Fails.apply(of_step).sum()
    loss.backward()
def numbers():
    of_generator = big("kept in a generator")
    try: inner()
    except ValueError as error: yield error
"""


@pytest.mark.parametrize(
    "code",
    [
        "inner()",
        "chained(hides=False)",
        "chained(hides=True)",
        "await waits()",
        "%%time\ninner()",
        "interrupted()",
        "step()",
        "goes_on = numbers()\nraise RuntimeError from next(goes_on)",
        "of_cell = big('kept by the cell')\nwith contextlib.ExitStack() as stack: inner()",
        "if rank == 1: chained(False)\nhere = lambda given: dist.all_reduce(given)\nhere(big('of who waits'))",
    ],
)
def test_failed_cell_keeps_no_tensor_alive_except_the_user_s(three: Cluster, code: str) -> None:
    three.run(HOLDERS)
    failure_of(three, code)
    three.run("'the next cell'")
    # By reference counts alone: the garbage collector may run late, and before that a GPU may be full.
    for found in three.run("{name: each() is not None for name, each in seen.items()}").results.values():
        assert found == {name: name.startswith("kept") for name in found}
        assert found


# Links to printed output


def test_error_links_to_the_printed_output(torchless: Cluster) -> None:
    error = failure_of(torchless, "import sys\nprint('before', rank); print('bad', file=sys.stderr); 1/0")
    assert error.run.stdout == {0: "before 0\n", 1: "before 1\n"}
    assert error.run.stderr == {0: "bad\n", 1: "bad\n"}
    assert error.run.failures == error.failures
    with pytest.raises(CellTimeoutError) as caught:
        torchless.run("print('on', flush=True)\nwhile True: pass", timeout_s=0.5)
    assert caught.value.run.stdout == {0: "on\n", 1: "on\n"}


def test_error_with_hundreds_of_causes_is_reported_at_once(torchless: Cluster) -> None:
    body = "    try: raise ValueError(n)\n    except ValueError:\n        if not n: raise\n        retry(n - 1)\n"
    failure = only_failure(torchless, f"def retry(n):\n{body}retry(500)", timeout_s=30)
    assert failure.evalue == "0"
    assert "earlier errors that led to these are not shown" in failure.traceback[0]


def test_generator_that_caught_an_error_continues_after_a_failed_cell(torchless: Cluster) -> None:
    body = "    while True:\n        try: raise ValueError\n        except ValueError as error: yield error\n"
    torchless.run(f"def numbers():\n{body}async def numbers_async():\n{body}one, two = numbers(), numbers_async()")
    failure_of(torchless, "raise RuntimeError from next(one)")
    failure_of(torchless, "raise RuntimeError from await anext(two)")
    assert torchless.run("str(next(one)), str(await anext(two))").results == {0: ("", ""), 1: ("", "")}


def test_interrupt_during_error_reporting_does_not_reach_the_next_cell(torchless: Cluster) -> None:
    text = "    def __str__(self):\n        if not self.args: self.args = 1,; os.kill(os.getpid(), signal.SIGINT)\n"
    failure_of(
        torchless, f"import os, signal\nclass Interrupted(Exception):\n{text}        return ''\nraise Interrupted"
    )
    shows = "try: 1 / 0\nexcept ZeroDivisionError: get_ipython().showtraceback()\nfor _ in range(1000): pass\n'whole'"
    assert torchless.run(shows).results == {0: "whole", 1: "whole"}


def test_error_with_raising_attributes_is_reported_at_its_line(torchless: Cluster) -> None:
    attributes = "    __cause__ = property(lambda self: None)\n    name = property(lambda self: 1 / 0)\n"
    failure = only_failure(torchless, f"class Odd(Exception):\n{attributes}raise Odd('seen')")
    assert (failure.ename, failure.evalue, failure.line) == ("Odd", "seen", 4)


def test_traceback_has_no_frame_above_the_cell_and_no_trailing_blank_line(torchless: Cluster) -> None:
    for code in ("exec('x = = 1')", "eval('1 +')", "import sys\nsys.exit(3)"):
        text = traceback_of(only_failure(torchless, code))
        assert "IPython/core" not in text
        assert text == text.rstrip()


def test_magics_that_need_a_whole_notebook_cell_are_refused(torchless: Cluster, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("x = 1\n")
    for magic in (f"%load {tmp_path}/code.py", f"%edit {tmp_path}/code.py", "get_ipython().set_next_input('x')"):
        failure = only_failure(torchless, magic)
        assert failure.ename == "UsageError"
        assert failure.evalue.startswith("a rank can't ")
        assert failure.evalue.endswith("; run this in the notebook, without %%distributed")
