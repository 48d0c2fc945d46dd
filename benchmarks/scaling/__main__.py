"""``python -m benchmarks.scaling``: ResNet-50 on synthetic images, by number of ranks, with DDP and with Horovod.

Covers: images a second, how far from linear, compute and communication in a step, all_reduce by message size.
Does not cover: accuracy, several hosts, what limits in words and the table (``scaling_report``), the plot
(``scaling_plot``).

The workload, ``workloads/resnet50.py``, runs as a cell on a cluster of its own for each number of ranks, and each round
has all of them, so that a machine that changes its speed meanwhile changes it for all. It does what Horovod's
pytorch_synthetic_benchmark.py does, with a plain batch norm, momentum, and on CPU one thread a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.lib import environment
from jupyter_disttrain import Cluster
from jupyter_disttrain.cluster.devices import visible_gpus

from . import plot as scaling_plot
from . import report as scaling_report
from .report import GRADIENT_BYTES, Point, Settings

RESULTS = Path(__file__).parents[1] / "results" / "scaling.md"
WORKLOAD = (Path(__file__).parents[1] / "workloads" / "resnet50.py").read_text()
ARMS = ("ddp", "horovod")
FIRST_BYTES, LAST_BYTES, LAST_BYTES_GPU = 1 << 10, 64 << 20, 1 << 30
CELL_LIMIT_S = 1800.0
QUIET = 0.3  # of the cores may be busy when it begins
NO_HOROVOD = "Horovod is not installed here and is left out; `jupyter disttrain horovod` builds and installs it."


@dataclass
class Collected:
    """Blocks of one arm on one number of ranks, from all rounds."""

    path: str = ""  # what carries its messages
    blocks: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    all_reduce_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, figures: dict[str, Any]) -> None:
        self.path = figures["path"]
        for name in ("step_s", "compute_s", "thread_s", "others_s"):
            self.blocks[name] += figures[name]
        for size, times in figures["all_reduce_s"].items():
            self.all_reduce_s[int(size)] += times

    def point(self, arm: str, ranks: int) -> Point:
        blocks = {name: tuple(times) for name, times in self.blocks.items()}
        sums = {size: tuple(self.all_reduce_s[size]) for size in sorted(self.all_reduce_s)}
        return Point(arm=arm, path=self.path, ranks=ranks, all_reduce_s=sums, **blocks)


def rank_counts(every: int) -> tuple[int, ...]:
    """Return 1, 2, 4 and so on, up to all.

    >>> rank_counts(6)
    (1, 2, 4, 6)
    """
    return tuple(sorted({*(1 << power for power in range(every.bit_length())), every}))


def message_sizes(last: int) -> list[int]:
    """Return the sizes of the sweep in bytes, each four times the one before."""
    return [FIRST_BYTES << power for power in range(0, (last // FIRST_BYTES).bit_length(), 2)]


def measure(settings: Settings, ranks: tuple[int, ...], arms: tuple[str, ...]) -> tuple[str, list[Point]]:
    """Run every arm on every number of ranks; returns what the ranks ran on, and the figures."""
    collected = {(arm, n): Collected() for arm in arms for n in ranks}
    device = ""
    for turn in range(settings.rounds):
        for n in ranks if turn % 2 == 0 else reversed(ranks):
            with Cluster(n=n, launcher="mpi", name="scaling") as cluster:
                for arm in arms:
                    figures = _run(cluster, arm, settings, _sizes(settings, n, ranks))
                    device = figures["device"]
                    collected[arm, n].add(figures)
                    rate = n * settings.batch / min(figures["step_s"])
                    print(
                        f"round {turn + 1}, {n} {'ranks' if n > 1 else 'rank'}, {arm}: up to {rate:.1f} images/s",
                        flush=True,
                    )
    return device, [found.point(arm, n) for (arm, n), found in collected.items()]


def _sizes(settings: Settings, n: int, ranks: tuple[int, ...]) -> list[int]:
    """Return what is added up on ``n`` ranks: all gradients, and on the most ranks the whole sweep."""
    if n == 1:
        return []
    return [*settings.message_bytes, GRADIENT_BYTES] if n == max(ranks) else [GRADIENT_BYTES]


def _run(cluster: Cluster, arm: str, settings: Settings, sizes: list[int]) -> dict[str, Any]:
    variables = {
        "BENCH_ARM": arm,
        "BENCH_BATCH": str(settings.batch),
        "BENCH_IMAGE": str(settings.image),
        "BENCH_STEPS": str(settings.steps),
        "BENCH_BLOCKS": str(settings.blocks),
        "BENCH_SIZES": ",".join(map(str, sizes)),
    }
    code = f"import os\nos.environ.update({variables!r})\n{WORKLOAD}"
    said = cluster.run(code, values=False, timeout_s=CELL_LIMIT_S).stdout[0]
    (told,) = [line for line in said.splitlines() if line.startswith("figures ")]
    figures: dict[str, Any] = json.loads(told.removeprefix("figures "))
    return figures


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({1, *map(int, text.split(","))}))  # efficiency is against one


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no arm {unknown[0]!r}; there are {', '.join(ARMS)}")
    return names


def _arguments() -> argparse.Namespace:
    gpus = len(visible_gpus())
    every = gpus or len(os.sched_getaffinity(0))
    batch, image, steps, blocks = (64, 224, 10, 10) if gpus else (4, 64, 2, 4)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument(
        "--ranks",
        type=_numbers,
        default=rank_counts(every),
        help="numbers of ranks, e.g. 1,2 (default: 1, 2, 4 and so on, up to all GPUs or cores)",
    )
    parser.add_argument("--batch", type=int, default=batch, help="images a rank and step (default here: %(default)s)")
    parser.add_argument("--image", type=int, default=image, help="pixels of a side (default here: %(default)s)")
    parser.add_argument("--steps", type=int, default=steps, help="in a block (default here: %(default)s)")
    parser.add_argument("--blocks", type=int, default=blocks, help="in a round (default here: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="new clusters of each size (default: %(default)s)")
    parser.add_argument("--arms", type=_names, default=ARMS, help=",".join(ARMS))
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}, its raw figures and its plot")
    arguments = parser.parse_args()
    if min(arguments.ranks) < 1:
        parser.error(f"--ranks are 1 or more, not {min(arguments.ranks)}")
    for name in ("batch", "image", "steps", "blocks", "rounds"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} is 1 or more, not {getattr(arguments, name)}")
    # The last stage sees an image as a 32nd of its side, and batch norm needs more than one value of each channel.
    if arguments.batch == 1 and arguments.image <= 32:
        parser.error("batch norm can't train on one image of up to 32 pixels; take --batch 2 or --image 64")
    return arguments


def _quiet() -> list[str]:
    """Say so if the machine has other things to do."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load <= QUIET * cores:
        return []
    return [
        f"**the machine was not quiet when this began** (load average {load:.1f} on {cores} cores): not to be quoted"
    ]


def main() -> int:
    """Measure, print the table, and write it if asked to."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    gpus = bool(visible_gpus())
    facts, notes = environment.facts(), _quiet()
    settings = Settings(
        batch=arguments.batch,
        image=arguments.image,
        steps=arguments.steps,
        blocks=arguments.blocks,
        rounds=arguments.rounds,
        message_bytes=tuple(message_sizes(LAST_BYTES_GPU if gpus else LAST_BYTES)),
    )
    arms = arguments.arms
    if "horovod" in arms and find_spec("horovod") is None:
        arms = tuple(arm for arm in arms if arm != "horovod")
        notes.append(NO_HOROVOD)
        if not arms:
            print(NO_HOROVOD)
            return 1
    device, points = measure(settings, arguments.ranks, arms)
    facts += scaling_report.facts(settings, device, arms)
    text = scaling_report.markdown(facts, settings, device, points, notes, RESULTS.with_suffix(".png").name)
    print("\n" + text)
    if arguments.write:
        RESULTS.write_text(text + "\n", encoding="utf-8")
        raw = {"facts": facts, "notes": notes, "points": [point.as_dict() for point in points]}
        RESULTS.with_suffix(".json").write_text(json.dumps(raw, indent=1), encoding="utf-8")
        scaling_plot.write(RESULTS.with_suffix(".png"), settings, device, points)
        print(f"written to {RESULTS.relative_to(environment.ROOT)}, with .json and .png beside it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
