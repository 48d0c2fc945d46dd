"""Write docs/magics.md from the magics' docstrings, parsers and settings.

Does not cover: checking that the file is up to date (tests/unit/test_docs.py).
"""
# ruff: noqa: INP001  (a script)

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_disttrain.notebook.extension import MAGICS
from jupyter_disttrain.notebook.magics.arguments import PARSERS
from jupyter_disttrain.notebook.magics.settings import DistributedMagics

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).parent.parent / "docs" / "magics.md"

HEAD = """# Magics

<!-- Written by scripts/magics_page.py; change the magics' docstrings and parsers, then run it. -->

`%load_ext jupyter_disttrain` registers the magics. Each is the first line of its cell, or a line of its own.
In the notebook `%dist_init?` shows a magic's options, and Tab completes them after two dashes. Where several clusters
run, `--name` chooses one.
"""

SECTIONS = {
    "Clusters": ("dist_init", "dist_status", "dist_attach", "dist_detach", "dist_reset", "dist_shutdown"),
    "Cells": ("distributed", "rank", "dist_mode", "dist_wait", "dist_interrupt", "dist_where", "dist_debug", "sync"),
    "Variables": ("dist_push", "dist_pull", "dist_copy", "dist_diff", "dist_whos"),
    "Scripts and checkpoints": ("dist_run", "dist_export", "dist_save", "dist_load"),
    "Files": ("dist_stage", "dist_sync_code"),
}

MORE = {
    "dist_init": "[several machines](multi_node.md), [Slurm](slurm.md), [GPUs](gpus.md)",
    "dist_status": "[telemetry](telemetry.md)",
    "dist_attach": "[batch jobs](batch_jobs.md), [when the kernel ends](recovery.md#the-kernel-ends)",
    "dist_reset": "[the end of a rank](recovery.md#the-end-of-a-rank)",
    "distributed": "[cells, output and variables](cells.md)",
    "dist_interrupt": "[stop](recovery.md#stop)",
    "dist_where": "[a cell hangs](recovery.md#a-cell-hangs)",
    "dist_debug": "[questions and debuggers](cells.md#questions-and-debuggers)",
    "dist_copy": "[a rank dies](recovery.md#a-rank-dies)",
    "dist_run": "[scripts](scripts.md#run-a-script)",
    "dist_export": "[scripts](scripts.md#export-the-notebook)",
    "dist_save": "[checkpoints](scripts.md#checkpoints)",
    "dist_load": "[checkpoints](scripts.md#checkpoints)",
    "dist_stage": "[data sets on every node](multi_node.md#data-sets-on-every-node)",
    "dist_sync_code": "[edited modules](multi_node.md#edited-modules)",
}

SETTINGS = """
## Defaults

`%config DistributedMagics` shows these settings, `%config DistributedMagics.grace = 5` sets one, and so does
`c.DistributedMagics.grace = 5` in `ipython_config.py`. An option of `%dist_init` takes precedence. `grace`,
`hang_after` and `on_rank_death` also change clusters that are running.

| setting | default | meaning |
|---|---|---|
"""


def page() -> str:
    """Return the page's text."""
    assert sorted(PARSERS) == sorted(name for names in SECTIONS.values() for name in names)
    parts = [HEAD]
    for title, names in SECTIONS.items():
        parts.append(f"\n## {title}\n")
        parts += [_magic(name) for name in names]
    return "".join(parts) + SETTINGS + "".join(_settings())


def _magic(name: str) -> str:
    parser = PARSERS[name]
    options = [action for action in parser._actions if action.help != argparse.SUPPRESS]  # noqa: SLF001  (not public)
    positionals = [_positional(action) for action in options if not action.option_strings]
    synopsis = " ".join([parser.prog, *(["[OPTIONS]"] if len(positionals) < len(options) else []), *positionals])
    (function,) = (getattr(kind, name) for kind in MAGICS if hasattr(kind, name))
    doc, _, _ = (function.__doc__ or "").partition("\n\nusage:")
    text = "\n".join(line.strip() for line in doc.strip().splitlines()).replace("``", "`")
    text += f"\n\nMore: {MORE[name]}." if name in MORE else ""
    rows = [f"| {_names(action)} | {_help(action)} |\n" for action in options]
    return f"\n### {parser.prog}\n\n`{synopsis}`\n\n{text}\n\n| argument | meaning |\n|---|---|\n{''.join(rows)}"


def _positional(action: argparse.Action) -> str:
    name = _metavar(action)
    many = {None: name, "?": f"[{name}]", "+": f"{name} ...", "*": f"[{name} ...]", argparse.REMAINDER: f"[{name} ...]"}
    return many[action.nargs]  # type: ignore[index]


def _names(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{_metavar(action)}`".replace("|", "\\|")
    value = "" if action.nargs == 0 else f" {_metavar(action)}"
    return ", ".join(f"`{option}{value}`" for option in action.option_strings).replace("|", "\\|")


def _metavar(action: argparse.Action) -> str:
    return "|".join(map(str, action.choices)) if action.choices else str(action.metavar or action.dest.upper())


def _help(action: argparse.Action) -> str:
    return (action.help or "").replace("%%", "%").replace("|", "\\|")


def _settings() -> Iterator[str]:
    for name, trait in sorted(DistributedMagics.class_traits(config=True).items()):
        choices = f" One of {', '.join(f'`{value}`' for value in trait.values)}." if hasattr(trait, "values") else ""
        yield f"| `{name}` | `{trait.default()!r}` | {trait.help}{choices} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
