"""What a rank does at its end: as at the end of a program, within a limit."""

from __future__ import annotations

import gzip
import zipfile
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain import Cluster

from .process_tools import wait_until

if TYPE_CHECKING:
    from pathlib import Path

LEFT = """
import atexit, csv, gzip, io, logging.handlers, os, tempfile, threading, time, zipfile
from concurrent.futures import ThreadPoolExecutor
os.chdir({folder!r})
def says(name): open(f"{{name}}-{{rank}}", "w").write("done")
order = []
atexit.register(lambda: open(f"order-{{rank}}", "w").write(" ".join(order)))
atexit.register(order.append, "first")
atexit.register(order.append, "second")
def fails(): raise ValueError("at the end")
atexit.register(fails)
plain = open(f"plain-{{rank}}", "w"); plain.write("buffered")
def hidden(): local = open(f"local-{{rank}}", "wb"); local.write(b"buffered"); yield local
suspended = hidden(); next(suspended)
zipped = gzip.open(f"zipped-{{rank}}.gz", "wt"); zipped.write("buffered")
packed = io.BufferedWriter(gzip.open(f"packed-{{rank}}.gz", "wb")); packed.write(b"buffered")
archive = zipfile.ZipFile(f"archive-{{rank}}.zip", "w"); archive.writestr("name", "buffered")
rows = csv.writer(open(f"rows-{{rank}}", "w", newline="")); rows.writerow([1, 2])
handler = logging.handlers.MemoryHandler(100, target=logging.FileHandler(f"log-{{rank}}"))
logging.getLogger("own").addHandler(handler); logging.getLogger("own").warning("logged")
threading.Thread(target=lambda: (time.sleep(0.2), says("thread"))).start()
pool = ThreadPoolExecutor(1); pool.submit(lambda: (time.sleep(0.2), says("pool")))
scratch = tempfile.NamedTemporaryFile(dir="."); folder = tempfile.TemporaryDirectory(dir=".")
atexit.register(dist.destroy_process_group) if {torch} else None
"""
FOUND = {
    "plain": b"buffered",
    "local": b"buffered",
    "rows": b"1,2\r\n",
    "order": b"second first",
    "thread": b"done",
    "pool": b"done",
    "log": b"logged\n",
}


@pytest.mark.parametrize("launcher", ["mpi", "local"])
def test_exit_functions_run_and_files_are_closed(launcher: str, folder: Path) -> None:
    with Cluster(n=2, launcher=launcher, backend="gloo" if launcher == "local" else "none", name="exits") as cluster:
        cluster.run(LEFT.format(folder=str(folder), torch=launcher == "local"))
        cluster.reset()
        assert cluster.killed == []
        for rank in (0, 1):
            found = {name: (folder / f"{name}-{rank}").read_bytes() for name in FOUND}
            assert found == FOUND
            for name in ("zipped", "packed"):
                assert gzip.decompress((folder / f"{name}-{rank}.gz").read_bytes()) == b"buffered"
            assert zipfile.ZipFile(folder / f"archive-{rank}.zip").read("name") == b"buffered"
        assert not [path for path in folder.iterdir() if path.name.startswith("tmp")]
        # Also in the midst of a cell; what waits for ever is ended by the limit, and the others are not.
        code = "import atexit, time\natexit.register(time.sleep, 1000 * rank)\n"
        code += f"atexit.register(lambda: open(f'{folder}/midst-{{rank}}', 'w').write('done'))\n"
        code += f"open(f'{folder}/began-{{rank}}', 'w').close()\ntime.sleep(1000)"
        cluster.run(code, block=False)
        for rank in (0, 1):
            assert wait_until(lambda rank=rank: (folder / f"began-{rank}").exists())  # type: ignore[misc]
        cluster.shutdown()
        assert [(folder / f"midst-{rank}").read_text() for rank in (0, 1)] == ["done", "done"]
        assert len(cluster.killed) == 1
        assert cluster.killed[0].startswith("rank 1 on ")
        assert "took longer than 2 s" in cluster.killed[0]
