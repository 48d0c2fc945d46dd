"""Unsupported input is refused in one line that names the remedy, and nothing is lost."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.errors import ClusterClosedError, LaunchError, UsageError
from jupyter_disttrain.launchers import mpi

from ...conftest import LAUNCHERS
from ...support.leftovers import our_processes
from ...support.notebook_driver import Notebook
from ...support.recovery_tools import HOST

if TYPE_CHECKING:
    from collections.abc import Iterator

NO_CLUSTER = "UsageError: no cluster is running; start one with %dist_init, e.g. %dist_init -n 2"


def refused(notebook: Notebook, source: str) -> str:
    """Run code that must be refused; return its only line of output."""
    outcome = notebook.run(source)
    assert outcome.status == "error", outcome.text
    assert outcome.text == outcome.error, "more than the line is shown"
    assert "\n" not in outcome.text
    return outcome.text


@pytest.fixture(scope="module")
def empty() -> Iterator[Notebook]:
    """A kernel without ranks."""
    with Notebook() as notebook:
        yield notebook


def nothing_was_started() -> bool:
    """Return whether a failed start has ended; only the ranks of the shared fixtures may exist."""
    runtime = Path(os.environ["JUPYTER_RUNTIME_DIR"]) / "disttrain"
    return not list(runtime.glob("broken-*")) and not any(
        "broken-" in " ".join(process.cmdline()) + process.environ().get("DISTTRAIN_CLIENT", "")
        for process in our_processes()
    )


@pytest.mark.parametrize(
    "source",
    [
        "%%distributed\nx = 1",
        "%%rank 0\nx = 1",
        "%%rank[0,1]\nx = 1",
        "%dist_status",
        "%sync",
        "%dist_push x",
        "%dist_pull x",
        "%dist_reset",
        "%dist_shutdown",
        "%dist_mode -e",
        "%dist_wait",
    ],
)
def test_without_a_cluster(empty: Notebook, source: str) -> None:
    assert refused(empty, source) == NO_CLUSTER


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-n 0", "cannot start 0 ranks; choose 1 to 4096, e.g. %dist_init -n 2"),
        ("-n 1000000000", "cannot start 1000000000 ranks; choose 1 to 4096, e.g. %dist_init -n 2"),
        (
            "-n two",
            "%dist_init: argument -n/--num-ranks: invalid int value: 'two'; %dist_init? shows its options",
        ),
        ("-g x", "cannot read the GPUs 'x'; name them as in: -g 0,1"),
        ("-g 0,0", "cannot use GPUs [0, 0]; name each once, e.g. -g 0,1"),
        (
            "-g 0 --backend gloo",
            "GPUs [0] were named, but the backend 'gloo' uses none; leave -g or --backend out",
        ),
        (
            "--launcher slow",
            (
                "%dist_init: argument --launcher: invalid choice: 'slow' (choose from 'mpi', 'local', 'ssh', 'slurm'); "
                "%dist_init? shows its options"
            ),
        ),
        ("--wat", "%dist_init: unrecognized arguments: --wat; %dist_init? shows its options"),
        ("--timeout 0", "a timeout must be a positive number of seconds, not 0.0"),
        ("--port 70000", "there is no port 70000; choose 1 to 65535, or 0 for a free one"),
        (
            "--name ../x",
            "a cluster can't be named '../x'; use up to 40 letters, digits, '.', '_' and '-', a letter or digit first",
        ),
        ("-n '2", 'cannot read "-n \'2": No closing quotation'),
    ],
)
def test_invalid_dist_init_arguments(empty: Notebook, line: str, message: str) -> None:
    assert re.sub(
        r"choose from mpi, local, ssh, slurm",
        "choose from 'mpi', 'local', 'ssh', 'slurm'",
        refused(empty, f"%dist_init {line}"),
    ) == (f"UsageError: {message}")


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ("%%distributed -r 5", "there is no rank 5: this cluster has ranks 0-1; write e.g. '0' or 'all'"),
        ("%%rank[0,7]", "there is no rank 7: this cluster has ranks 0-1; write e.g. '0' or 'all'"),
        ("%%rank", "%%rank: the following arguments are required: ranks; %%rank? shows its options"),
        (
            "%dist_run --nproc_per_node 2 train.py",
            (
                "%dist_run: unrecognized arguments: --nproc_per_node; leave torchrun's options out, the ranks are "
                "those of %dist_init; %dist_run? shows its options"
            ),
        ),
        ("%%distributed --what", "%%distributed: unrecognized arguments: --what; %%distributed? shows its options"),
        ("%%distributed -o 1x", "'1x' is not a variable's name; use names such as lr or batch_size"),
        (
            "%%distributed --timeout soon",
            "%%distributed: argument --timeout: invalid float value: 'soon'; %%distributed? shows its options",
        ),
        (
            "%%distributed --name other",
            "no cluster is named 'other' (running: default); start it with %dist_init --name other",
        ),
    ],
)
def test_invalid_first_lines_of_a_cell(notebook: Notebook, first: str, message: str) -> None:
    assert refused(notebook, f"{first}\nlost = 1") == f"UsageError: {message}"
    assert notebook.run("%%distributed\nprint('lost' in globals())").check().lines == ["ranks 0-1 │ False"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%dist_push model.weight", "'model.weight' is not a variable's name; use names such as lr or batch_size"),
        ("%dist_push nowhere", "the notebook has no variable 'nowhere'; set it in a cell first"),
        ("%dist_push", "%dist_push: the following arguments are required: NAME; %dist_push? shows its options"),
        ("%dist_pull nowhere", "rank 0 has no 'nowhere'; set it in a %%distributed cell first"),
        ("%dist_pull -r 9 x", "there is no rank 9: this cluster has ranks 0-1; write e.g. '0' or 'all'"),
        (
            "%dist_mode -e -d",
            "%dist_mode: argument -d/--disable: not allowed with argument -e/--enable; %dist_mode? shows its options",
        ),
        (
            "%dist_init -n 3",
            (
                "the cluster 'default' (ranks 0-1) is running with other options; end it with %dist_shutdown before "
                "this, or start another beside it with --name NAME"
            ),
        ),
    ],
)
def test_unsupported_options_of_a_running_cluster(notebook: Notebook, line: str, message: str) -> None:
    assert refused(notebook, line) == f"UsageError: {message}"


def test_start_is_no_error_where_ranks_run_with_its_options(bare_notebook: Notebook) -> None:
    bare_notebook.run("%dist_init -n 2 --launcher local --backend none --hang-after 20").check()
    bare_notebook.run("%%distributed\nx = rank").check()
    again = bare_notebook.run("%dist_init -n 2 --launcher local --backend none --hang-after 20").check()
    known = "ranks 0-1 run already, with their variables (%dist_reset starts new ones)"
    assert again.text == f"{known} · {socket.gethostname()} · cpu · none"
    assert bare_notebook.run("%%rank 1\nx").check().text == "1"
    assert "with other options" in refused(bare_notebook, "%dist_init -n 2 --launcher local --backend none")


def test_empty_cells(notebook: Notebook) -> None:
    for body in ("# a comment", "\n\n", "  # one\n# two\n", "pass"):
        assert notebook.run(f"%%distributed\n{body}").check().text == ""
    empty = notebook.run("%%distributed")
    assert empty.text == "UsageError: %%distributed is a cell magic, but the cell body is empty."


def test_occupied_port(notebook: Notebook) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = refused(notebook, f"%dist_init -n 2 --name broken --launcher local --port {port}")
    assert message == (f"LaunchError: rank 0 on {HOST}: port {port} is taken; leave the port out to use a free one")
    assert nothing_was_started()
    assert notebook.run("%%distributed\nprint('unharmed')").check().lines == ["ranks 0-1 │ unharmed"]


def refuse_start(**options: object) -> str:
    with pytest.raises(LaunchError) as caught:
        Cluster(n=2, backend="none", name="broken", **options)  # type: ignore[arg-type]
    assert nothing_was_started()
    return str(caught.value)


def broken_mpiexec(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> str:
    """Put a script first on PATH under mpiexec's name."""
    path = folder / "mpiexec"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return str(path)


BROKEN = (
    "; repair it or put another first on PATH (jupyter disttrain doctor checks it), "
    "or start without MPI: %dist_init --launcher local"
)


def test_failing_mpiexec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = broken_mpiexec(monkeypatch, tmp_path, "echo libmpi.so.40 is missing >&2\nexit 1")
    assert refuse_start() == f"{path} does not work: --version exited with code 1: libmpi.so.40 is missing{BROKEN}"


def test_hanging_mpiexec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mpi, "VERSION_SECONDS", 0.3)
    path = broken_mpiexec(monkeypatch, tmp_path, "sleep 1000")
    assert refuse_start() == f"{path} does not work: --version did not end within 0.3 s{BROKEN}"


def test_mpiexec_that_is_not_executable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = broken_mpiexec(monkeypatch, tmp_path, "")
    Path(path).write_bytes(b"\x7fELF")
    assert refuse_start() == f"{path} does not work: [Errno 8] Exec format error: '{path}'{BROKEN}"


def test_mpiexec_that_starts_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken_mpiexec(monkeypatch, tmp_path, "[ $1 = --version ] && echo Open MPI\nexit 0")
    assert refuse_start() == (
        "before all ranks had started, mpiexec exited with code 0 (it printed nothing); "
        "jupyter disttrain doctor may show why"
    )


def test_mpiexec_whose_output_is_not_utf_8(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "printf 'Verbindung verweigert f\\374r node2\\n'"
    broken_mpiexec(monkeypatch, tmp_path, f"[ $1 = --version ] && exec echo Open MPI\n{text}\nexit 1")
    output = refuse_start()
    assert output == "before all ranks had started, mpiexec exited with code 1:\nVerbindung verweigert f\ufffdr node2"


def test_mpiexec_that_never_exits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken_mpiexec(monkeypatch, tmp_path, "[ $1 = --version ] && exec echo Open MPI\nexec sleep 1000")
    assert refuse_start(start_timeout_s=2.5) == (
        "0 of 2 ranks started within 2.5 s; increase --start-timeout, or check the output of mpiexec "
        "(it printed nothing); jupyter disttrain doctor may show why"
    )


MISSING = "raise ImportError('libcudart.so.12: not found')"
DIES = "import os, sys\nsys.stderr.write('first\\nno driver here\\n'); sys.stderr.flush()\nos._exit(7)"


def test_torch_that_is_missing_or_ends_the_rank_is_reported(tmp_path: Path) -> None:
    with Notebook(env={**os.environ, "PYTHONPATH": str(tmp_path)}) as notebook:
        for launcher in LAUNCHERS:
            start = f"%dist_init -n 2 --name broken --launcher {launcher}"
            (tmp_path / "torch.py").write_text(DIES)
            assert notebook.run(start).text == (
                f"LaunchError: a rank on {HOST} exited with code 7 while starting; its last lines on stderr:\n"
                "first\nno driver here"
            )
            assert nothing_was_started()
            (tmp_path / "torch.py").write_text(MISSING)
            assert refused(notebook, start) == (
                f"LaunchError: a rank on {HOST} can't start: torch can't be imported: ImportError: libcudart.so.12: "
                "not found; install torch for the Python that runs there, or start without it: --backend none"
            )
            assert nothing_was_started()
            notebook.run(f"{start} --backend none").check()
            notebook.run("%dist_shutdown").check()


def test_full_disk() -> None:
    limit = "import resource, signal; old = resource.getrlimit(resource.RLIMIT_FSIZE)"
    # IPython's history would report the full disk as well, at any time.
    with Notebook(extra_arguments=["--HistoryManager.enabled=False"]) as notebook:
        notebook.run(f"{limit}; resource.setrlimit(resource.RLIMIT_FSIZE, (0, old[1]))").check()
        message = refused(notebook, "%dist_init -n 2 --name broken")
        notebook.run("resource.setrlimit(resource.RLIMIT_FSIZE, old)").check()
    assert re.fullmatch(
        r"LaunchError: cannot write \S+/security: File too large; free or repair that disk or folder, "
        r"or set JUPYTER_RUNTIME_DIR and JUPYTER_DATA_DIR to others",
        message,
    )
    assert nothing_was_started()


def test_invalid_runtime_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(blocker / "runtime"))
    assert re.fullmatch(
        rf"cannot write {blocker}/runtime: Not a directory; free or repair that disk or folder, "
        r"or set JUPYTER_RUNTIME_DIR and JUPYTER_DATA_DIR to others",
        refuse_start(),
    )


@pytest.mark.parametrize("cluster", ["local"], indirect=True)
def test_python_api_reports_the_same_as_the_magics(cluster: Cluster) -> None:
    with pytest.raises(UsageError, match=r"^there is no rank 9: this cluster has ranks 0-1; write e.g. '0' or 'all'$"):
        cluster.run("1", ranks=9)
    with pytest.raises(UsageError, match=r"^cannot start 0 ranks; choose 1 to 4096, e.g. %dist_init -n 2$"):
        Cluster(n=0)


def test_missing_ranks_and_ended_clusters_are_refused(light: Cluster) -> None:
    with pytest.raises(UsageError, match="there is no rank "):
        light.replace([-1])
    assert set(light.run("rank").results) == set(range(light.world_size))
    light.shutdown()
    with pytest.raises(ClusterClosedError):
        light.change(grace_s=1.0)
