"""The environment of scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jupyter_disttrain.features.scripts.programs import outside_job

if TYPE_CHECKING:
    import pytest


def test_script_gets_nothing_that_a_kernel_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the warm process was started with it, from a notebook."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    assert not {"FORCE_COLOR", "MPLBACKEND"} & outside_job().keys()
    monkeypatch.setenv("MPLBACKEND", "svg")
    assert outside_job()["MPLBACKEND"] == "svg"
