"""Compare small scripts under torchrun and under ``%dist_run``.

Covers: output and exit code on two ranks; each script, and a module beside it, is edited and runs again in the session.
Does not cover: scripts of other projects (``public_scripts``), time (``benchmarks.compare``).
"""

from __future__ import annotations

import builtins
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib import environment
from benchmarks.lib.command_line import add_write_option, exit_on_sigterm, make_parser, report
from benchmarks.lib.table import markdown_table, page
from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import RankFailure

RESULTS = environment.RESULTS / "own_scripts.md"
RANKS = 2
LIMIT_S = 120.0
EDITIONS = (1, 22)  # of different length: Python compares the size and the seconds of the last change of a module

HEAD = """import os, sys, beside
EDITION = {edition}
if __name__ == "__main__":
    print("edition", EDITION, beside.edition, flush=True)
    beside.meet("begun")
"""
# Ranks meet before they fail: torchrun ends the others, which may not have printed everything.
MODULE = """import os, pathlib, time
edition = {edition}
def meet(name):
    pathlib.Path(f"{name}-{os.environ['RANK']}").touch()
    while len(list(pathlib.Path().glob(f"{name}-*"))) < int(os.environ["WORLD_SIZE"]): time.sleep(0.01)
"""
OPERATORS = """import torch
torch.library.define("mine::plus", "(Tensor x) -> Tensor")
@torch.library.impl("mine::plus", "cpu")
def plus(x): return x + edition
"""

SCRIPTS = {
    "environment and arguments": """
        names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE"
        print([os.environ[name] for name in names.split()], sys.argv, __name__, os.path.basename(os.getcwd()))
        print(sys.path[0] == os.getcwd(), [sys.stdin.read()], sorted(globals()))
        """,
    "training with DDP": """
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP
        dist.init_process_group("gloo")
        torch.manual_seed(EDITION)
        model = DDP(torch.nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(20):
            loss = (model(torch.randn(16, 8) + dist.get_rank()) - 1).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(dist.get_rank(), loss.item(), model.module.weight.tolist())
        dist.destroy_process_group()
        """,
    "own operators": """
        import torch
        print(torch.ops.mine.plus(torch.ones(2)))
        """,
    "torch.compile": """
        import torch
        print(torch.compile(lambda x: x * EDITION + 1, backend="aot_eager")(torch.ones(2)))
        """,
    "asyncio": """
        import asyncio
        async def main():
            await asyncio.sleep(0)
            return await asyncio.to_thread(lambda: "from a thread")
        print(asyncio.run(main()))
        """,
    "os.fork": """
        child = os.fork()
        if child == 0:
            print("in the child", flush=True)
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
    "multiprocessing, fork": """
        import multiprocessing
        with multiprocessing.get_context("fork").Pool(2) as pool:
            print(pool.map(abs, range(-EDITION, 0)))
        """,
    "multiprocessing, spawn": """
        import multiprocessing
        def square(x): return x * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, range(EDITION)))
        """,
    "DataLoader workers": """
        import torch
        from torch.utils.data import DataLoader, DistributedSampler
        data = torch.arange(24) * EDITION
        sampler = DistributedSampler(data, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
        for kind in ("fork", "forkserver", "spawn"):
            loader = DataLoader(data, 4, sampler=sampler, num_workers=2, multiprocessing_context=kind)
            if __name__ == "__main__":
                print(kind, [batch.tolist() for batch in loader])
        """,
    "logging": """
        import logging
        logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(name)s %(levelname)s %(message)s")
        logging.getLogger("train").info("step %d", EDITION)
        """,
    "signals": """
        import signal
        names = "SIGINT SIGTERM SIGHUP SIGALRM SIGCHLD SIGPIPE SIGUSR1 SIGCONT"
        print([getattr(signal.getsignal(getattr(signal, name)), "name", "a function") for name in names.split()])
        print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        signal.signal(signal.SIGUSR1, lambda *_: print("handled", flush=True))
        signal.signal(signal.SIGALRM, lambda *_: sys.exit("the alarm"))
        signal.raise_signal(signal.SIGUSR1)
        beside.meet("handled")
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        while True: signal.pause()
        """,
    "ends: threads, atexit, files": """
        import atexit, threading, time
        file = open("log", "a")
        file.write("kept in a buffer")
        atexit.register(lambda: print("at exit", file.closed))
        threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
        class Noisy:
            def __del__(self): print("deleted")
        noisy = Noisy()
        """,
    "exit code of sys.exit(3)": "sys.exit(3)",
    "exit code of sys.exit(0)": "sys.exit(0)",
    "exit code of sys.exit('text')": "sys.exit('text')",
    "exit code of os._exit(5)": "os._exit(5)",
    "exit code of an error": "{}[EDITION]",
    "exit code of an error in a function": "def f(): raise RuntimeError('boom')\nf()",
    "exit code after SIGKILL": "import signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "exit code after SIGTERM": "import signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "exit code of a segmentation fault": "import ctypes\nctypes.string_at(0)",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run has ended."""

    lines: Counter[str]  # written to stdout by all ranks
    code: int  # exit code of the first rank that failed; negative for a signal

    def compared_to(self, other: Outcome) -> str:
        """Compare with another run; the order of the ranks' lines does not count."""
        if self == other:
            return "the same"
        missing, added = other.lines - self.lines, self.lines - other.lines
        return f"exit code {self.code}, without {sorted(missing)[:2]}, with {sorted(added)[:2]}"


def write(folder: Path, script: str, edition: int) -> Path:
    """Write an edition of a script and of the module beside it."""
    module = MODULE + OPERATORS * (script == "own operators")
    (folder / "beside.py").write_text(module.replace("{edition}", str(edition)))
    path = folder / "script.py"
    path.write_text(HEAD.replace("{edition}", str(edition)) + textwrap.dedent(SCRIPTS[script]).lstrip("\n"))
    return path


def forget_meetings(folder: Path) -> None:
    """Remove the files by which ranks have met in an earlier run."""
    for path in (*folder.glob("begun-*"), *folder.glob("handled-*")):
        path.unlink()


def by_torchrun(path: Path) -> Outcome:
    """Run a script under torchrun."""
    forget_meetings(path.parent)
    with tempfile.TemporaryDirectory(prefix="own-script-logs-") as logs:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command += ["--log-dir", logs, "--redirects", "3", path.name, "--epochs", "2"]
        done = subprocess.run(
            command,
            cwd=path.parent,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
        lines = Counter(line for log in Path(logs).rglob("stdout.log") for line in log.read_text().splitlines())
    code = re.search(r"Root Cause.*?exitcode\s*: (-?\d+)", done.stderr, re.DOTALL)
    assert bool(code) == bool(done.returncode), done.stderr
    return Outcome(lines, int(code[1]) if code else 0)


def by_dist_run(cluster: Cluster, path: Path) -> Outcome:
    """Run a script on the ranks of a cluster, as ``%dist_run`` does."""
    forget_meetings(path.parent)
    run = cluster.scripts.run(path.name, ["--epochs", "2"], block=False)
    code = 0
    try:
        run.wait(LIMIT_S)
    except RankFailure as error:
        first = error.failures[0]
        exited = re.search(r"exited with code (\d+)", first.evalue)
        killed = re.search(r"was killed by (SIG\w+)", first.evalue)
        if not exited and not killed and "exited: " not in first.evalue and not hasattr(builtins, first.ename):
            raise  # not an error of the script's own, after which Python exits with 1
        code = int(exited[1]) if exited else -signal.Signals[killed[1]] if killed else 1
    return Outcome(Counter(line for text in run.stdout.values() for line in text.splitlines()), code)


def main() -> int:
    """Run all scripts; the exit status is 1 if the outcome of one differs."""
    parser = make_parser("benchmarks.compare.own_scripts", __doc__)
    parser.add_argument("--only", default="", help="only scripts whose name contains this text")
    add_write_option(parser, RESULTS)
    arguments = parser.parse_args()
    exit_on_sigterm()
    rows, same = [], True
    with tempfile.TemporaryDirectory(prefix="own-scripts-") as name, Cluster(n=RANKS) as cluster:
        os.chdir(name)
        for script in (script for script in SCRIPTS if arguments.only in script):
            row = [script]
            for edition in EDITIONS:
                path = write(Path(name), script, edition)
                expected = by_torchrun(path)
                verdict = by_dist_run(cluster, path).compared_to(expected)
                same &= verdict == "the same"
                row += [f"{expected.lines.total()} lines, exit code {expected.code}", verdict]
            rows.append(row)
            print(" | ".join(row), flush=True)
        os.chdir("/")
    facts = [*environment.facts(), f"{RANKS} ranks, CPU; every script runs, is edited, and runs again in one session"]
    table = markdown_table(("script", "torchrun", "`%dist_run`", "edited: torchrun", "edited: `%dist_run`"), rows)
    report(page("Scripts under torchrun and under %dist_run", facts, table), RESULTS if arguments.write else None)
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
