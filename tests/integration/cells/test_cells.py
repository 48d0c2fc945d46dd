"""A cell on the ranks is an IPython cell: magics, await, rich display, sources, errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jupyter_disttrain.notebook.output.renderer import RANKS_MIME

if TYPE_CHECKING:
    from ...support.notebook_driver import Notebook, Outcome


def run(notebook: Notebook, *lines: str) -> Outcome:
    return notebook.run("%%distributed\n" + "\n".join(lines))


def test_line_magics_and_shell_commands(notebook: Notebook) -> None:
    outcome = run(
        notebook, "%env SEEN=set", "word = 'a magic'", "!echo by {word}", "got = !printf 'one\\ntwo'", "print(got)"
    )
    assert outcome.check().lines == [
        "ranks 0-1 │ env: SEEN=set",
        "ranks 0-1 │ by a magic",
        "ranks 0-1 │ ['one', 'two']",
    ]


def test_cell_magic_may_come_first(notebook: Notebook) -> None:
    outcome = run(notebook, "%%time", "print('timed')").check()
    assert outcome.lines[0] == "ranks 0-1 │ timed"
    assert [rank for rank in (0, 1) if any(line.startswith(f"rank {rank} │ Wall time") for line in outcome.lines)] == [
        0,
        1,
    ]
    assert run(notebook, "%%bash", "echo I am $RANK of $WORLD_SIZE").check().lines == [
        "rank 0 │ I am 0 of 2",
        "rank 1 │ I am 1 of 2",
    ]


def test_top_level_await(notebook: Notebook) -> None:
    code = "async def double(x):\n    await asyncio.sleep(0.01)\n    return 2 * x"
    outcome = run(notebook, "import asyncio", code, "await asyncio.gather(double(1), double(rank))")
    assert outcome.check().lines == ["rank 0 │ [2, 0]", "rank 1 │ [2, 2]"]


def test_last_expression_is_shown_unless_a_semicolon_ends_it(notebook: Notebook) -> None:
    assert run(notebook, "x = 5", "x + 1").check().lines == ["ranks 0-1 │ 6"]
    assert run(notebook, "x + 1;").check().outputs == []
    assert run(notebook, "None").check().outputs == []


def test_multiline_results_stay_aligned(notebook: Notebook) -> None:
    outcome = run(notebook, "torch.arange(4).reshape(2, 2) + rank").check()
    assert outcome.text.splitlines() == [
        "rank 0    │ tensor([[0, 1],",
        "          │         [2, 3]])",
        "rank 1    │ tensor([[1, 2],",
        "          │         [3, 4]])",
    ]


def test_table_of_each_rank(notebook: Notebook) -> None:
    outcome = run(notebook, "import pandas as pd", "pd.DataFrame({'rank': [rank]})").check()
    tables = [output["data"]["text/html"] for output in outcome.outputs if "text/html" in output["data"]]
    labels = [line for line in outcome.lines if "│" in line]
    assert sorted(labels) == ["rank 0 │", "rank 1 │"]
    for label, table in zip(labels, tables, strict=True):
        assert f"<td>{label[5]}</td>" in table


def test_figures_are_shown_inline_with_and_without_show(notebook: Notebook) -> None:
    outcome = run(notebook, "import matplotlib.pyplot as plt", "plt.plot([1, 2]);").check()
    assert [mime for mime in outcome.mimes() if mime.startswith("image")] == ["image/png"]
    outcome = run(notebook, "print('before')", "plt.plot([1, 2]); plt.show()", "print('after')").check()
    kinds = ["picture" if "image/png" in output["data"] else output["data"]["text/plain"] for output in outcome.outputs]
    assert [kind if kind == "picture" else kind.count("│") for kind in kinds] == [2, "picture", 1]
    assert outcome.lines[0] == "ranks 0-1 │ before"
    assert outcome.lines[-1] == "ranks 0-1 │ after"


def test_display_is_updated_in_place(notebook: Notebook) -> None:
    outcome = run(notebook, "handle = display('first', display_id=True)", "handle.update(f'second of {rank}')").check()
    texts = [output["data"]["text/plain"] for output in outcome.outputs]
    assert sorted(texts[1::2]) == ["'second of 0'", "'second of 1'"]
    assert "first" not in outcome.text


def test_later_cell_updates_the_display_of_an_earlier_one(notebook: Notebook) -> None:
    run(notebook, "handle = display('first', display_id=True)").check()
    updated = {}

    def note(message: dict[str, Any], _outcome: Outcome) -> None:
        if message["msg_type"] == "update_display_data":
            updated[message["content"]["transient"]["display_id"]] = message["content"]["data"]["text/plain"]

    outcome = notebook.run("%%distributed\nhandle.update(f'second of {rank}')", on_message=note).check()
    assert sorted(updated.values()) == ["'second of 0'", "'second of 1'"]
    assert not outcome.outputs
    handles = list(updated)
    notebook.run("%%distributed\nhandle.update('third'); print('of this cell')", on_message=note).check()
    assert [updated[handle] for handle in handles] == ["'third'", "'third'"]


def test_cleared_output_is_removed(notebook: Notebook) -> None:
    clear = "from IPython.display import clear_output"
    assert run(notebook, clear, "print('gone')", "clear_output()").check().outputs == []
    outcome = run(notebook, "for i in range(5):", "    clear_output(wait=True)", "    print('turn', i)").check()
    assert outcome.lines == ["ranks 0-1 │ turn 4"]
    outcome = run(notebook, "print('stays until more comes')", "clear_output(wait=True)").check()
    assert outcome.lines == ["ranks 0-1 │ stays until more comes"]


def test_redrawn_figure_is_shown_once(notebook: Notebook) -> None:
    loop = "for i in range(4):\n    clear_output(wait=True)\n    plt.plot([i]); plt.show()\n    print('epoch', i)"
    outcome = run(notebook, loop).check()
    assert [list(output["data"]) for output in outcome.outputs] == [
        ["text/plain", RANKS_MIME],
        ["text/plain", "image/png"],
        ["text/plain", RANKS_MIME],
    ]
    assert outcome.lines[-1] == "ranks 0-1 │ epoch 3"


def test_output_widget_clears_only_itself(notebook: Notebook) -> None:
    bar = ("print('before', rank)", "for part in track(range(3), description='goes'): pass", "print('after', rank)")
    outcome = run(notebook, "from rich.progress import track", *bar).check()
    shown = [line for line in outcome.text.splitlines() if line.strip()]
    assert [line for line in shown if "Output()" in line] == []
    assert sum("before" in line for line in shown) == sum("after" in line for line in shown) == 2
    assert sum("goes" in line and "100%" in line for line in shown) == 2
    assert all(output["data"]["text/plain"].strip() for output in outcome.outputs), "a label without output"
    lines = ["from ipywidgets import Output; from IPython.display import HTML", "out = Output()"]
    lines += ["with out: display(HTML('one')); display(HTML('two'))", "out.clear_output(wait=True)"]
    outcome = run(notebook, *lines, "with out: display(HTML(f'three {rank}'))", "print('kept')").check()
    texts = [output["data"].get("text/html", "") for output in outcome.outputs]
    assert not any("one" in html or "two" in html for html in texts)
    assert "three 0" in str(outcome.outputs)
    assert "kept" in outcome.text


def test_tqdm_bars_end_as_one_line_each(notebook: Notebook) -> None:
    # With the rank: bars of equal speed would be one line of both ranks.
    outcome = run(notebook, "from tqdm import tqdm", "for _ in tqdm(range(50), desc=f'train {rank}'): pass").check()
    assert [line.split("|")[0] for line in outcome.lines] == ["rank 0 ┃ train 0: 100%", "rank 1 ┃ train 1: 100%"]


def test_nested_tqdm_bars(notebook: Notebook) -> None:
    inner = "    for _ in tqdm(range(3), desc='inner', position=1, leave={}): pass"
    outer = "for _ in tqdm(range(2), desc=f'outer {rank}', position=0):"
    outcome = run(notebook, outer, inner.format("False")).check()
    assert [line.split("|")[0] for line in outcome.lines] == ["rank 0 ┃ outer 0: 100%", "rank 1 ┃ outer 1: 100%"]
    bars = "a, b = (tqdm(total=2, desc=f'{name} {rank}', position=at) for at, name in enumerate('ab'))"
    outcome = run(notebook, bars, "for _ in range(2): a.update(); b.update()", "a.close(); b.close()").check()
    ends = [line.split("|")[0] for line in outcome.lines if line.startswith("rank 0")]
    assert ends == ["rank 0 ┃ a 0: 100%", "rank 0 ┃ b 0: 100%"]


def test_tqdm_notebook_bars_arrive_as_widgets(notebook: Notebook) -> None:
    comms: dict[str, dict[str, Any]] = {}

    def note(message: dict[str, Any], _outcome: Outcome) -> None:
        content = message["content"]
        if message["msg_type"] == "comm_open":
            assert content["target_name"] == "jupyter.widget"
            comms[content["comm_id"]] = dict(content["data"]["state"])
        elif message["msg_type"] == "comm_msg" and content["data"]["method"] == "update":
            comms[content["comm_id"]].update(content["data"]["state"])

    cell = "%%distributed\nfrom tqdm.notebook import tqdm as bar\nfor _ in bar(range(7), mininterval=0): pass"
    outcome = notebook.run(cell, on_message=note).check()
    views = [output["data"].get("application/vnd.jupyter.widget-view+json") for output in outcome.outputs]
    shown = [view["model_id"] for view in views if view]
    assert len(shown) == 2
    assert set(shown) <= set(comms)
    bars = [state for state in comms.values() if state.get("_model_name") == "FloatProgressModel"]
    assert [(bar["value"], bar["max"], bar["bar_style"]) for bar in bars] == [(7, 7, "success")] * 2


def test_source_of_a_function_is_found(notebook: Notebook) -> None:
    run(notebook, "import inspect", "def f(x):", "    return x  # here").check()
    text = [line.removeprefix("ranks 0-1 │ ") for line in run(notebook, "print(inspect.getsource(f))").check().lines]
    assert text[:2] == ["def f(x):", "    return x  # here"]


def test_dataloader_workers_print_whole_lines(notebook: Notebook) -> None:
    data = [
        "from torch.utils.data import DataLoader, Dataset, get_worker_info",
        "class Loud(Dataset):",
        "    def __len__(self): return 200",
        "    def __getitem__(self, i):",
        "        print('rank', rank, 'loads', i, 'x' * 50)",
        "        return i",
        "total = sum(int(batch.sum()) for batch in DataLoader(Loud(), batch_size=10, num_workers=2))",
        "total",
    ]
    outcome = run(notebook, *data).check()
    expected = [f"rank {rank} │ rank {rank} loads {i} {'x' * 50}" for rank in (0, 1) for i in range(200)]
    assert sorted(outcome.lines) == sorted([*expected, "ranks 0-1 │ 19900"])


def test_libraries_detect_a_notebook(notebook: Notebook) -> None:
    outcome = run(notebook, "type(get_ipython()).__name__, 'IPKernelApp' in get_ipython().config").check()
    assert outcome.lines == ["ranks 0-1 │ ('ZMQInteractiveShell', True)"]


def test_help_on_a_name_is_shown(notebook: Notebook) -> None:
    lines = notebook.run("%%distributed\nlog_metrics?").check().lines
    assert lines[0].startswith("ranks 0-1 │ Signature: log_metrics(step:")


def test_warning_that_names_the_cell_is_equal_on_all_ranks(notebook: Notebook) -> None:
    lines = notebook.run("%%distributed\nimport warnings\nwarnings.warn('careful')").check().lines
    assert [line.partition(" ┃ ")[0] for line in lines] == ["ranks 0-1", "ranks 0-1"]
    assert lines[0].endswith("py:3: UserWarning: careful")
