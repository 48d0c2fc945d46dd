"""Checks of ``jupyter disttrain doctor``.

Does not cover: the command as a user runs it (``tests/integration/test_doctor.py``), machines with GPUs.
"""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain.doctor import jupyter, report
from jupyter_disttrain.doctor.finding import Finding, ok, warning

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def fail_midway() -> Iterator[Finding]:
    yield ok("first", "seen")
    yield warning("second", "is slow", "wait")
    raise KeyError("lost")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_check_that_raises_is_an_error_and_colour_is_for_terminals(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setattr(report, "CHECKS", {"made up": fail_midway, "other": lambda: [ok("third", "runs too")]})
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    assert report.write_text(stream) == 1
    text = stream.getvalue()
    label = "\033[32mok     \033[0m" if is_terminal else "ok     "
    assert text.startswith(f"made up\n  {label}  first: seen\n")
    assert "second: is slow\n           -> wait\n" in text
    assert "this check raised an error: KeyError: 'lost' (" in text
    assert "third: runs too" in text
    assert text.endswith("1 error and 1 warning; each with its remedy above.\n")
    assert ("\033" in text) == is_terminal
    stream = io.StringIO()
    assert report.write_json(stream) == 1
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
    (finding,) = jupyter.find()
    assert (finding.status, finding.text.partition(" ")[0]) == ("ok", "1.2,")
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    (finding,) = jupyter.find()
    assert (finding.status, finding.remedy) == ("warning", "jupyter labextension enable jupyter-disttrain")
