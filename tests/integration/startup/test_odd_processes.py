"""Start ranks in an unusual environment, and take from them what processes rely on."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import LaunchError, RankFailure

from ...conftest import LAUNCHERS
from ...support.process_tools import wait_until
from ...support.recovery_tools import HOST, SUM

if TYPE_CHECKING:
    from collections.abc import Iterator


EPOLL = ("do_epoll_wait", "ep_poll")  # where a process sleeps, by version of the kernel
RESTORED = "closed or redirected by this cell, and restored for the next one"


@pytest.fixture(scope="module", params=LAUNCHERS)
def odd(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two ranks whose Python skips assertions, which the controller needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONOPTIMIZE", "2")
        patch.setenv("PYTHONINSPECT", "1")
        patch.setenv("PYTHONVERBOSE", "")
        with Cluster(n=2, launcher=request.param, name="odd") as cluster:
            yield cluster


def test_cell_with_more_than_1024_open_files_runs_commands(odd: Cluster) -> None:
    run = odd.run(
        "import os; files = [open(os.devnull) for _ in range(1100)]\n!echo hi\nfor file in files: file.close()"
    )
    assert [text.split() for text in run.stdout.values()] == [["hi"], ["hi"]]


def test_python_variables_apply_to_ranks_only(odd: Cluster) -> None:
    assert odd.run("import sys; (__debug__, sys.flags.optimize)").results == {0: (False, 2), 1: (False, 2)}


@pytest.mark.parametrize(
    ("cell", "which"),
    [
        ("os.close(1)", f"descriptor was {RESTORED}: 1"),
        ("os.close(0); os.close(1); os.close(2)", f"descriptors were {RESTORED}: 0 and 1 and 2"),
        ("os.dup2(os.open(os.devnull, os.O_WRONLY), 2)", f"descriptor was {RESTORED}: 2"),
        ("os.dup2(os.open(os.__file__, os.O_RDONLY), 0)", f"descriptor was {RESTORED}: 0"),
        ("os.closerange(0, 3)", f"descriptors were {RESTORED}: 0 and 1 and 2"),
        ("sys.stdout.close(); sys.stderr.close()", ""),
    ],
)
def test_standard_descriptors_are_restored_for_the_next_cell(odd: Cluster, cell: str, which: str) -> None:
    odd.run("import os, subprocess, sys")
    run = odd.run(cell)
    assert run.stderr == dict.fromkeys((0, 1), f"file {which}\n" if which else "")
    run = odd.run("print('python'); rest = subprocess.run('echo child; echo error >&2; cat', shell=True, check=True)")
    assert run.stdout == dict.fromkeys((0, 1), "python\nchild\n")
    assert run.stderr == dict.fromkeys((0, 1), "error\n")


HOLD_FILE = """
import os, pathlib, subprocess, threading, time
real, is_open, nothing = pathlib.Path.open, threading.Event(), os.stat(os.devnull)
def open_for_long(*args, **options):
    file = real(*args, **options)
    if file.fileno() == 0 and threading.current_thread().name == name:
        is_open.set()
        until = time.monotonic() + 1
        while time.monotonic() < until and not os.path.samestat(os.stat(0), nothing): pass
    return file
pathlib.Path.open = open_for_long
"""


@pytest.mark.parametrize("thread", ["disttrain sampler", "Control"])
def test_restored_descriptor_is_not_closed_by_a_thread_of_the_rank(odd: Cluster, thread: str) -> None:
    odd.run(f"{HOLD_FILE}\nname = {thread!r}")
    run = odd.run("os.close(0); is_open.wait(60)", block=False)
    assert wait_until(lambda: odd.where() and run.done)
    assert run.wait().results == {0: True, 1: True}
    odd.run("pathlib.Path.open = real; subprocess.run('cat', check=True)")


def test_rank_that_closes_session_descriptors_is_replaced_and_reports_why(odd: Cluster) -> None:
    only_stdout = (
        "files = [f'/proc/self/fd/{number}' for number in os.listdir('/proc/self/fd')]\n"
        "same = [file for file in files if os.path.exists(file) and os.path.samefile(file, '/proc/self/fd/1')]\n"
        "for file in same if rank == 1 else ():\n    if not file.endswith('/1'): os.close(int(os.path.basename(file)))"
    )
    for close in ("if rank == 1: os.closerange(3, os.sysconf('SC_OPEN_MAX'))", only_stdout):
        with pytest.raises(RankFailure, match="ended, most likely because the cell had closed file desc"):
            odd.run(f"import os\n{close}")
        assert odd.run(SUM).results == {0: [3.0], 1: [3.0]}


def test_deleted_working_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(LaunchError, match="the working directory, in which ranks start too, was deleted"):
        Cluster(n=1, launcher="local", backend="none", name="nowhere")


def test_missing_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    with pytest.raises(LaunchError) as caught, Cluster(n=2, launcher="local"):
        pass
    assert f"GLOO_SOCKET_IFNAME=eth99 names no network interface of {HOST}, which has lo (127.0.0.1" in str(
        caught.value
    )


@pytest.mark.parametrize("cluster", ["local"], indirect=True)
def test_full_disk_is_named_and_the_previous_version_is_kept(cluster: Cluster, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=False).returncode:
        pytest.skip("a small disk can be mounted by root alone")
    try:
        cluster.run("small = rank; large = torch.zeros(10**6); model = torch.nn.Linear(1000, 1000)")
        cluster.checkpoints.save(disk, ["small"])
        for name, reason in (("large", "No space left on device"), ("model", "torch could not write a file")):
            with pytest.raises(RankFailure) as caught:
                cluster.checkpoints.save(disk, [name])
            (failure,) = caught.value.failures
            assert f"{reason}: {disk}" in failure.evalue, failure.evalue
            assert f" on {HOST}, " in failure.evalue
            assert " of 1.0 MiB free; free disk space, or name another folder" in failure.evalue
        cluster.run("del small")
        cluster.checkpoints.load(disk)
        assert cluster.run("small").results == {0: 0, 1: 1}
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("error", ["TimeoutError", "ValueError", "KeyboardInterrupt"])
def test_signal_handler_that_raises_while_idle_is_reported_and_harmless(
    torchless: Cluster, error: str, tmp_path: Path
) -> None:
    called = tmp_path / "called"
    code = (
        f"import os, signal\nkept = rank\ndef handler(*_):\n    os.mkdir({str(called)!r})\n    raise {error}('late')\n"
    )
    run = torchless.run(f"{code}signal.signal(signal.SIGALRM, handler); os.getpid()")
    # Idle, in its event loop: while it still sends the reply, Python itself may report the error.
    assert wait_until(lambda: Path(f"/proc/{run.results[1]}/wchan").read_text() in EPOLL)
    os.kill(run.results[1], signal.SIGALRM)
    assert wait_until(called.exists)  # otherwise it is raised in the next cell
    reports: list[str] = []
    assert wait_until(lambda: reports.append(torchless.run("kept").stderr[1]) or f"{error}: late" in "".join(reports))
    assert "a signal handler raised this while no cell ran:" in "".join(reports)
    assert "line 5, in handler" in "".join(reports)
    assert "site-packages" not in "".join(reports)
    assert torchless.run("kept, os.getpid()").results == {rank: (rank, pid) for rank, pid in run.results.items()}
