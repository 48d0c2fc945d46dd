"""``%dist_stage`` in its corners: folders that are odd, disks that fail late, sources that change their kind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain.errors import RankFailure

from ....support.stage_tools import MIB, FileServer, data

if TYPE_CHECKING:
    from jupyter_disttrain import Cluster

__all__ = ["data"]  # the fixture of this module


def test_an_address_that_can_t_be_read_is_shown_without_what_signs_it(torchless: Cluster, tmp_path: Path) -> None:
    with FileServer(b"content") as server:
        address = server.url.replace("://", "://me:secret@")
    for refused in (f"{address}?sig=hidden", "s3://me:secret@bucket/x?sig=hidden", "http://me:secret@[x/?sig=hidden"):
        with pytest.raises(RankFailure) as caught:
            torchless.staging.stage(refused, tmp_path)
        shown = str(caught.value) + "".join(str(failure) for failure in caught.value.failures)
        assert "hidden" not in shown
        assert "secret" not in shown


@pytest.mark.parametrize("change", ["del os.environ['MASTER_ADDR']", "os.environ['MASTER_ADDR'] = 'nowhere.invalid'"])
def test_where_rank_0_is_stays_known_whatever_cells_do_to_the_variable(
    torchless: Cluster, data: Path, tmp_path: Path, change: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os; print(os.environ['MASTER_ADDR'])")
    before = torchless.run("import os; os.environ['MASTER_ADDR']").results[0]
    torchless.run(change)
    try:
        assert torchless.staging.stage(data, tmp_path / "a").copied_bytes == 3 * MIB + 10
        run = torchless.scripts.run(script, how="fresh")
        assert [line for text in run.stdout.values() for line in text.split()] == [before] * 2
    finally:
        torchless.run(f"os.environ['MASTER_ADDR'] = {before!r}")
