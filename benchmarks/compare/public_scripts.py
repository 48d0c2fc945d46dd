"""Compare public scripts under their own launcher and under ``%dist_run``.

Usage: ``python -m benchmarks.compare.public_scripts FOLDER``.

Covers: exit and output on two ranks, under torchrun or mpiexec, and twice by ``%dist_run`` in one session.
Does not cover: downloading the scripts. FOLDER has each project's files under ``owner/name``, as in SCRIPTS; modules of
an installed package need no files. The packages are those of ``make test-frameworks``.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.lib import environment
from benchmarks.lib.command_line import add_write_option, make_parser, report
from benchmarks.lib.listener import CellListener
from benchmarks.lib.table import markdown_table, page
from jupyter_disttrain import CellRun, Cluster
from jupyter_disttrain.client.cells.events import Displayed
from jupyter_disttrain.errors import DisttrainError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from jupyter_disttrain.client.cells.events import Event

RESULTS = environment.RESULTS / "public_scripts.md"
RANKS = 2
LIMIT_S = 300.0
PACKAGES = ("torch", "accelerate", "transformers", "lightning", "horovod", "mpi4py")
MODES = {"%dist_run": "auto", "%dist_run again": "auto"}


@dataclass(frozen=True, slots=True)
class Script:
    """A script of another project."""

    project: str  # owner/name
    path: str  # in the project, or the name of an installed module
    arguments: str = ""  # {out} is an empty folder
    is_module: bool = False
    launcher: str = "torchrun"  # or mpiexec
    is_random: bool = False  # it sets no seed, so its numbers differ in each run

    @property
    def title(self) -> str:
        command = f"-m {self.path}" if self.is_module else Path(self.path).name
        return f"{self.project}: {command} {self.arguments.replace('{out}', 'DIR')}".strip()


_LAUNCHER = "test/distributed/launcher/bin/"
_TRAINER = "tests/trainer/distributed/scripts/"
_ACCELERATE = "accelerate.test_utils.scripts."
SCRIPTS = (
    Script("pytorch/pytorch", f"{_LAUNCHER}test_script_init_method.py", "--init-method env://"),
    Script("pytorch/pytorch", f"{_LAUNCHER}test_script_is_torchelastic_launched.py", "--out_file {out}/is"),
    Script("huggingface/accelerate", f"{_ACCELERATE}test_script", is_module=True),
    Script("huggingface/accelerate", f"{_ACCELERATE}test_ops", is_module=True),
    Script("huggingface/accelerate", f"{_ACCELERATE}test_sync", is_module=True),
    Script("huggingface/transformers", f"{_TRAINER}worker_seed.py", "--output_dir {out} --disable_tqdm true"),
    Script("huggingface/transformers", f"{_TRAINER}dispatch_batches.py", "--output_dir {out} --disable_tqdm true"),
    Script("huggingface/transformers", f"{_TRAINER}eval_ddp.py", "--output_dir {out} --disable_tqdm true"),
    Script("Lightning-AI/pytorch-lightning", "examples/pytorch/bug_report/bug_report_model.py", is_random=True),
    Script(
        "Lightning-AI/pytorch-lightning",
        "tests/tests_pytorch/strategies/scripts/cli_script.py",
        "fit --trainer.accelerator cpu --trainer.devices 2 --trainer.strategy ddp --trainer.max_epochs 1 "
        "--trainer.limit_train_batches 2 --trainer.limit_val_batches 2 --trainer.default_root_dir {out}",
    ),
    Script("horovod/horovod", "examples/adasum/adasum_small_model.py", "--op Average", launcher="mpiexec"),
    Script("horovod/horovod", "examples/adasum/adasum_small_model.py", "--op Adasum", launcher="mpiexec"),
)

# Parts of the output that differ from one run to the next, and the width of tables.
VARYING = (
    (re.compile(r"\x1b\[[0-9;?]*[A-Za-z]"), ""),
    (re.compile(r"'(\w*(?:runtime|per_second|preparation_time))': '?[\d.e+-]+'?"), r"\1"),
    (re.compile(r".*[━╸╺]\s.*/.*"), ""),  # a progress bar
    (re.compile(r"[─-╿]+"), " "),
    (re.compile(r"\s+"), " "),
    (re.compile(r"\d+:\d\d(:\d\d)?(,\d+)?|\d+(\.\d+)? ?(it/s|ms|s\b|sec\w*)"), "TIME"),
    (re.compile(r"0x[0-9a-f]+"), "ADDRESS"),
    (re.compile(r"(/[\w.+-]+){2,}"), "PATH"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one run."""

    failure: str  # empty if the run succeeded
    lines: Counter[str]  # written to stdout by all ranks
    seconds: float
    displayed: Counter[str] = field(default_factory=Counter)  # lines of rich displays

    def compared_to(self, other: Outcome) -> str:
        """Compare the lines with those of another run, in any order."""
        if self.failure:
            return f"failed: {self.failure}"
        missing, added = other.lines - self.lines - self.displayed, self.lines - other.lines
        if missing or added:
            return f"differs: {[*missing.elements()][:1]} became {[*added.elements()][:1]}"
        return f"{SAME}, {self.seconds:.1f} s"


NUMBER = re.compile(r"-?\d+\.\d+(e[+-]\d+)?"), "NUMBER"
SAME = "the same"


class Displays(CellListener):
    """Collects rich displays, which some libraries use instead of printing when they run in a notebook."""

    def __init__(self) -> None:
        self.texts: dict[object, str] = {}

    def on_events(self, events: Sequence[Event], run: CellRun) -> None:  # noqa: ARG002
        for event in events:
            if isinstance(event, Displayed):
                key = (event.rank, event.display_id or len(self.texts))
                self.texts[key] = str(event.data.get("text/plain", ""))


def lines_of(script: Script, texts: Iterable[str]) -> Counter[str]:
    """Count the lines of ``texts``, with the varying parts replaced."""
    lines: Counter[str] = Counter()
    patterns = (*VARYING, NUMBER) if script.is_random else VARYING
    for text in texts:
        for line in text.splitlines():
            for pattern, replacement in patterns:
                line = pattern.sub(replacement, line)  # noqa: PLW2901
            lines[line.strip()] += bool(line.strip())
    return +lines


def by_launcher(script: Script, target: str, arguments: list[str], out: Path) -> Outcome:
    """Run a script under its project's launcher."""
    program = ["-m", target] if script.is_module else [target]
    logs = out.parent / "logs"
    if script.launcher == "torchrun":
        options = ["--nproc-per-node", str(RANKS), "--master-port", "0", "--rdzv-backend", "c10d"]
        options += ["--rdzv-endpoint", "localhost:0", "--log-dir", str(logs), "--redirects", "3"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, *program, *arguments]
    else:
        command = ["mpiexec", "-n", str(RANKS), "--map-by", ":oversubscribe", sys.executable, *program, *arguments]
    variables = os.environ | environment.OPENMPI_AS_ROOT
    variables |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu"}
    begun = time.monotonic()
    done = subprocess.run(command, cwd=out, env=variables, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    seconds = time.monotonic() - begun
    texts = [path.read_text() for path in sorted(logs.rglob("stdout.log"))] or [done.stdout]
    if done.returncode:
        stderr = [path.read_text() for path in sorted(logs.rglob("stderr.log"))] or [done.stderr]
        last = [line for text in stderr for line in text.splitlines() if "Error" in line or "terminate called" in line]
        return Outcome(f"exit {done.returncode}: {(last or [''])[-1][:200]}", lines_of(script, texts), seconds)
    return Outcome("", lines_of(script, texts), seconds)


def by_dist_run(cluster: Cluster, mode: str, script: Script, target: str, arguments: list[str], out: Path) -> Outcome:
    """Run a script on the ranks of a cluster, as ``%dist_run`` does."""
    os.chdir(out)
    begun = time.monotonic()
    run = cluster.scripts.run(target, arguments, is_module=script.is_module, how=mode, block=False)
    failure, displays = "", Displays()
    run.listener = displays
    try:
        run.wait(LIMIT_S)
    except DisttrainError as error:
        failure = f"{error}".replace(f"{Path(target).parent}/", "")[:200]
    seconds = time.monotonic() - begun
    displayed = lines_of(script, displays.texts.values())
    return Outcome(failure, lines_of(script, run.stdout.values()), seconds, displayed)


def outcomes(cluster: Cluster, script: Script, folder: Path) -> list[str]:
    """Run one script under its launcher and in every mode; return the cells of its row."""
    target = script.path if script.is_module else str(folder / script.project / script.path)
    if not script.is_module and not Path(target).is_file():
        return [f"not in {folder.name}/", *("-" for _ in MODES)]

    def run_in_new_folder(run: Callable[[Script, str, list[str], Path], Outcome]) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="public-script-") as new:
            out = Path(new, "out")
            out.mkdir()
            try:
                return run(script, target, script.arguments.format(out=out).split(), out)
            finally:
                os.chdir(folder)

    own = run_in_new_folder(by_launcher)
    runs = [run_in_new_folder(partial(by_dist_run, cluster, mode)) for mode in MODES.values()]
    return [own.failure or f"{own.lines.total()} lines, {own.seconds:.1f} s", *(run.compared_to(own) for run in runs)]


def main() -> int:
    """Run all scripts; the exit status is 1 if the outcome of one differs."""
    parser = make_parser("benchmarks.compare.public_scripts", __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="only scripts whose title contains this text")
    add_write_option(parser, RESULTS)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = arguments.folder.resolve()
    rows, failed = [], False
    with Cluster(n=RANKS) as cluster:
        for script in SCRIPTS:
            if arguments.only not in script.title:
                continue
            cells = outcomes(cluster, script, folder)
            failed |= not all(cell.startswith(SAME) for cell in cells[1:])
            rows.append([f"`{script.title}`", *cells])
            print(" | ".join(rows[-1]), flush=True)
    facts = [
        f"{RANKS} ranks, CPU: under the project's own launcher, then by `%dist_run` in one session; lines are compared",
        ", ".join(f"{name} {version(name)}" for name in PACKAGES),
    ]
    table = markdown_table(("script", "its launcher", *MODES), rows)
    report(page("Public scripts, unchanged", facts, table), RESULTS if arguments.write else None)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
