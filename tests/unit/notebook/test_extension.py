"""The extension in a shell: what it registers, and that unloading leaves nothing."""

from __future__ import annotations

import argparse

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from jupyter_disttrain.notebook.extension import load, unload
from jupyter_disttrain.notebook.magics.arguments import PARSERS
from jupyter_disttrain.protocol.environment import IPYTHON_PROFILE


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> InteractiveShell:
    monkeypatch.setenv(IPYTHON_PROFILE, "")  # restored afterwards: loading sets it
    return InteractiveShell(config=Config({"DistributedMagics": {"grace": 7.0}, "HistoryManager": {"enabled": False}}))


def registered(shell: InteractiveShell) -> set[str]:
    return {name for names in shell.magics_manager.magics.values() for name in names}


def test_every_parser_has_a_magic_of_one_class(shell: InteractiveShell) -> None:
    before = registered(shell)
    load(shell)
    assert registered(shell) - before == set(PARSERS)
    unload(shell)


def test_help_of_each_magic_shows_every_option(shell: InteractiveShell) -> None:
    load(shell)
    for name, parser in PARSERS.items():
        text = shell.object_inspect_mime(parser.prog)["text/plain"]
        for action in (each for each in parser._actions if each.help != argparse.SUPPRESS):
            for option in action.option_strings or [str(action.metavar or action.dest)]:
                assert option in text, (name, option)
    unload(shell)


def test_settings_come_from_the_configuration_and_from_config(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    load(shell)
    assert shell.run_line_magic("config", "DistributedMagics.grace") == 7.0
    shell.run_line_magic("config", "DistributedMagics.grace = 5")
    assert shell.run_line_magic("config", "DistributedMagics.grace") == 5.0
    shell.run_line_magic("config", "")
    ours = {line.strip() for line in capsys.readouterr().out.splitlines()}
    assert "DistributedMagics" in ours
    assert not ours & {"ClusterMagics", "CellMagics", "RankScriptMagics", "FileMagics"}, "these have no settings"
    unload(shell)


def test_unloading_leaves_nothing(shell: InteractiveShell) -> None:
    configurables = list(shell.configurables)
    before, kinds = registered(shell), set(shell.magics_manager.registry)
    transformers = list(shell.input_transformers_cleanup)
    for _ in range(2):
        load(shell)
        load(shell)  # once is enough
        unload(shell)
        assert registered(shell) == before
        assert set(shell.magics_manager.registry) == kinds
        assert shell.configurables == configurables
        assert shell.input_transformers_cleanup == transformers
