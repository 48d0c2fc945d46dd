"""What the first process of a job does before a notebook can join.

Covers: what it leaves where it can't begin.
Does not cover: jobs that begin (``test_join``).
"""

from __future__ import annotations

import pytest

from jupyter_disttrain.rank.startup.startup_args import read_arguments


@pytest.mark.parametrize("name", ["my run", "exp/1"])
def test_a_name_that_no_notebook_would_take_begins_no_job(capsys: pytest.CaptureFixture[str], name: str) -> None:
    with pytest.raises(SystemExit):
        read_arguments(["--join", "job.json", "--name", name])
    assert f"argument --name: a cluster can't be named '{name}'; use up to 40 letters" in capsys.readouterr().err
