"""Interrupts at moments at which KeyboardInterrupt would do lasting harm, or be lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain.errors import RankFailure

from ...support.process_tools import wait_until
from ...support.recovery_tools import failure_of, is_intact

if TYPE_CHECKING:
    from pathlib import Path

    from jupyter_disttrain import CellRun, Cluster


def interrupt_at(cluster: Cluster, code: str, message: str) -> CellRun:
    """Run endless code, interrupt it once all ranks are at a line with this text, return how it ended."""
    run = cluster.run(code, block=False)
    assert wait_until(lambda: all(message in line for line in cluster.where()))
    cluster.interrupt()
    with pytest.raises(RankFailure, match="KeyboardInterrupt"):
        run.wait()
    return run


def test_during_a_library_import(three: Cluster, pids: dict[int, int], tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "slowly"
    package.mkdir(parents=True)
    (package / "part.py").touch()
    slow = "import time\nfrom . import part\nfor _ in range(100): time.sleep(0.01)\nwhole = 1"
    (package / "__init__.py").write_text(slow)
    three.run(f"import sys; sys.path.insert(0, {str(package.parent)!r})")
    run = interrupt_at(three, "import slowly\nimport time\ntime.sleep(100)", "line 1: import slowly")
    assert {failure.line for failure in run.failures} <= {1, 2, 3}
    assert three.run("import slowly; slowly.part and slowly.whole").results == {0: 1, 1: 1, 2: 1}
    assert is_intact(three, pids)


# To be called where an interrupt must come.
WINDOW = """
import time
def window():
    while not get_ipython().kernel._interrupted: time.sleep(0.001)
"""
IN_WINDOW = "_interrupted: time.sleep(0.001)"

LOGGING = f"""{WINDOW}
import logging, threading
lock = logging._lock
class SlowLock:
    def acquire(self):
        lock.acquire()
        window()
    def release(self):
        lock.release()
    __enter__ = acquire
    def __exit__(self, *_):
        lock.release()
logging._lock = SlowLock()
try:
    while True: logging.getLogger("busy").setLevel("ERROR")
finally:
    logging._lock = lock
"""


def test_while_logging_holds_a_lock(three: Cluster, pids: dict[int, int]) -> None:
    interrupt_at(three, LOGGING, IN_WINDOW)
    free = """
found = []
def take():
    found.append(lock.acquire(timeout=5))
    lock.release()
thread = threading.Thread(target=take)
thread.start()
thread.join()
found
"""
    assert three.run(free).results == {0: [True], 1: [True], 2: [True]}
    assert is_intact(three, pids)


FINALIZERS = f"""{WINDOW}
class Slow:
    def __del__(self): window()
while True: Slow()
"""

FORKS = f"""{WINDOW}
import multiprocessing, os
in_this_cell = True
os.register_at_fork(before=lambda: in_this_cell and window())
start = multiprocessing.get_context("fork").Process
try:
    while True:
        child = start(target=int)
        child.start()
        child.join()
finally:
    in_this_cell = False
"""

CALLBACKS = f"""{WINDOW}
import weakref
class Held: pass
while True:
    held = Held()
    reference = weakref.ref(held, lambda _: window())
    del held
"""


@pytest.mark.parametrize("code", [FINALIZERS, FORKS, CALLBACKS], ids=["finalizers", "forks", "callbacks"])
def test_where_python_only_prints_exceptions(three: Cluster, pids: dict[int, int], code: str) -> None:
    run = interrupt_at(three, code, IN_WINDOW)
    assert "Exception ignored" not in "".join(run.stderr.values())
    assert is_intact(three, pids)


def test_deferred_interrupt_does_not_reach_the_next_cell(three: Cluster, pids: dict[int, int]) -> None:
    for _ in range(3):
        interrupt_at(three, f"{WINDOW}class Slow:\n    def __del__(self): window()\nSlow() and None", IN_WINDOW)
        assert is_intact(three, pids)


LOADERS = f"""{WINDOW}
import multiprocessing
from torch.utils.data import DataLoader
start = multiprocessing.context.Process.start
def start_slowly(process):
    start(process)
    window()  # before the loader knows it
multiprocessing.context.Process.start = start_slowly
try:
    while True:
        for batch in DataLoader(torch.ones(64), batch_size=8, num_workers=2): pass
finally:
    multiprocessing.context.Process.start = start
"""


def test_while_data_loader_workers_are_created(three: Cluster, pids: dict[int, int]) -> None:
    left = "import multiprocessing; [str(child) for child in multiprocessing.active_children()]"
    for _ in range(3):
        interrupt_at(three, LOADERS, IN_WINDOW)
        assert wait_until(lambda: three.run(left).results == {0: [], 1: [], 2: []})
    assert is_intact(three, pids)


END_OF_STEP = """
import time
import torch._dynamo
graph_break, calls = torch._dynamo.graph_break, []
def held():  # the step calls it at its begin and at its end, right before it turns gradients on again
    calls.append(torch.is_grad_enabled())
    while len(calls) == 2: time.sleep(0.01)
torch._dynamo.graph_break = held
try:
    torch.optim.SGD([torch.ones(1, requires_grad=True)]).step()
finally:
    torch._dynamo.graph_break = graph_break
"""


def test_at_the_end_of_an_optimizer_step_that_enables_gradients(three: Cluster, pids: dict[int, int]) -> None:
    run = interrupt_at(three, END_OF_STEP, "time.sleep(0.01)")
    assert three.run("calls").results == {rank: [False, False] for rank in range(3)}
    assert "torch's gradient mode is on again, as before the cell" in run.stderr[0]
    assert three.run("torch.is_grad_enabled()").results == dict.fromkeys(range(3), True)
    run = interrupt_at(three, "import time\ntorch.set_autocast_enabled('cpu', True)\ntime.sleep(100)", "sleep(100)")
    assert "torch.autocast('cpu') is off again" in run.stderr[2]
    # Settings made by a cell that ends normally are kept.
    assert three.run("torch.set_grad_enabled(False); 1").stderr == dict.fromkeys(range(3), "")
    assert three.run("torch.is_grad_enabled()").results == dict.fromkeys(range(3), False)
    three.run("torch.set_grad_enabled(True)")
    assert is_intact(three, pids)


ENTERED = """
import time
from torch._subclasses.fake_tensor import FakeTensorMode
torch.set_default_device("cpu")
torch.autograd.set_detect_anomaly(True)
torch._C._functorch._vmap_increment_nesting(2, "error")
FakeTensorMode().__enter__()
torch.device("meta").__enter__()
torch._C._dynamo.eval_frame.set_eval_frame(False)
time.sleep(100)
"""


def test_torch_modes_are_restored(three: Cluster, pids: dict[int, int]) -> None:
    run = interrupt_at(three, ENTERED, "time.sleep(100)")
    for name in ("FakeTensorMode", "DeviceContext", "a transform of torch.func", "torch.compile"):
        assert f"{name} was exited, as before the cell" in run.stderr[0]
    assert "torch's anomaly detection is off again" in run.stderr[2]
    found = three.run(
        "(torch.ones(2).sum().item(), torch.is_anomaly_enabled(), torch.get_default_device().type)"
    ).results
    assert found == dict.fromkeys(range(3), (2.0, False, "cpu"))
    three.run("torch.set_default_device(None)")
    assert is_intact(three, pids)


def test_in_ipython_code_before_a_cell(three: Cluster, pids: dict[int, int]) -> None:
    three.run("""
    import signal
    def early(*_): get_ipython().events.unregister("pre_execute", early); signal.raise_signal(signal.SIGINT)
    get_ipython().events.register("pre_execute", early)
    """)
    with pytest.raises(RankFailure, match="KeyboardInterrupt"):
        three.run("ran = True")
    assert three.run("'ran' in globals()").results == dict.fromkeys(range(3), False)
    caught = "try: signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt: pass\nran = True"
    three.run(caught)
    assert three.run("ran").results == dict.fromkeys(range(3), True)
    assert is_intact(three, pids)


BETWEEN = """import asyncio, signal, time
compiler = type(get_ipython().compile)
def press(*args):  # as IPython compiles each statement when the one before has ended
    del compiler.__call__
    signal.raise_signal(signal.SIGINT)
    return compiler.__call__(*args)
compiler.__call__ = press
ran = True
{ends}
"""


@pytest.mark.parametrize("ends", ["time.sleep(100)", "await asyncio.sleep(100)"])
def test_between_two_statements_is_at_the_line_of_the_next(three: Cluster, pids: dict[int, int], ends: str) -> None:
    three.run("ran = False")
    error = failure_of(three, BETWEEN.format(ends=ends))
    (failure,) = error.failures
    assert (failure.ranks, failure.line, failure.ename) == ((0, 1, 2), 8, "KeyboardInterrupt")
    assert "IPython" not in "\n".join(failure.traceback)
    assert three.run("ran").results == dict.fromkeys(range(3), False)
    assert is_intact(three, pids)


AT_ANY_LINE = """
import signal, sys
kernel = get_ipython().kernel
own = {name: getattr(type(kernel), name).__code__ for name in ("execute_request", "_serve_cell", "_execute",
       "_ignore_sigint", "_interrupt", "_cancel_on_sigint", "do_execute", "post_handler_hook")}
own["run_cell_async"] = type(get_ipython()).run_cell_async.__code__
own["run_code"] = type(get_ipython()).__mro__[2].run_code.__code__
own = set(own.values())
left = -1

def strike_at(number):
    "Have this process interrupt itself at a line of the kernel's own, counted from the next request's first."
    global left, begun
    left, begun = number, None
    def on_line(frame, event, _argument):
        global left
        if begun and left >= 0 and event in ("line", "return"):
            left -= 1
            if left == -1:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return on_line
    def on_call(frame, _event, _argument):
        global begun
        if frame.f_code.co_name == "execute_request" and frame is not begun:
            if begun:  # this is the request after that one
                sys.settrace(None)
            begun = frame
        return on_line if frame.f_code in own else None
    sys.settrace(on_call)
"""


@pytest.mark.parametrize(
    "cell", ["ended = 1", "await asyncio.sleep(0); ended = 1", "signal.raise_signal(signal.SIGINT)"]
)
def test_at_any_line_of_the_kernel_around_a_cell(torchless: Cluster, cell: str) -> None:
    """At each line once; with the last cell it is the second interrupt, while the first is being reported."""
    before = torchless.run(f"import asyncio, os{AT_ANY_LINE}kept = rank\nos.getpid(), kept").results
    number, left = 0, {-1}
    while left == {-1}:
        number += 1
        left = set(torchless.run(f"before = left; strike_at({number}); before", timeout_s=20).results.values())
        try:
            torchless.run(cell, timeout_s=20)
        except RankFailure as error:
            assert set(error.by_rank) == {0, 1}  # noqa: PT017
            assert "KeyboardInterrupt" in str(error) or "CancelledError" in str(error)  # noqa: PT017
    assert number > 50
    assert torchless.run("os.getpid(), kept").results == before
