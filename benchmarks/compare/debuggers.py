"""Compare the debuggers of jupyter_disttrain and jupyter-distributed, by the requests that JupyterLab sends.

Covers: what each does with stopped ranks, clients that leave, ranks that die; what debugging costs.
Does not cover: nbdistributed and ipyparallel, whose debuggers see the notebook's process only.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import statistics
import sys
import threading
import time
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

from jupyter_client.blocking.client import BlockingKernelClient

from benchmarks.lib import environment, processes
from benchmarks.lib.command_line import add_write_option, exit_on_sigterm, make_parser, report
from benchmarks.lib.kernel import CellRecord, KernelError
from benchmarks.lib.session import ALL_REDUCE, Session
from benchmarks.lib.table import format_amount, markdown_table, page
from benchmarks.lib.tools import Disttrain
from tests.support.dap_client import DapClient

from .peer_environment import peers

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from benchmarks.lib.tools import Tool

RESULTS = environment.RESULTS / "debuggers.md"
PEER = "jupyter-distributed"
HERE = "# here"
LOOP = f"""
def step(value):
    half = value / 2
    total = half + 1  {HERE}
    return total
for i in range(3):
    step(i)
"""
TRAP = f"""
class Trap:
    calls = 0
    @property
    def value(self):
        Trap.calls += 1
        return self
trap = Trap()
print("stop")  {HERE}
print("evaluated", Trap.calls)
"""
ROUNDS = 5
WAIT_S = 8  # longer than the timeout of the group
TIMED_GROUP = "from datetime import timedelta\ntimed = dist.new_group(timeout=timedelta(seconds=5))"
ONE_STOPS = f"""
if rank == 1:
    print("stop")  {HERE}
dist.barrier(timed)
print("past the barrier")
"""
HANG = "import time\nif rank == 1:\n    time.sleep(20)\ndist.barrier()"
TRAINING = """
import time
layer = torch.nn.Linear(16, 16)
def train(x):
    loss = layer(x).square().mean()
    loss.backward()
    return loss
def rounds():
    x, began = torch.ones(8, 16), time.perf_counter()
    for _ in range(10_000):
        train(x)
    return time.perf_counter() - began
"""
TIMED = "print('took', rounds())"
ELSEWHERE = f"def not_called():\n    print(1)  {HERE}"


class Debugged:
    """A session, and a client of its debugger that is attached; a context manager that ends the cells."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._cells: list[Future[CellRecord]] = []
        self.listening_before = _listening(session)
        self.client = self.connect().attach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        """Let the cells end: the session's connections are used by one thread at a time."""
        with contextlib.suppress(AssertionError, TimeoutError):
            self.client.ask("disconnect")
        self.client.close()
        if wait(self._cells, 5).not_done:
            self.session.kernel.interrupt()
        wait(self._cells)

    def connect(self) -> DapClient:
        """Return a client that is not attached."""
        connection = BlockingKernelClient(connection_file=self.session.kernel.connection_file)
        connection.load_connection_file()
        return DapClient(connection)

    def start(self, code: str) -> Future[CellRecord]:
        """Start a cell on all ranks; returns its messages once it has ended."""
        done: Future[CellRecord] = Future()

        def run() -> None:
            try:
                text = self.session.tool.on_all_ranks(code)
                done.set_result(self.session.kernel.run(text, timeout_s=40.0, check=False))
            except KernelError as error:
                done.set_exception(error)

        self._cells.append(done)
        threading.Thread(target=run, daemon=True).start()
        return done

    def clear_breakpoints(self, code: str) -> None:
        """Stop at no line of a cell."""
        self.client.set_breakpoints(self.session.tool.on_all_ranks(code))

    def set_breakpoint(self, code: str) -> None:
        """Stop all ranks at the marked line of a cell."""
        text = self.session.tool.on_all_ranks(code)
        line = 1 + next(number for number, each in enumerate(text.splitlines()) if HERE in each)
        (found,) = self.client.set_breakpoints(text, line)
        assert found["verified"], found

    def stopped(self, count: int) -> dict[int, int]:
        """Wait until so many ranks have stopped; return the id of the thread of each."""
        threads: dict[int, int] = {}
        while len(threads) < count:
            thread = self.client.event("stopped")["threadId"]
            threads[self._rank_of(thread)] = thread
        return threads

    def _rank_of(self, thread: int) -> int:
        names = {each["id"]: each["name"] for each in self.client.ask("threads")["threads"]}
        found = re.match(r"rank (\d+)", names[thread], re.IGNORECASE)
        assert found, names
        return int(found[1])

    def line(self, thread: int) -> int:
        """Return the line at which a thread is stopped."""
        return int(self.client.ask("stackTrace", threadId=thread)["stackFrames"][0]["line"])

    def check_sum(self) -> str:
        """Run an all_reduce on all ranks."""
        self.session.on_all_ranks(ALL_REDUCE, timeout_s=20.0)
        self.session.check_ranks()
        return "yes"


def stop_time(debugged: Debugged) -> str:
    """From the start of a cell until all ranks have stopped at a breakpoint"""
    times = []
    for _ in range(ROUNDS):
        debugged.set_breakpoint(LOOP)
        began = time.perf_counter()
        cell = debugged.start(LOOP)
        threads = debugged.stopped(debugged.session.ranks)
        times.append(time.perf_counter() - began)
        debugged.clear_breakpoints(LOOP)
        debugged.client.ask("continue", threadId=threads[0])
        cell.result()
    return format_amount(statistics.median(times), "s")


def step_one(debugged: Debugged) -> str:
    """One rank is stepped, and the others wait"""
    debugged.set_breakpoint(LOOP)
    debugged.start(LOOP)
    threads = debugged.stopped(debugged.session.ranks)
    before = debugged.line(threads[0])
    debugged.client.ask("next", threadId=threads[1], singleThread=True)
    debugged.client.event("stopped", lambda body: body["threadId"] == threads[1])
    moved, others = debugged.line(threads[1]) != before, debugged.line(threads[0]) != before
    return "yes" if moved and not others else "no, all are stepped" if others else "no"


def properties(debugged: Debugged) -> str:
    """Properties evaluated by showing the variables of a cell"""
    debugged.set_breakpoint(TRAP)
    cell = debugged.start(TRAP)
    threads = debugged.stopped(debugged.session.ranks)
    client = debugged.client
    for thread in threads.values():
        frame = client.ask("stackTrace", threadId=thread)["stackFrames"][0]["id"]
        for scope in client.ask("scopes", frameId=frame)["scopes"]:
            shown = client.ask("variables", variablesReference=scope["variablesReference"])["variables"]
            for reference in [each["variablesReference"] for each in shown if each["name"] == "trap"]:
                if reference:
                    client.ask("variables", variablesReference=reference)
    client.ask("continue", threadId=threads[0])
    counts = re.findall(r"evaluated (\d+)", cell.result().text)
    return str(max(map(int, counts))) if counts else "the cell did not end"


def timeouts(debugged: Debugged) -> str:
    """A rank is stopped for longer than the timeout of the collective that another waits in: the cell succeeds"""
    debugged.set_breakpoint(ONE_STOPS)
    cell = debugged.start(ONE_STOPS)
    threads = debugged.stopped(1)
    time.sleep(WAIT_S)
    debugged.client.ask("continue", threadId=threads[1])
    record = cell.result()
    return "yes" if "past the barrier" in record.text and not record.failure else "no"


def hang(debugged: Debugged) -> str:
    """The frames of a rank that waits in a collective are shown, after"""
    debugged.start(HANG)
    time.sleep(1.5)  # the rank waits by then
    threads = {each["name"]: each["id"] for each in debugged.client.ask("threads")["threads"]}
    thread = next(number for name, number in threads.items() if re.match("rank 0", name, re.IGNORECASE))
    began = time.perf_counter()
    debugged.client.request("pause", threadId=thread)
    while time.perf_counter() - began < 10:
        frames = debugged.client.request("stackTrace", threadId=thread)
        if frames.get("success") and frames["body"]["stackFrames"]:
            return format_amount(time.perf_counter() - began, "s")
        time.sleep(0.05)
    return "not within 10 s"


def _leave(debugged: Debugged, leave: Callable[[dict[int, int]], None]) -> str:
    debugged.set_breakpoint(LOOP)
    cell = debugged.start(LOOP)
    leave(debugged.stopped(debugged.session.ranks))
    cell.result()
    return debugged.check_sum()


def disconnect(debugged: Debugged) -> str:
    """The client disconnects while ranks are stopped: the next all_reduce is done on all"""
    return _leave(debugged, lambda _threads: debugged.client.ask("disconnect") and None)


def kill_client(debugged: Debugged) -> str:
    """The client is killed while ranks are stopped, and another one disconnects: the same"""

    def leave(_threads: dict[int, int]) -> None:
        debugged.client.close()
        debugged.client = debugged.connect()
        debugged.client.ask("disconnect")

    return _leave(debugged, leave)


def interrupt(debugged: Debugged) -> str:
    """The cell is interrupted while ranks are stopped: the same"""
    return _leave(debugged, lambda _threads: debugged.session.kernel.interrupt())


def kill_rank(debugged: Debugged) -> str:
    """A stopped rank is killed by kill -9, and the client disconnects: the same"""

    def leave(_threads: dict[int, int]) -> None:
        os.kill(debugged.session.rank_pids[1], signal.SIGKILL)
        with contextlib.suppress(AssertionError, TimeoutError):
            debugged.client.ask("disconnect")

    return _leave(debugged, leave)


def ports(debugged: Debugged) -> str:
    """TCP ports that listen because of the debugger, the notebook's own included"""
    debugged.session.on_all_ranks("pass")
    return str(len(_listening(debugged.session) - debugged.listening_before))


def _listening(session: Session) -> set[int]:
    found = set()
    for process in processes.with_token(session.kernel.token):
        found |= {each.laddr.port for each in process.net_connections("tcp") if each.status == "LISTEN"}
    return found


def cost(debugged: Debugged) -> str:
    """Time of steps of 0.07 ms while a client is attached and a breakpoint is set elsewhere, as a ratio to without"""
    debugged.client.ask("disconnect")
    debugged.session.on_all_ranks(TRAINING)
    ratios = []
    for _ in range(2 * ROUNDS):
        without = _loop_seconds(debugged.session)
        debugged.client.attach()
        debugged.set_breakpoint(ELSEWHERE)
        debugged.session.on_all_ranks(ELSEWHERE)
        ratios.append(_loop_seconds(debugged.session) / without)
        debugged.client.ask("disconnect")
    return f"{statistics.median(ratios):.2f}"


def _loop_seconds(session: Session) -> float:
    found = re.findall(r"took ([\d.]+)", session.on_all_ranks(TIMED, timeout_s=120.0).text)
    return statistics.median(map(float, found))


MEASURES = (
    stop_time,
    step_one,
    properties,
    timeouts,
    hang,
    disconnect,
    kill_client,
    interrupt,
    kill_rank,
    ports,
    cost,
)


def _measure(tool: Tool, ranks: int, measure: Callable[[Debugged], str]) -> str:
    """Run one measure in a session of its own; return the result, or why there is none."""
    with Session(tool, ranks, {}) as session:
        try:
            if measure is timeouts:
                session.on_all_ranks(TIMED_GROUP)
            with Debugged(session) as debugged:
                return measure(debugged)
        except (AssertionError, TimeoutError, KernelError) as problem:
            text = " ".join(str(problem).split())[:100]
            print(f"    {type(problem).__name__}: {text}", flush=True)
            return "no" if not isinstance(problem, AssertionError) else f"no: {text}"


def main() -> int:
    """Compare the debuggers, and write a table."""
    parser = make_parser("benchmarks.compare.debuggers", __doc__)
    parser.add_argument("--ranks", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--only", default="", metavar="NAME", help=f"one of {', '.join(m.__name__ for m in MEASURES)}")
    parser.add_argument("--no-peers", action="store_true", help=f"do not compare with {PEER}")
    add_write_option(parser, RESULTS)
    arguments = parser.parse_args()
    exit_on_sigterm()
    facts = environment.facts()
    tools: list[Tool] = [Disttrain(name="jupyter_disttrain")]
    notes = []
    if not arguments.no_peers:
        present, missing = peers()
        tools += [tool for tool in present if tool.name == PEER]
        notes += [f"- {PEER}: {missing[PEER]}"] if PEER in missing else []
    rows = []
    for measure in [each for each in MEASURES if arguments.only in ("", each.__name__)]:
        rows.append([measure.__doc__ or "", *(_measure(tool, arguments.ranks, measure) for tool in tools)])
        print(" · ".join(rows[-1]), flush=True)
    about = f"{arguments.ranks} ranks; a client at the kernel's control channel; a new session for each line."
    lines = [about, "", *markdown_table(["", *(tool.name for tool in tools)], rows), "", *notes]
    report(page("Debuggers", facts, lines), RESULTS if arguments.write else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
