"""The user's IPython profile on ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jupyter_disttrain.protocol.environment import IPYTHON_PROFILE
from jupyter_disttrain.rank.startup.user_profile import UserProfile

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_settings_that_would_break_a_rank_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IPYTHON_PROFILE, str(tmp_path))
    (tmp_path / "ipython_config.py").write_text(
        "c.Session.key = b'other'\nc.IPKernelApp.ip = '0.0.0.0'\nc.IPKernelApp.exec_lines = ['x = 1']\n"
        "c.HistoryManager.hist_file = 'one.sqlite'\nc.InteractiveShell.pdb = True\nc.InteractiveShell.autocall = 7\n"
        "c.InteractiveShell.colors = 'nocolor'\nc.InteractiveShellApp.pylab = 'qt'\nc.Mine.size = 3\n"
        "c.InteractiveShellApp.extensions.append('mine')\n"
    )
    (tmp_path / "ipython_kernel_config.py").write_text("1/0")
    profile = UserProfile()
    kept = {name: dict(section) for name, section in profile.config.items() if section}
    kept["InteractiveShellApp"].pop("extensions")
    assert kept == {
        "IPKernelApp": {"exec_lines": ["x = 1"]},
        "InteractiveShell": {"colors": "nocolor"},
        "InteractiveShellApp": {"pylab": "inline"},
        "Mine": {"size": 3},
    }
    assert [trouble.partition(": ")[2].split(":")[0] for trouble in profile.troubles[:1]] == ["ZeroDivisionError"]
    assert "autocall" in profile.troubles[1]
    assert len(profile.troubles) == 2
