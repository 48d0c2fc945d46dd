"""``%dist_run`` of scripts that use MPI: under an mpiexec of their own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import psutil
import pytest

from jupyter_disttrain.errors import RankFailure, UsageError

from ....support.process_tools import wait_until
from ....support.recovery_tools import HOST, is_intact
from .test_scripts import lines_of, write

if TYPE_CHECKING:
    from pathlib import Path

    from jupyter_disttrain import Cluster

WORLD = """
from mpi4py import MPI
import os, torch, torch.distributed as dist
comm = MPI.COMM_WORLD
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(comm.rank, comm.size, comm.allreduce(comm.rank + 1), os.environ["RANK"], int(total), "\\n", end="")
"""


def test_script_that_imports_mpi_has_a_world_of_its_own_each_time(cluster: Cluster, folder: Path) -> None:
    script = write(folder, "world.py", WORLD)
    for _ in range(2):
        assert lines_of(cluster.scripts.run(script)) == {rank: [f"{rank} 2 3 {rank} 2 "] for rank in range(2)}


def test_messages_of_a_script_end_with_it(cluster: Cluster, folder: Path) -> None:
    script = write(
        folder,
        "sends.py",
        """
        import sys
        from mpi4py import MPI
        comm = MPI.COMM_WORLD
        if comm.rank == 0:
            for word in ("first of " + sys.argv[1], "second"): comm.isend(word, 1)
        else:
            print(comm.recv(source=0))
        """,
    )
    for run in ("one", "two"):
        assert cluster.scripts.run(script, [run]).stdout == {0: "", 1: f"first of {run}\n"}


def test_mpi_is_found_in_modules_beside_the_script_and_refused_where_it_is_not_seen(
    cluster: Cluster, folder: Path
) -> None:
    write(folder, "part/inner.py", "from mpi4py import MPI\nsize = MPI.COMM_WORLD.size")
    write(folder, "part/__init__.py", "from . import inner")
    assert cluster.scripts.run(write(folder, "uses.py", "import part\nprint(part.inner.size)")).stdout == {
        0: "2\n",
        1: "2\n",
    }
    hidden = write(
        folder, "hides.py", "MPI = __import__('mpi4y'.replace('y', 'py') + '.MPI').MPI\nprint(MPI.COMM_WORLD.size)"
    )
    with pytest.raises(RankFailure, match=r"hides\.py:1: ImportError: .*run the script with %dist_run --mpi"):
        cluster.scripts.run(hidden)
    assert cluster.scripts.run(hidden, how="mpi").stdout == {0: "2\n", 1: "2\n"}
    asked = write(folder, "asks.py", "import sys\nif len(sys.argv) > 1: import mpi4py.MPI\nprint('without')")
    assert cluster.scripts.run(asked, how="fresh").stdout == {0: "without\n", 1: "without\n"}


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise ValueError('the cause')", "os._exit(3)"])
def test_failure_of_one_rank_ends_the_job(three: Cluster, folder: Path, end: str, pids: dict[int, int]) -> None:
    code = f"""
    import os, sys
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank == 1:
        {end}
    MPI.COMM_WORLD.Barrier()
    """
    with pytest.raises(RankFailure) as caught:
        three.scripts.run(write(folder, "fails.py", code))
    (failure,) = caught.value.failures
    assert failure.ranks == (1,)
    expected = "fails.py:5: ValueError: the cause" if "raise" in end else "ProgramExit: fails.py exited with code 3"
    assert expected in failure.headline
    assert HOST in failure.headline
    assert is_intact(three, pids)


@pytest.mark.parametrize("how", ["interrupt", "kill mpiexec"])
def test_script_and_its_mpiexec_end_together(three: Cluster, folder: Path, pids: dict[int, int], how: str) -> None:
    code = """
    import os, time
    from mpi4py import MPI
    open(f"begun{MPI.COMM_WORLD.rank}", "w").close()
    time.sleep(1000)
    """
    run = three.scripts.run(write(folder, "long.py", code), block=False)
    assert wait_until(lambda: len(list(folder.glob("begun*"))) == 3)
    (job,) = mpi_jobs()
    if how == "interrupt":
        three.interrupt()
    else:
        job.kill()
    with pytest.raises(
        RankFailure, match="KeyboardInterrupt" if how == "interrupt" else "mpiexec (has ended|was killed)"
    ):
        run.wait()
    assert wait_until(lambda: not mpi_jobs())
    assert is_intact(three, pids)


def test_mpiexec_that_can_not_start_is_reported(
    cluster: Cluster, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails, and one of another MPI, whose processes can't be forked elsewhere."""
    broken = tmp_path / "bin" / "mpiexec"
    broken.parent.mkdir()
    broken.write_text(
        "#!/bin/sh\n[ \"$1\" = --version ] && echo 'mpiexec (Open MPI) 5.0.8' && exit\necho no slots; exit 4\n"
    )
    broken.chmod(0o700)
    monkeypatch.setenv("PATH", f"{broken.parent}:{os.environ['PATH']}")
    with pytest.raises(RankFailure, match=r"world\.py was not started: mpiexec exited with code 4: no slots"):
        cluster.scripts.run(write(folder, "world.py", WORLD))
    other = tmp_path / "other" / "mpiexec"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\necho HYDRA build details: Version: 4.2\n")
    other.chmod(0o700)
    monkeypatch.setenv("PATH", f"{other.parent}:{os.environ['PATH']}")
    with pytest.raises(UsageError, match=r"needs Open MPI, and .* is another MPI; put Open MPI first on PATH"):
        cluster.scripts.run("world.py", how="mpi")
    with pytest.raises(RankFailure, match="ImportError: MPI is imported here"):
        cluster.scripts.run("world.py")


def mpi_jobs() -> list[psutil.Process]:
    """Return the mpiexec processes that this process runs for scripts."""
    found = []
    for process in psutil.Process().children():
        try:
            if "jupyter_disttrain.features.scripts.mpi_process" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found
