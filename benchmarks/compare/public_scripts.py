"""``python -m benchmarks.public_scripts FOLDER``: scripts of others, by their own launcher and by ``%dist_run``.

Covers: on two ranks, the same end and the same words under torchrun or mpiexec, twice in the ranks' processes, and in
processes of their own.
Does not cover: getting the scripts: FOLDER holds each project's files under ``owner/name``, as in SCRIPTS; what a
project installs with its package needs none.

The packages that they use are those of ``make test-frameworks``.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_disttrain import CellRun, Cluster
from jupyter_disttrain.cluster.events import Displayed
from jupyter_disttrain.errors import DisttrainError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from jupyter_disttrain.cluster.events import Event

RESULTS = Path(__file__).parents[1] / "results" / "public_scripts.md"
RANKS = 2
LIMIT_S = 300.0
WAYS = {"in the ranks": "here", "once more": "here", "--fresh": "fresh"}


@dataclass(frozen=True, slots=True)
class Script:
    """One that somebody else wrote."""

    project: str  # owner/name
    path: str  # in the project; of a module that its package brings, the name
    arguments: str = ""  # {out} is an empty folder
    is_module: bool = False
    launcher: str = "torchrun"  # or mpiexec
    is_random: bool = False  # it sets no seed, so its numbers are others each time

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

# What differs from one run to the next, and how wide a table is drawn.
CHANGING = (
    (re.compile(r"\x1b\[[0-9;?]*[A-Za-z]"), ""),
    (re.compile(r"'(\w*(?:runtime|per_second|preparation_time))': '?[\d.e+-]+'?"), r"\1"),
    (re.compile(r".*[━╸╺]\s.*/.*"), ""),  # a bar that moves
    (re.compile(r"[─-╿]+"), " "),
    (re.compile(r"\s+"), " "),
    (re.compile(r"\d+:\d\d(:\d\d)?(,\d+)?|\d+(\.\d+)? ?(it/s|ms|s\b|sec\w*)"), "TIME"),
    (re.compile(r"0x[0-9a-f]+"), "ADDRESS"),
    (re.compile(r"(/[\w.+-]+){2,}"), "PATH"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one run ended."""

    failure: str  # empty if it ended well
    words: Counter[str]  # the lines that its ranks wrote to stdout
    seconds: float
    shown: Counter[str] = field(default_factory=Counter)  # lines that they displayed as a notebook can

    def compared_to(self, other: Outcome) -> str:
        """Say whether another run said the same, which ranks may do in another order."""
        if self.failure:
            return f"failed: {self.failure}"
        missing, added = other.words - self.words - self.shown, self.words - other.words
        if missing or added:
            return f"differs: {[*missing.elements()][:1]} became {[*added.elements()][:1]}"
        return f"the same, {self.seconds:.1f} s"


NUMBER = re.compile(r"-?\d+\.\d+(e[+-]\d+)?"), "NUMBER"


class Displays:
    """What ranks displayed otherwise than as text, which libraries do where they find a notebook."""

    def __init__(self) -> None:
        self.texts: dict[object, str] = {}

    def on_events(self, events: Sequence[Event], _run: CellRun) -> None:
        for event in events:
            if isinstance(event, Displayed):
                key = (event.rank, event.display_id or len(self.texts))
                self.texts[key] = str(event.data.get("text/plain", ""))

    def on_end(self, run: CellRun) -> None:
        """Nothing is left to do."""


def words_of(script: Script, texts: Iterable[str]) -> Counter[str]:
    lines: Counter[str] = Counter()
    patterns = (*CHANGING, NUMBER) if script.is_random else CHANGING
    for text in texts:
        for line in text.splitlines():
            for pattern, word in patterns:
                line = pattern.sub(word, line)  # noqa: PLW2901
            lines[line.strip()] += bool(line.strip())
    return +lines


def by_launcher(script: Script, target: str, arguments: list[str], out: Path) -> Outcome:
    """Run a script as its project does."""
    program = ["-m", target] if script.is_module else [target]
    logs = out.parent / "logs"
    if script.launcher == "torchrun":
        options = ["--nproc-per-node", str(RANKS), "--master-port", "0", "--rdzv-backend", "c10d"]
        options += ["--rdzv-endpoint", "localhost:0", "--log-dir", str(logs), "--redirects", "3"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, *program, *arguments]
    else:
        command = ["mpiexec", "-n", str(RANKS), "--map-by", ":oversubscribe", sys.executable, *program, *arguments]
    environment = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu"}
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=out, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    seconds = time.monotonic() - began
    texts = [path.read_text() for path in sorted(logs.rglob("stdout.log"))] or [done.stdout]
    if done.returncode:
        said = [path.read_text() for path in sorted(logs.rglob("stderr.log"))] or [done.stderr]
        last = [line for text in said for line in text.splitlines() if "Error" in line or "terminate called" in line]
        return Outcome(f"exit {done.returncode}: {(last or [''])[-1][:200]}", words_of(script, texts), seconds)
    return Outcome("", words_of(script, texts), seconds)


def by_session(how: str) -> Callable[[Cluster, Script, str, list[str], Path], Outcome]:
    """Return what runs a script on the ranks of a session."""

    def run_it(cluster: Cluster, script: Script, target: str, arguments: list[str], out: Path) -> Outcome:
        os.chdir(out)
        began = time.monotonic()
        run = cluster.run_script(target, arguments, is_module=script.is_module, how=how, block=False)
        failure, displays = "", Displays()
        run.listen(displays)
        try:
            run.wait(LIMIT_S)
        except DisttrainError as error:
            failure = f"{error}".replace(f"{Path(target).parent}/", "")[:200]
        seconds = time.monotonic() - began
        shown = words_of(script, displays.texts.values())
        return Outcome(failure, words_of(script, run.stdout.values()), seconds, shown)

    return run_it


def row_of(cluster: Cluster, script: Script, folder: Path) -> list[str]:
    """Run one script in every way; return what came of each."""
    target = script.path if script.is_module else str(folder / script.project / script.path)
    if not script.is_module and not Path(target).is_file():
        return [f"not in {folder.name}/", *("-" for _ in WAYS)]

    def run_in_new_folder(run_it: Callable[[str, list[str], Path], Outcome]) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="public-script-") as new:
            out = Path(new, "out")
            out.mkdir()
            try:
                return run_it(target, script.arguments.format(out=out).split(), out)
            finally:
                os.chdir(folder)

    own = run_in_new_folder(lambda *what: by_launcher(script, *what))
    cells = [own.failure or f"{own.words.total()} lines, {own.seconds:.1f} s"]
    for how in WAYS.values():
        session = by_session(how)
        found = run_in_new_folder(lambda *what: session(cluster, script, *what))  # noqa: B023
        cells.append(found.compared_to(own))
    return cells


def main() -> int:
    """Run them all; the exit status is 1 if one did not do the same."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.public_scripts", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="those alone whose title has this in it")
    parser.add_argument("--write", action="store_true", help=f"write the table to {RESULTS.name}")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = arguments.folder.resolve()
    lines = [
        "# Public scripts, unchanged",
        "",
        f"On {RANKS} ranks, CPU: by the project's own launcher, then by `%dist_run` in one session, line by line.",
        "",
        ", ".join(f"{name} {version(name)}" for name in _packages()),
        "",
        f"| script | its launcher | {' | '.join(WAYS)} |",
        f"|---|---|{'---|' * len(WAYS)}",
    ]
    failed = False
    with Cluster(n=RANKS) as cluster:
        for script in SCRIPTS:
            if arguments.only not in script.title:
                continue
            cells = row_of(cluster, script, folder)
            failed |= not all(cell.startswith("the same") for cell in cells[1:])
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in [f'`{script.title}`', *cells])} |")
            print(lines[-1], flush=True)
    if arguments.write:
        RESULTS.write_text("\n".join(lines) + "\n")
    return int(failed)


def _packages() -> list[str]:
    return ["torch", "accelerate", "transformers", "lightning", "horovod", "mpi4py"]


if __name__ == "__main__":
    sys.exit(main())
