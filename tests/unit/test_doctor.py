"""Checks of ``jupyter disttrain doctor``.

Does not cover: the command as a user runs it (``tests/integration/test_doctor.py``), machines with GPUs.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain.doctor import machine, report, versions
from jupyter_disttrain.doctor.probe import ProbeError
from jupyter_disttrain.doctor.report import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator


def fail_midway() -> Iterator[Finding]:
    yield Finding("ok", "first", "seen")
    yield Finding("warning", "second", "is slow", "wait")
    raise KeyError("lost")


def miss_torch() -> list[Finding]:
    raise ProbeError("torch does not load: no such file")


CHECKS = {"made up": fail_midway, "ranks": miss_torch, "other": lambda: [Finding("ok", "third", "runs too")]}


@pytest.mark.parametrize("is_terminal", [False, True])
def test_check_that_raises_is_an_error_and_colour_is_for_terminals(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    assert report.write_text(stream, CHECKS) == 1
    text = stream.getvalue()
    label = "\033[32mok     \033[0m" if is_terminal else "ok     "
    assert text.startswith(f"made up\n  {label}  first: seen\n")
    assert "second: is slow\n           -> wait\n" in text
    assert "this check raised an error: KeyError: 'lost' (" in text
    assert "ranks: not checked further: torch does not load: no such file\n           -> see the versions above" in text
    assert "third: runs too" in text
    assert text.endswith("2 errors and 1 warning; each with its remedy above.\n")
    assert ("\033" in text) == is_terminal
    stream = io.StringIO()
    assert report.write_json(stream, CHECKS) == 1
    assert json.loads(stream.getvalue())["status"] == "error"


def test_disabled_labextension_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = {
        "labextensions/jupyter-disttrain/package.json": {"name": "jupyter-disttrain", "version": "1.2"},
        "labconfig/page_config.json": {"disabledExtensions": {"jupyter-disttrain": True}},
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(json.dumps(content))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    _, finding = versions.find_jupyterlab()
    assert (finding.status, finding.text.partition(" ")[0]) == ("ok", "1.2,")
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    _, finding = versions.find_jupyterlab()
    assert (finding.status, finding.remedy) == ("warning", "jupyter labextension enable jupyter-disttrain")


def test_folder_that_may_not_be_entered_is_named_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)
    found = machine._disk("log folder", Path("/theirs/data"), "JUPYTER_DATA_DIR")
    assert (found.status, found.text) == ("error", "can't use /theirs/data: Permission denied")
    assert "JUPYTER_DATA_DIR" in found.remedy
