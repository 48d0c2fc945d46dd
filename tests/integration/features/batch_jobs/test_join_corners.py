"""Rare faults of a job that a notebook joins.

Covers: jobs that can't start, files of others, exits after which cleanup is impossible, unreadable files.
Does not cover: joining, leaving and rejoining (``test_join``).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.client import attach
from jupyter_disttrain.errors import ClusterClosedError, LaunchError, RankFailure, UsageError
from jupyter_disttrain.features.batch_jobs import join
from jupyter_disttrain.protocol.controller_args import choose_ports
from jupyter_disttrain.protocol.shared_memory import PREFIX, ROOT
from jupyter_disttrain.rank.startup.startup_args import Setup

from ....support.join_tools import ENGINE, LAUNCHED_BY_HAND, Job, start_process
from ....support.process_tools import controllers_of, processes_of_cluster, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_user_file_is_kept_and_an_empty_one_is_used_and_removed_with_the_job(file: Path, jobs: list[Job]) -> None:
    file.touch()
    own = file.with_name("train.json")
    own.write_text('{"lr": 0.1}')
    refused = start_process(jobs, own, 0, 1, log="refused.log")
    taken = start_process(jobs, file, 0, 1)
    assert refused.end() == 1
    assert "name another file with --join" in refused.output
    assert own.read_text() == '{"lr": 0.1}'
    assert wait_until(lambda: bool(file.read_text()))
    taken.terminate()
    assert wait_until(lambda: not file.exists())


def test_file_is_refused_while_a_job_of_any_version_runs_and_kept_if_it_belongs_to_another(
    file: Path, jobs: list[Job]
) -> None:
    first = start_process(jobs, file, 0, 1)
    content = first.wait_for_file(file)
    file.write_text(json.dumps(content | {"version": "0.0.1", "of_another_version": 1}))
    second = start_process(jobs, file, 0, 1, log="second.log")
    assert second.end() == 1
    assert f"{file} belongs to another job, which runs on {content['host']} (1 rank, by torchrun)" in second.output
    others = json.dumps(content | {"cluster_id": "another-1-abcdef"})
    file.write_text(others)
    first.terminate()
    assert wait_until(lambda: not Path(content["profile"]).exists())
    assert file.read_text() == others


@pytest.mark.parametrize("trouble", ["ports", "controller", "taken", "file"])
def test_job_that_cannot_start_reports_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: socket.socket, trouble: str
) -> None:
    name = f"begin-{trouble}"
    file = tmp_path / f"{name}.json"
    for variable, value in {**LAUNCHED_BY_HAND, "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(variable, value)
    if trouble == "ports":
        monkeypatch.setattr(join, "choose_ports", _no_ports)
        message = r"has no free ports for a controller at 127\.0\.0\.1: all are taken; choose .* with --interface"
    elif trouble == "controller":
        monkeypatch.setattr(join, "choose_ports", lambda _address, count: [1] * count)  # a privileged port
        monkeypatch.setattr(join, "CONTROLLER_SECONDS", 0.0)
        message = "the controller on .* did not start"
    elif trouble == "taken":
        ports = choose_ports("127.0.0.1", 2 * join.PORTS)
        monkeypatch.setattr(join, "choose_ports", lambda *_: ports)
        taken.bind(("127.0.0.1", ports[1]))  # of the ranks' control channel; it does not listen
        message = "(?s)the controller on .* did not start: .*Address already in use"
    else:
        monkeypatch.setattr(join.JobFile, "write", _no_room)
        message = "can't write .*: No space left on device; name another file"
    setup = Setup(join=str(file), name=name, join_timeout_s=1.0, backend="none")
    with pytest.raises(SystemExit, match=message):
        join.join(setup)
    assert not list(tmp_path.iterdir())
    assert not list(ROOT.glob(f"{PREFIX}{name}-*"))


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    """A socket that a test may bind."""
    with socket.socket() as taken:
        yield taken


def _no_ports(_address: str, _count: int) -> list[int]:
    raise OSError("all are taken")


def _no_room(_file: object, _path: Path) -> None:
    raise OSError(28, "No space left on device")


def test_job_that_is_cancelled_before_its_rank_has_registered_ends(file: Path, jobs: list[Job]) -> None:
    first = start_process(jobs, file, 0, 2)
    content = first.wait_for_file(file)
    profile = Path(content["profile"])

    def has_nanny() -> bool:
        others = [each for each in processes_of_cluster(content["cluster_id"]) if each.pid != first.pid]
        return any("jupyter_disttrain.rank" in each.cmdline() and each.children() for each in others)

    assert wait_until(has_nanny)
    first.terminate()  # and waits for its end
    assert wait_until(lambda: not file.exists() and not profile.exists())


def test_job_whose_controller_is_killed_leaves_no_keys(file: Path, jobs: list[Job]) -> None:
    first = start_process(jobs, file, 0, 1)
    content = first.wait_for_file(file)
    with Cluster.attach(str(file)) as cluster:
        for process in controllers_of(content["cluster_id"]):
            process.kill()
        assert wait_until(lambda: cluster.closed)
    first.end()
    assert {path.name for path in file.parent.iterdir()} == {"rank0.log"}


def test_ranks_of_a_killed_mpirun_that_started_them_by_a_script_end(file: Path, jobs: list[Job]) -> None:
    variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    variables["PRTE_MCA_prte_local_tmpdir_base"] = str(file.parent)  # a killed mpirun leaves its own files
    command = ["mpirun", "-n", "2", "--map-by", "ppr:2:node:oversubscribe", "--bind-to", "none"]
    rank = ["sh", "-c", '"$@"; exit $?', "rank", *ENGINE, "--join", str(file), "--backend", "none"]
    jobs.append(Job([*command, *rank], file.with_name("job.log"), **variables))
    content = jobs[0].wait_for_file(file)
    with Cluster.attach(str(file)) as cluster:
        cluster.run("import time\ntime.sleep(1000)", block=False)
        jobs[0].kill()
        assert wait_until(lambda: cluster.closed)
    assert wait_until(lambda: not processes_of_cluster(content["cluster_id"]))
    assert wait_until(lambda: not file.exists())


@pytest.mark.parametrize(
    "where", [(attach, "_wait_until_subscribed"), (attach, "_read_metrics"), (attach, "let_begin")]
)
def test_interrupted_join_or_leave_keeps_the_ranks_for_the_next_client(
    light: Cluster, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]
) -> None:
    light.run("kept = rank * 2")
    before = threading.enumerate()
    name = where[1]
    with monkeypatch.context() as interrupted:
        interrupted.setattr(*where, _interrupt)
        if name == "let_begin":
            with pytest.raises(KeyboardInterrupt):
                light.detach()
        else:
            light.detach()
            with pytest.raises(KeyboardInterrupt):
                Cluster.attach("light")
    assert not set(threading.enumerate()).difference(before)
    with Cluster.attach("light") as again:
        assert again.run("kept").results == {0: 0, 1: 2}


def _interrupt(*_: object) -> None:
    signal.raise_signal(signal.SIGINT)


def test_unreadable_death_report_does_not_block_joining(light: Cluster) -> None:
    light.run("kept = rank * 2")
    report = light._session.launch.folders.profile / f"death-{light.table[1].engine}.json"
    rank = psutil.Process(light.table[1].info.pid)
    light.run("if rank == 1:\n    import time; time.sleep(1000)", block=False)
    light.detach()
    rank.kill()
    assert wait_until(report.exists)
    report.write_text("")  # as an earlier version left it on a full disk
    with Cluster.attach("light") as again:
        (run,) = again.missed
        with pytest.raises(RankFailure, match=r"rank 1.* ended, and its nanny's report of that can't be read"):
            run.wait()
        assert again.run("kept", 0).results == {0: 0}


def test_ranks_of_a_job_that_cannot_form_a_group_are_not_reported_as_restarted(
    file: Path,
    jobs: list[Job],
) -> None:
    for rank in range(2):
        start_process(jobs, file, rank, 2, "--backend", "gloo")
    jobs[0].wait_for_file(file)
    with Cluster.attach(str(file)) as cluster:
        cluster.run("import os; os.environ['GLOO_SOCKET_IFNAME'] = 'none0'; dist.destroy_process_group()")
        with pytest.raises(
            LaunchError, match=r"formed again: rank [01] on .*none0.*; start a new job to get all ranks again"
        ) as failed:
            cluster.run("rank")
        assert "unset it before the job starts; " in str(failed.value)
        assert "%dist_" not in str(failed.value).replace("(%dist_shutdown ends this one)", "")


def test_broken_connection_is_not_the_end_of_the_job(file: Path, jobs: list[Job]) -> None:
    mux = start_process(jobs, file, 0, 1).wait_for_file(file)["connection"]["mux"]
    cluster = Cluster.attach(str(file))
    cluster.run("kept = 7")
    ends = [each.fd for each in psutil.Process().net_connections("tcp") if each.raddr and each.raddr.port == mux]
    with socket.socket(fileno=os.dup(ends[0])) as broken:
        broken.shutdown(socket.SHUT_RDWR)
    assert wait_until(lambda: cluster.closed)
    why = (
        f"the connection to the ranks of {file} was lost; they continue without .* %dist_attach {file} connects to them"
    )
    with pytest.raises(ClusterClosedError, match=why):
        cluster.run("1")
    assert wait_until(lambda: all(thread.name != "disttrain leave" for thread in threading.enumerate()))
    with Cluster.attach(str(file)) as again:
        assert again.run("kept").results == {0: 7}


def test_login_shell_need_not_be_posix(tmp_path: Path, file: Path) -> None:
    file.write_text('{"version": "0.0.1"}')
    foreign = tmp_path / "ssh"
    foreign.write_text(
        '#!/bin/sh\nfor last; do :; done\n[ "$last" = "exec sh" ] || { echo Missing }. >&2; exit 1; }\n$last\n'
    )
    foreign.chmod(0o700)
    with pytest.raises(UsageError, match=r"node1:.* was written by version 0\.0\.1"):
        Cluster.attach(f"node1:{file}", ssh=str(foreign))
    with pytest.raises(UsageError, match=r"cannot read .*none\.json on node1: .*No such file"):
        Cluster.attach(f"node1:{file.with_name('none.json')}", ssh=str(foreign))


def test_missing_ssh_is_reported(file: Path) -> None:
    with pytest.raises(LaunchError, match=r"cannot run /nowhere/ssh: No such file.*; install OpenSSH's client"):
        Cluster.attach(f"node1:{file}", ssh="/nowhere/ssh")
