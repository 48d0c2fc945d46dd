"""The user's IPython profile on ranks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ...support.notebook_driver import Notebook

if TYPE_CHECKING:
    from pathlib import Path


STARTUP = {
    "00-names.py": "import os\nby_file = os.environ.get('RANK')\nrank = 'none'\nprint('hi')",
    "05-logging.py": "import logging\nlogging.basicConfig(format='%(message)s')\nlogging.warning('dropped')",
    "10-fails.py": "first = 1\nraise ValueError('no such thing')",
    "20-exits.py": "raise SystemExit(3)",
    "30-ipython.ipy": "%env BY_IPYTHON=set\n!true\n",
    "35-selects.py": "import os, select\nassert not select.select([os.pipe()[0]], [], [], 0)[0]",
    "40-misspelt.py": "def f(:",
    "50-last.py": "last = 'all the same'",
}
CONFIG = """
c.InteractiveShellApp.exec_lines = ["by_line = 1", "1/0", "%load_ext jupyter_disttrain"]
c.InteractiveShellApp.extensions = ["jupyter_disttrain", "no_such_extension"]
c.InteractiveShellApp.exec_files = [{file!r}]
c.InteractiveShellApp.matplotlib = "inline"
c.InteractiveShell.ast_node_interactivity = "all"
c.InlineBackend.figure_format = "svg"
"""
READ = "by_file == os.environ['RANK'], rank, by_line, by_exec_file, last, os.environ['BY_IPYTHON'], type(rank).__name__"


def test_startup_files_and_configuration_apply_to_ranks(tmp_path: Path) -> None:
    profile = tmp_path / "profile_default"
    (profile / "startup").mkdir(parents=True)
    for name, text in STARTUP.items():
        (profile / "startup" / name).write_text(text)
    (tmp_path / "file.py").write_text("by_exec_file = 2")
    (profile / "ipython_config.py").write_text(CONFIG.format(file=str(tmp_path / "file.py")))
    (profile / "ipython_kernel_config.py").write_text("c.InteractiveShell.autocall = 2")
    with Notebook(env=os.environ | {"IPYTHONDIR": str(tmp_path)}) as notebook:
        started = notebook.run("%dist_init -n 2 --launcher local --backend none").check().text
        for message in (
            "10-fails.py, line 2: ValueError: no such thing",
            "20-exits.py, line 1: SystemExit: 3",
            "40-misspelt.py, line 1: SyntaxError",
            "exec_lines '1/0': ZeroDivisionError",
            "no_such_extension",
        ):
            (line,) = [line for line in started.splitlines() if message in line]
            assert line.startswith("ranks 0-1, in your IPython profile: ")
        assert len(started.splitlines()) == 6, started
        assert notebook.run(f"%%distributed\nimport os\n{READ}").check().lines == [
            "rank 0 │ (True, 0, 1, 2, 'all the same', 'set', 'int')",
            "rank 1 │ (True, 1, 1, 2, 'all the same', 'set', 'int')",
        ]
        assert notebook.run("%%distributed\nimport logging; logging.warning('kept')").check().lines == [
            "ranks 0-1 ┃ kept"
        ]
        assert notebook.run("%%distributed\n1\n2").check().lines == ["ranks 0-1 │ 1", "ranks 0-1 │ 2"]
        assert notebook.run("%%distributed\nlen 'four'").check().lines[-1] == "ranks 0-1 │ 4"
        plot = notebook.run("%%distributed -r 0\nimport matplotlib.pyplot as plt; plt.plot([1, 2]);").check()
        assert "image/svg+xml" in plot.mimes()
        replaced = notebook.run("%dist_reset -r 1").check().text
        assert "rank 1 on " in replaced
        assert "10-fails.py, line 2: ValueError" in replaced
        assert notebook.run("%%rank 1\nlast").check().lines == ["'all the same'"]
