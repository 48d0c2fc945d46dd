"""The README's first steps, with both launchers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...support.process_tools import wait_until

if TYPE_CHECKING:
    from jupyter_disttrain import Cluster

    from ...support.notebook_driver import Notebook


def test_documented_example(cluster: Cluster) -> None:
    run = cluster.run("x = torch.ones(3) * rank; dist.all_reduce(x); x")
    assert {rank: value.tolist() for rank, value in run.results.items()} == {0: [1.0] * 3, 1: [1.0] * 3}


def test_output_is_labelled_with_its_rank(notebook: Notebook) -> None:
    outcome = notebook.run("%%distributed\nprint('hello')\nprint('I am', rank)").check()
    assert outcome.lines == ["ranks 0-1 │ hello", "rank 0 │ I am 0", "rank 1 │ I am 1"]


def test_name_of_ranks_that_a_cell_uses_in_the_notebook_is_explained(notebook: Notebook) -> None:
    text = notebook.run("print(rank)").text
    assert "NameError: name 'rank' is not defined" in text
    assert "'rank' exists on the ranks; begin the cell with %%distributed to run it there" in text


def test_large_libraries_are_not_imported_where_they_are_not_needed(bare_notebook: Notebook) -> None:
    """torch and MPI are for ranks, numpy is for metrics, prompt_toolkit for terminals."""
    bare_notebook.run("%dist_init -n 2").check()
    bare_notebook.run("%%distributed\ntorch.ones(1)").check()
    bare_notebook.run("%dist_status").check()
    loaded = "import sys; sorted({'torch', 'mpi4py', 'numpy', 'prompt_toolkit'} & set(sys.modules))"
    assert bare_notebook.run(loaded).check().text == "[]"


def test_lost_metrics_are_reported_where_numpy_cant_be_imported(bare_notebook: Notebook) -> None:
    bare_notebook.run("import sys; sys.modules['numpy'] = None").check()
    bare_notebook.run("%dist_init -n 2").check()
    output = [bare_notebook.run("%%distributed\nlog_metrics(loss=1.0)").check().text]

    def is_reported() -> bool:
        output.append(bare_notebook.run("%%distributed\npass").check().text)
        return "values of log_metrics are lost, because numpy can't be imported" in "".join(output)

    assert wait_until(is_reported), output


def test_attach_without_numpy_reports_the_metrics_that_it_cant_read(bare_notebook: Notebook) -> None:
    bare_notebook.run("import sys; sys.modules['numpy'] = None").check()
    bare_notebook.run("%dist_init -n 2 --keep").check()
    bare_notebook.run("%%distributed\nlog_metrics(loss=1.0)").check()
    bare_notebook.run("%dist_detach").check()
    attached = bare_notebook.run("%dist_attach").check()
    try:
        after = bare_notebook.run("%%distributed\nrank").check()
        assert "values of log_metrics are lost, because numpy can't be imported" in attached.text + after.text
    finally:
        bare_notebook.run("%dist_shutdown").check()
