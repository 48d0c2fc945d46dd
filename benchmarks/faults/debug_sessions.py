"""Debug ranks many times by a client of the Debug Adapter Protocol that quits or is killed, and count what is lost.

Covers: a client at the kernel's control channel, in a process of its own; breakpoints, pauses and hangs; after each
session an all_reduce on all ranks.
Does not cover: JupyterLab itself (``tests/browser``).
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict

from jupyter_client.blocking.client import BlockingKernelClient

from benchmarks.lib.command_line import add_write_option, exit_on_sigterm, make_parser, report
from benchmarks.lib.environment import RESULTS as FOLDER
from benchmarks.lib.environment import facts
from benchmarks.lib.table import markdown_table, page
from tests.support.dap_client import DapClient
from tests.support.notebook_driver import Notebook

RESULTS = FOLDER / "debug_sessions.md"
CHECK = "%%distributed\nx = torch.ones(1); dist.all_reduce(x); print('sum', x.item())"
LOOP = """%%distributed
import time
def step(i):
    x = torch.full((4,), float(i))
    dist.all_reduce(x)
    return x
for i in range(3):
    step(i)
"""
RUNNING = (
    "%%distributed\nimport time\nn = 0\nuntil = time.monotonic() + 3\nwhile time.monotonic() < until:\n    n += 1\n"
)
HANG = """%%distributed
import time
if rank: time.sleep(2)
dist.barrier()
"""
CELLS = {
    "breakpoint": LOOP,
    "breakpoint()": LOOP.replace("    return x", "    breakpoint()"),
    "pause": RUNNING,
    "hang": HANG,
}
ENDS = ("continue", "disconnect", "kill -9 of the client", "interrupt", "kill -9 of a rank")


def be_client(connection_file: str, kind: str) -> None:
    """Attach, have the ranks stop, print a line, and do what stdin says; runs in a process of its own."""
    connection = BlockingKernelClient(connection_file=connection_file)
    connection.load_connection_file()
    with DapClient(connection) as client:
        client.attach()
        if kind == "breakpoint":
            client.set_breakpoints(LOOP, 5)
        print("attached", flush=True)
        if kind in ("pause", "hang"):
            sys.stdin.readline()
            while not client.request("pause", threadId=1_000_000)["success"]:
                time.sleep(0.01)  # the cell has not reached the rank
        thread = client.event("stopped")["threadId"]
        frame = client.ask("stackTrace", threadId=thread)["stackFrames"][0]["id"]
        for scope in client.ask("scopes", frameId=frame)["scopes"]:
            client.ask("variables", variablesReference=scope["variablesReference"])
        if kind == "breakpoint":
            client.ask("next", threadId=thread)
        print("stopped", flush=True)
        for line in sys.stdin:
            _end(client, kind, line.strip(), thread)
            print("done", flush=True)


def _end(client: DapClient, kind: str, how: str, thread: int) -> None:
    if how == "disconnect" or kind == "breakpoint()":  # whose ranks would stop again
        client.ask("disconnect")
    else:
        if kind == "breakpoint":
            client.set_breakpoints(LOOP)
        client.ask("continue", threadId=thread)


def one(notebook: Notebook, kind: str, end: str, choose: random.Random) -> None:
    """Debug one cell; raises if the client or the cell does not come to an end."""
    command = [sys.executable, "-m", "benchmarks.faults.debug_sessions", "--client", notebook.connection_file, kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        _expect(client.stdout.readline(), "attached")
        cell = notebook.client.execute(CELLS[kind], allow_stdin=False)
        time.sleep(choose.random() * 0.5)  # at any point of the cell
        if kind in ("pause", "hang"):
            client.stdin.write("\n")
            client.stdin.flush()
        _expect(client.stdout.readline(), "stopped")
        if end in ("continue", "disconnect"):
            client.stdin.write(f"{end}\n")
            client.stdin.flush()
            _expect(client.stdout.readline(), "done")
        elif end == "interrupt":
            notebook.interrupt()
        elif end == "kill -9 of a rank":
            os.kill(choose.choice(pids), signal.SIGKILL)
        client.kill()
    if end in ("kill -9 of the client", "kill -9 of a rank"):
        with DapClient(notebook.connect()) as next_client:
            next_client.ask("disconnect")
    notebook.outcome(cell, 60)


pids: list[int] = []  # of the ranks


def _expect(line: str, text: str) -> None:
    if line.strip() != text:
        raise RuntimeError(f"the client printed {line!r}, not {text!r}")


def main() -> int:
    """Debug the sessions; the exit status is 1 if one was lost."""
    parser = make_parser("benchmarks.faults.debug_sessions", __doc__)
    parser.add_argument("--sessions", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--launcher", default="local", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--client", nargs=2, metavar=("FILE", "KIND"), help="be the client (used by this benchmark)")
    add_write_option(parser, RESULTS)
    arguments = parser.parse_args()
    if arguments.client:
        be_client(*arguments.client)
        return 0
    exit_on_sigterm()
    choose = random.Random(arguments.seed)
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    lost = 0
    with Notebook() as notebook:
        notebook.run(f"%dist_init -n {arguments.ranks} --launcher {arguments.launcher}").check()
        for number in range(1, arguments.sessions + 1):
            shown = notebook.run("%%distributed\nimport os; print(os.getpid())").check()
            pids[:] = [int(line.split()[-1]) for line in shown.lines]
            kind, end = choose.choice(list(CELLS)), choose.choice(ENDS)
            one(notebook, kind, end, choose)
            began = time.monotonic()
            outcome = notebook.run(CHECK)
            is_lost = f"ranks 0-{arguments.ranks - 1} │ sum {float(arguments.ranks)}" not in outcome.lines
            lost += is_lost
            seconds[kind, end].append(time.monotonic() - began)
            print(f"{number:4} {kind}, {end}: {'LOST ' + outcome.text if is_lost else 'whole'}", flush=True)
        notebook.run("%dist_shutdown").check()
    rows = [
        [kind, end, str(len(found)), f"{statistics.median(found):.2f} s", f"{max(found):.2f} s"]
        for (kind, end), found in sorted(seconds.items())
    ]
    about = (
        f"{arguments.sessions} debug sessions on {arguments.ranks} ranks, each by a client in a process of its own. "
        f"Sessions lost, i.e. without an all_reduce on all ranks afterwards: {lost}."
    )
    head = ["the ranks stop by", "it ends by", "sessions", "all_reduce afterwards, median", "longest"]
    lines = [about, "", *markdown_table(head, rows)]
    report(page("Debug sessions", facts(), lines), RESULTS if arguments.write else None)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
