"""Lost hosts and cut networks.

Covers: a host that dies, a network cut for a while and for good, a firewall that opens only some ports, a host that
is back too late.
Does not cover: messages before the start (``test_preflight``), the state machine alone (``test_heartbeat``).
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain import Cluster
from jupyter_disttrain.client.recovery.state_machine import Phase
from jupyter_disttrain.config.hosts import parse_hosts
from jupyter_disttrain.errors import LaunchError, RankFailure, UsageError

from ...lab.places import command_line_of
from ...support.process_tools import wait_until

if TYPE_CHECKING:
    import psutil

    from ...lab import Lab


CUT_SECONDS = 4  # a host counts as lost after 5.6 s; benchmarks.hosts cuts for 5
LOOP = """
import time
for step in range({steps}):
    total = torch.ones(1)
    dist.all_reduce(total)
    time.sleep(0.05)
float(total)
"""


def test_short_network_cut_is_survived_and_reported(breakable: Lab) -> None:
    with Cluster(launcher="ssh", hosts=parse_hosts("node1:1,node2:1"), ssh=str(breakable.ssh)) as cluster:
        run = cluster.run(LOOP.format(steps=100), block=False)
        breakable.cut("node2")
        threading.Timer(CUT_SECONDS, breakable.heal, ("node2",)).start()
        run.wait()
        assert set(run.results.values()) == {2.0}
        assert any("node2 did not reply for" in note and "no rank was lost" in note for note in run.notes)


def test_ranks_of_a_lost_host_restart_on_a_spare_and_the_others_keep_their_variables(breakable: Lab) -> None:
    hosts = parse_hosts("node1:1,node2:1")
    with Cluster(launcher="ssh", hosts=hosts, spares=("node3",), ssh=str(breakable.ssh)) as cluster:
        cluster.run("kept = rank")
        run = cluster.run(LOOP.format(steps=10_000), block=False)
        breakable.cut("node1")
        with pytest.raises(RankFailure, match=r"rank 0 \(node1\).*lost with its host: node1 has not replied for"):
            run.wait()
        assert any("rank 0 was replaced by a new process on node3" in note for note in run.notes)
        code = (
            "import os, socket; dist.barrier(); socket.gethostname(), globals().get('kept'), os.environ['MASTER_ADDR']"
        )
        master = breakable.address("node3")  # rank 0 has moved, and with it the rendezvous
        assert cluster.run(code).results == {0: ("node3", None, master), 1: ("node2", 1, master)}
        breakable.heal("node1")
        assert not breakable.left_on("node1"), "its processes end when it is back"


def test_unreachable_spare_is_reported_and_the_next_one_used(breakable: Lab) -> None:
    with Cluster(
        launcher="ssh", hosts=parse_hosts("node1:1"), spares=("node2", "node3"), ssh=str(breakable.ssh), backend="none"
    ) as cluster:
        run = cluster.run("import threading; threading.Event().wait()", block=False)
        breakable.kill("node2")
        breakable.kill("node1")
        with pytest.raises(RankFailure, match=r"rank 0 \(node1\).*lost with its host") as caught:
            run.wait()
        text = "\n".join(caught.value.notes)
        assert "node2 can't replace node1: no process could be started on node2: " in text
        assert "rank 0 was replaced by a new process on node3" in text
        assert cluster.run("import socket; socket.gethostname()").results == {0: "node3"}


def test_host_stays_lost_without_a_reachable_spare(breakable: Lab) -> None:
    with Cluster(
        launcher="ssh", hosts=parse_hosts("node1:1"), spares=("node2",), ssh=str(breakable.ssh), backend="none"
    ) as cluster:
        breakable.kill("node2")
        breakable.kill("node1")
        with pytest.raises(RankFailure, match=r"node1") as caught:
            cluster.run("import threading; threading.Event().wait()")
        (reason,) = [note for note in caught.value.notes if "can't be replaced" in note]
        assert reason.startswith(
            "rank 0 can't be replaced: node1 is lost; once it is reachable again, %dist_reset -r 0 starts"
        )
        assert reason.endswith("; no spare is left")
        breakable.revive("node2")
        breakable.revive("node1")
        cluster.replace([0])
        assert cluster.run("import socket; socket.gethostname()").results == {0: "node1"}


def test_hosts_lost_under_mpi_are_named_with_advice(breakable: Lab) -> None:
    with Cluster(launcher="mpi", hosts=parse_hosts("node1:1,node2:1,node3:2"), ssh=str(breakable.ssh)) as cluster:
        run = cluster.run(LOOP.format(steps=10_000), block=False)
        breakable.kill("node2")
        breakable.kill("node3")
        with pytest.raises(RankFailure, match=r"node2") as caught:
            run.wait()
        helps = re.escape(
            "an MPI job does not survive the loss of a host (node2, node3); run %dist_shutdown, then %dist_init "
            "--hosts node1:1, or use --launcher ssh"
        )
        assert [note for note in caught.value.notes if re.match(f"ranks 1-3 can't be replaced: {helps}", note)]
        text = "\n".join(caught.value._render_traceback_())
        assert text.count("--launcher ssh") == 1
        assert text.count("node3 has not replied for") == 1, "for both of its ranks"
        with pytest.raises(UsageError, match=rf"ranks 1-3 died; {helps}"):
            cluster.run("1")
    assert not breakable.left_on("node1")


@pytest.mark.parametrize("launcher", ["mpi", "ssh"])
def test_hosts_lost_one_after_another_are_reported_together(breakable: Lab, launcher: str) -> None:
    with Cluster(
        launcher=launcher, hosts=parse_hosts("node1:1,node2:1,node3:1"), ssh=str(breakable.ssh), backend="none"
    ) as cluster:
        run = cluster.run("import time\nif rank: time.sleep(600)", block=False)
        breakable.cut("node2")
        assert wait_until(lambda: cluster._session.supervisor._state.phase is Phase.LOST), "rank 1 was abandoned"
        breakable.cut("node3")
        with pytest.raises(RankFailure, match=r"node3") as caught:
            run.wait()
        lines = [note for note in caught.value.notes if "can't be replaced" in note]
        assert len(lines) == 1, lines
        assert re.match(r"ranks 1-2 can't be replaced: .*node2, node3", lines[0]), lines
    breakable.heal("node2")
    breakable.heal("node3")


def test_firewall_on_some_controller_ports_is_reported(breakable: Lab) -> None:
    breakable.firewall("head", *range(40001, 40008))
    with pytest.raises(LaunchError, match=rf"node1 can't reach {breakable.head_address} on ports .*40001 \(control\)"):
        Cluster(launcher="ssh", hosts=parse_hosts("node1:1"), ssh=str(breakable.ssh), controller_ports=(40000, 40007))
    assert not breakable.left_on("node1")


def test_returning_host_takes_its_ranks_back(breakable: Lab) -> None:
    with Cluster(launcher="ssh", hosts=parse_hosts("node1:1,node2:1"), ssh=str(breakable.ssh)) as cluster:
        cluster.run("kept = rank")
        run = cluster.run(LOOP.format(steps=10_000), block=False)
        breakable.cut("node2")
        with pytest.raises(RankFailure, match=r"rank 1 \(node2\).*lost with its host"):
            run.wait()
        assert any("once it is reachable again, %dist_reset -r 1" in note for note in run.notes)
        with pytest.raises(LaunchError, match=r"node2: .*nothing was started|nothing was started[^$]*node2"):
            cluster.reset()  # checks the hosts first
        assert cluster.run("kept", ranks=0).results == {0: 0}, "the other rank is unchanged"
        breakable.heal("node2")
        cluster.replace([1])
        assert cluster.run("dist.barrier(); globals().get('kept')").results == {0: 0, 1: None}

        def processes_of_this_cluster() -> list[psutil.Process]:
            return [each for each in breakable.processes("node2") if "jupyter_disttrain.rank " in command_line_of(each)]

        # The rank, its nanny and what ssh has started; those from before the cut may take seconds to end.
        assert wait_until(lambda: len(processes_of_this_cluster()) <= 3), processes_of_this_cluster()
