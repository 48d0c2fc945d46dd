"""Commands, checks and tables of the benchmarks."""

from __future__ import annotations

import importlib
import random
import re
from pathlib import Path

import pytest

from benchmarks.compare.plan import Plan
from benchmarks.compare.report import write
from benchmarks.compare.targets import verdict
from benchmarks.faults.campaign import Campaign
from benchmarks.faults.report import summary
from benchmarks.faults.round import Round
from benchmarks.lib.outputs import check_lines, final_text
from benchmarks.lib.stats import Measurement, percentile
from benchmarks.lib.table import format_amount, markdown_table

ROOT = Path(__file__).parents[2]
TEXTS = "".join((ROOT / name).read_text() for name in ("Makefile", "docs/benchmarks.md"))
COMMANDS = sorted(set(re.findall(r"-m (benchmarks[.\w]*)", TEXTS)))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_explains_its_options(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(command)
    if not hasattr(module, "main"):
        name = "benchmarks.compare" if command == "benchmarks" else command
        module = importlib.import_module(f"{name}.__main__")
    monkeypatch.setattr("sys.argv", [command, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    assert f"usage: python -m {command}" in capsys.readouterr().out


def test_a_folder_of_benchmarks_has_at_most_twelve_modules() -> None:
    folders = {path.parent for path in (ROOT / "benchmarks").rglob("*.py")}
    for folder in folders:
        assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= 12, folder


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rank 0: rank 0 line 0\nrank 1: rank 1 line 0", ""),
        ("ranks 0-1:\nrank 0 line 0\nrank 1 line 0", ""),
        ("rank 0: rank 0 line 0", "1 of 2 lines missing"),
        ("rank 0: rank 0 line 0\nrank 1: rank 1 line 0\nrank 1: rank 1 line 0", "1 lines duplicated"),
        ("rank 0:\nrank 0 line 0\nrank 1 line 0", "1 lines without the label of their rank"),
    ],
)
def test_missing_duplicated_and_mislabelled_lines_are_found(text: str, problem: str) -> None:
    assert check_lines(text, 2, 1).problem == problem


def test_the_final_text_has_the_last_update_of_a_display() -> None:
    shown = {"data": {"text/plain": "first"}, "transient": {"display_id": "a"}}
    updated = {"data": {"text/plain": "last"}, "transient": {"display_id": "a"}}
    streams = [("stream", {"name": "stdout", "text": text}) for text in ("one ", "\x1b[1mline\x1b[0m\n")]
    messages = [("display_data", shown), *streams, ("update_display_data", updated)]
    assert final_text(messages) == "last\none line"


def test_quantities_and_tables_are_formatted() -> None:
    assert [format_amount(value, "s") for value in (0.0123, 1.5, 120.0, None)] == ["12.3 ms", "1.50 s", "120 s", "-"]
    assert markdown_table(("a", "b"), [("1|2", "3")]) == ["| a | b |", "| --- | --- |", "| 1/2 | 3 |"]
    assert percentile([5.0, 1.0, 3.0], 95) == 5.0


def measurement(seconds: float, problem: str = "", tool: str = "jupyter_disttrain") -> Measurement:
    return Measurement(
        measure="start", tool=tool, ranks=2, unit="s", values=(seconds,), baseline=(1.0,), baseline_name="torchrun",
        problem=problem,
    )  # fmt: skip


def test_a_verdict_compares_the_ratio_with_the_target() -> None:
    assert [verdict(measurement(seconds)) for seconds in (0.5, 0.7, 0.9)] == ["stretch", "yes", "no"]
    assert verdict(measurement(0.5, problem="1 starts failed")) == "no"


def test_a_comparison_lists_every_tool_and_what_is_missing(tmp_path: Path) -> None:
    found = [measurement(0.9), measurement(2.0, problem="lines missing", tool="other")]
    text = write(tmp_path / "table.md", Plan(), ["a fact"], found, {"third": "cannot be installed"})
    assert (tmp_path / "table.md").read_text() == text
    assert "| 900 ms | 2.00 s* | 1.00 s (torchrun) |" in text
    assert "- other, `%dist_init` until the first all_reduce is done, N=2: **lines missing**" in text
    assert "- third is not included: cannot be installed" in text


def test_a_campaign_reports_lost_sessions_damage_and_leaks() -> None:
    rounds = [
        Round(fault="kill", cell="ddp step", recovery_s=2.0, reported_s=0.05),
        Round(fault="hang", cell="all_reduce", lost="the next cell failed", dropped=True),
        Round(fault="interrupt", cell="ddp step", recovery_s=1.0, damaged="no", damage_reported=True),
    ]
    lines = summary(Campaign(random=random.Random(1), faults=[], rounds=rounds, leaks=["process 7"]), seed=1)
    assert [each.failed for each in rounds] == [False, True, False]
    assert lines[0].startswith("Seed 1: 3 rounds, 1 sessions lost, 1 cells dropped, recovered after 1.50 s (median)")
    assert "| kill | 1 | 2.00 s | 2.00 s | 2.00 s | 50 ms |" in lines
    assert "- lost: hang in all_reduce: the next cell failed" in lines
    assert "- damaged (reported): interrupt in ddp step: no" in lines
    assert lines[-1] == "- leak: process 7"
