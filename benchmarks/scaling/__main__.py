"""Train ResNet-50 on synthetic images with DDP and Horovod, on different numbers of ranks."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from benchmarks.lib import environment
from benchmarks.lib.command_line import add_write_option, exit_on_sigterm, make_parser, name_list, report
from jupyter_disttrain.client.startup.gpus import visible_gpus

from . import plot
from .measure import LAST_BYTES, LAST_BYTES_GPU, STRATEGIES, measure, message_sizes, rank_counts
from .points import Settings
from .report import facts as workload_facts
from .report import markdown

if TYPE_CHECKING:
    import argparse

RESULTS = environment.RESULTS / "scaling.md"
MAX_LOAD = 0.3  # load average per core at the start
NO_HOROVOD = "Horovod is not installed; `jupyter disttrain horovod` builds and installs it"


def _integers(text: str) -> tuple[int, ...]:
    return tuple(sorted({1, *map(int, text.split(","))}))  # efficiency is relative to one rank


def _arguments() -> argparse.Namespace:
    gpus = len(visible_gpus())
    total = gpus or environment.core_count()
    batch, image, steps, blocks = (64, 224, 10, 10) if gpus else (4, 64, 2, 4)
    parser = make_parser("benchmarks.scaling", __doc__)
    parser.add_argument(
        "--ranks",
        type=_integers,
        default=rank_counts(total),
        help="numbers of ranks, e.g. 1,2 (default: powers of two up to all GPUs or cores)",
    )
    parser.add_argument("--batch", type=int, default=batch, help="images per rank and step (default: %(default)s)")
    parser.add_argument("--image", type=int, default=image, help="height and width in pixels (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=steps, help="per block (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=blocks, help="per round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="each with new clusters (default: %(default)s)")
    strategies = name_list("strategy", STRATEGIES)
    parser.add_argument("--strategies", type=strategies, default=STRATEGIES, help=",".join(STRATEGIES))
    add_write_option(parser, RESULTS)
    arguments = parser.parse_args()
    if min(arguments.ranks) < 1:
        parser.error(f"--ranks must be at least 1, not {min(arguments.ranks)}")
    for name in ("batch", "image", "steps", "blocks", "rounds"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(arguments, name)}")
    # The last stage reduces height and width by 32, and batch norm needs more than one value per channel.
    if arguments.batch == 1 and arguments.image <= 32:
        parser.error("batch norm cannot train on one image of up to 32 pixels; use --batch 2 or --image 64")
    return arguments


def _load_warning() -> list[str]:
    """Return a note if the machine is loaded."""
    load, cores = os.getloadavg()[0], environment.core_count()
    if load <= MAX_LOAD * cores:
        return []
    return [f"**the machine was loaded at the start** (load average {load:.1f} on {cores} cores): do not quote"]


def main() -> int:
    """Measure, print the page, and write it if requested."""
    arguments = _arguments()
    exit_on_sigterm()
    facts, notes = environment.facts(), _load_warning()
    settings = Settings(
        batch=arguments.batch,
        image=arguments.image,
        steps=arguments.steps,
        blocks=arguments.blocks,
        rounds=arguments.rounds,
        message_bytes=tuple(message_sizes(LAST_BYTES_GPU if visible_gpus() else LAST_BYTES)),
    )
    strategies = arguments.strategies
    if "horovod" in strategies and find_spec("horovod") is None:
        strategies = tuple(strategy for strategy in strategies if strategy != "horovod")
        notes.append(NO_HOROVOD)
        if not strategies:
            print(NO_HOROVOD)
            return 1
    device, points = measure(settings, arguments.ranks, strategies)
    facts += workload_facts(settings, device, strategies)
    picture = RESULTS.with_suffix(".png")
    text = markdown(facts, settings, device, points, notes, picture.name)
    report(text, RESULTS if arguments.write else None)
    if arguments.write:
        raw = {"facts": facts, "notes": notes, "points": [point.as_dict() for point in points]}
        RESULTS.with_suffix(".json").write_text(json.dumps(raw, indent=1), encoding="utf-8")
        plot.write(picture, settings, device, points)
        print(f"written to {RESULTS.relative_to(environment.ROOT)}, with .json and .png beside it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
