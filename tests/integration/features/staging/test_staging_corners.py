"""``%dist_stage``, rare cases with ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain.errors import RankFailure

from ....support.stage_tools import MIB, FileServer

if TYPE_CHECKING:
    from jupyter_disttrain import Cluster


def test_unreadable_url_is_shown_without_its_signature(torchless: Cluster, tmp_path: Path) -> None:
    with FileServer(b"content") as server:
        address = server.url.replace("://", "://me:secret@")
    for refused in (f"{address}?sig=hidden", "s3://me:secret@bucket/x?sig=hidden", "http://me:secret@[x/?sig=hidden"):
        with pytest.raises(RankFailure) as caught:
            torchless.staging.stage(refused, tmp_path)
        shown = str(caught.value) + "".join(str(failure) for failure in caught.value.failures)
        assert "hidden" not in shown
        assert "secret" not in shown


@pytest.mark.parametrize("change", ["del os.environ['MASTER_ADDR']", "os.environ['MASTER_ADDR'] = 'nowhere.invalid'"])
def test_rank_0_location_does_not_depend_on_the_user_variable(
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
