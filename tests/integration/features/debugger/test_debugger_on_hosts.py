"""The debugger of front ends over ranks on other hosts, and in a job of Slurm.

Does not cover: what it does (``test_debugger``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....support.dap_client import DapClient

if TYPE_CHECKING:
    from ....lab.lab import Lab
    from ....lab.slurm import Slurm
    from ....support.notebook_driver import Notebook

CELL = """%%distributed
def f(x):
    y = x + 1
    z = y
    return z
print(f(rank))"""
SUM = "%%distributed\nx = torch.ones(2); dist.all_reduce(x); x.tolist()"


def debug(notebook: Notebook, lab: Lab) -> None:
    """Stop ranks on two hosts at a breakpoint, look at them, step one, and let them go on."""
    before = {host: lab.listening(host) for host in ("node1", "node2")}
    with DapClient(notebook.connect()) as client:
        client.attach()
        names = [each["name"] for each in client.ask("threads")["threads"] if each["id"] >= 1_000_000]
        assert names == ["rank 0 (node1)", "rank 1 (node2)"]
        client.set_breakpoints(CELL, 4)
        request = notebook.client.execute(CELL, allow_stdin=False)
        client.stopped(0, 1)
        assert [client.variables(rank)["y"]["value"] for rank in (0, 1)] == ["1", "2"]
        assert client.evaluate(1, "x + 40") == "41"
        assert {host: lab.listening(host) for host in before} == before
        client.go(1, "next")
        client.stopped(1, reason="step")
        assert (client.line(0), client.line(1)) == (4, 5)
        client.ask("disconnect")
    assert notebook.outcome(request).check().lines == ["rank 0 │ 1", "rank 1 │ 2"]
    assert notebook.run(SUM).check().lines == ["ranks 0-1 │ [2.0, 2.0]"]


def test_ranks_over_ssh_are_debugged_without_a_port(lab: Lab, bare_notebook: Notebook) -> None:
    bare_notebook.run(f"%dist_init --hosts node1:1,node2:1 --launcher ssh --ssh {lab.ssh}").check()
    debug(bare_notebook, lab)
    bare_notebook.run("%dist_shutdown").check()


def test_ranks_of_a_job_are_debugged_without_a_port(lab: Lab, batch: Slurm, bare_notebook: Notebook) -> None:
    bare_notebook.run(f"import os; os.environ.update({batch.environment!r})").check()
    bare_notebook.run("%dist_init --launcher slurm -N 2 --ntasks-per-node 1 --time 30").check()
    debug(bare_notebook, lab)
    bare_notebook.run("%dist_shutdown").check()
