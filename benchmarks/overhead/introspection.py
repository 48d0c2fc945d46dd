"""Measure how soon a cell for ranks is completed and documented, while the ranks compute, wait or hold the GIL.

Covers: complete and inspect requests to the notebook's kernel, as front ends send them; which collectives they call;
jupyter-distributed for comparison.
Does not cover: drawing the replies.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.compare.peer_environment import peers
from benchmarks.lib import environment
from benchmarks.lib.command_line import add_write_option, exit_on_sigterm, make_parser, report
from benchmarks.lib.kernel import KernelError
from benchmarks.lib.session import Session
from benchmarks.lib.stats import percentile
from benchmarks.lib.table import markdown_table, page
from benchmarks.lib.tools import Disttrain

if TYPE_CHECKING:
    from benchmarks.lib.kernel import DrivenKernel
    from benchmarks.lib.tools import Tool

RESULTS = environment.RESULTS / "introspection.md"
PEER = "jupyter-distributed"  # the only one that completes the ranks' variables
VARIABLES = """
import torch, time
class Traps:
    called = []
    @property
    def value(self): Traps.called.append(1)
    def __getattr__(self, name):
        Traps.called.append(1)
        raise AttributeError(name)
traps, weights = Traps(), torch.ones(3, 4)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
"""
# What is asked in turn, each with a match that the reply must have.
QUESTIONS = (
    ("complete", "wei", "weights"),
    ("complete", "torch.", "tensor"),
    ("complete", "model[0].weight.req", "requires_grad"),
    ("complete", "traps.", "called"),
    ("complete", "torch.optim.SGD(", "lr="),
    ("inspect", "torch.nn.Linear(", "in_features"),
    ("inspect", "model", "Sequential"),
    ("inspect", "weights", "Tensor"),
)
# What the ranks do meanwhile: a cell, which ends by itself. The last one calls a collective, and is not counted.
STATES = {
    "idle": "",
    "Python loop": "until = time.monotonic() + {seconds}\nwhile time.monotonic() < until: pass",
    "training loop": "until = time.monotonic() + {seconds}\n"
    "while time.monotonic() < until: model(torch.ones(64, 3)).sum().backward()",
    "C code without the GIL": "time.sleep({seconds})",
    "C code with the GIL": "import ctypes; ctypes.PyDLL(None).usleep(int({seconds} * 1e6))",
    "in all_reduce": "if rank == world_size - 1: time.sleep({seconds})\ndist.all_reduce(torch.ones(1))",
}
COUNTS = "print(sum(get_ipython().kernel._request_handler.counts()['collectives'].values()), len(Traps.called))"


@dataclass(slots=True)
class Asked:
    """Seconds until each reply, and how many replies had what was expected."""

    seconds: list[float] = field(default_factory=list)
    right: int = 0

    def row(self) -> list[str]:
        """Return the cells of a table."""
        if not self.seconds:
            return ["no reply", "", "", ""]
        times = [f"{1000 * percentile(self.seconds, each):.0f} ms" for each in (50, 95, 100)]
        return [*times, f"{self.right} of {len(self.seconds)}"]


def main() -> int:
    """Measure each state of the ranks, and write a table."""
    parser = make_parser("benchmarks.overhead.introspection", __doc__)
    parser.add_argument("--ranks", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--requests", type=int, default=200, help="in each state (default: %(default)s)")
    parser.add_argument("--no-peers", action="store_true", help="do not compare with jupyter-distributed")
    add_write_option(parser, RESULTS)
    arguments = parser.parse_args()
    exit_on_sigterm()
    facts = environment.facts()
    tool = Disttrain(name="jupyter_disttrain")
    rows, notes = _measure(tool, arguments.ranks, arguments.requests)
    if not arguments.no_peers:
        present, missing = peers()
        for each in (tool for tool in present if tool.name == PEER):
            rows += _measure(each, arguments.ranks, arguments.requests)[0]
        notes += [f"- {PEER}: {missing[PEER]}"] if PEER in missing else []
    about = (
        f"{arguments.ranks} ranks; {arguments.requests} requests in each state, to complete or inspect a cell, in turn."
    )
    lines = [about, "", *markdown_table(["", "ranks are", "median", "p95", "longest", "as expected"], rows), "", *notes]
    report(page("Completion and inspection", facts, lines), RESULTS if arguments.write else None)
    return 0


def _measure(tool: Tool, ranks: int, requests: int) -> tuple[list[list[str]], list[str]]:
    rows = []
    with Session(tool, ranks, {}) as session:
        session.on_all_ranks(VARIABLES)
        before = session.on_all_ranks(COUNTS).text if isinstance(tool, Disttrain) else ""
        after = ""
        for state, code in STATES.items():
            if isinstance(tool, Disttrain) and "all_reduce" in code:
                after = session.on_all_ranks(COUNTS).text
            asked = _ask(session, tool, code, requests)
            rows.append([tool.name, state, *asked.row()])
            print(" · ".join(rows[-1]), flush=True)
    return rows, _changes(before, after)


def _changes(before: str, after: str) -> list[str]:
    """State what the ranks have counted meanwhile: collectives, and evaluated attributes."""
    if not before:
        return []
    counts = [re.findall(r"(\d+) (\d+)$", each.strip())[0] for each in (before, after)]
    calls, evaluated = (int(now) - int(then) for then, now in zip(*counts, strict=True))
    return [f"- the requests called {calls} collectives (without the last state) and evaluated {evaluated} attributes"]


def _ask(session: Session, tool: Tool, code: str, requests: int) -> Asked:
    """Ask while a cell runs on the ranks; the cell is repeated until all requests are sent."""
    asked = Asked()
    kernel = session.kernel
    while len(asked.seconds) < requests:
        left = requests - len(asked.seconds)
        if code:
            seconds = min(20.0, 1.0 + 0.35 * left)
            cell = code.format(seconds=seconds)
            if not isinstance(tool, Disttrain):
                return asked  # its kernel replies to nothing while a cell runs
            kernel.run(f"%%distributed --noblock\n{cell}")
        count = min(left, 50 if code else left)
        for number in range(len(asked.seconds), len(asked.seconds) + count):
            _ask_once(kernel, tool, number, asked)
        if code:
            kernel.run("%dist_interrupt", check=False)
            kernel.run("%dist_wait", check=False)
    return asked


def _ask_once(kernel: DrivenKernel, tool: Tool, number: int, asked: Asked) -> None:
    kind, text, expected = QUESTIONS[number % len(QUESTIONS)]
    cell = f"%%distributed\n{text}" if isinstance(tool, Disttrain) else text
    try:
        seconds, reply = kernel.ask(kind, cell)
    except KernelError:
        asked.seconds.append(5.0)
        return
    asked.seconds.append(seconds)
    found = reply["matches"] if kind == "complete" else reply.get("data", {}).get("text/plain", "")
    asked.right += any(each.endswith(expected) for each in found) if kind == "complete" else expected in found


if __name__ == "__main__":
    sys.exit(main())
