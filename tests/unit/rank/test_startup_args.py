"""Arguments of a job's first process.

Does not cover: jobs that start (``test_join``).
"""

from __future__ import annotations

import pytest

from jupyter_disttrain.rank.startup.startup_args import read_arguments


@pytest.mark.parametrize("name", ["my run", "exp/1"])
def test_invalid_job_name_starts_no_job(capsys: pytest.CaptureFixture[str], name: str) -> None:
    with pytest.raises(SystemExit):
        read_arguments(["--join", "job.json", "--name", name])
    assert f"argument --name: a cluster can't be named '{name}'; use up to 40 letters" in capsys.readouterr().err
