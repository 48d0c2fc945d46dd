"""Merge the ranks' output, with generated interleavings."""

from __future__ import annotations

import gc
import random
import time
from math import inf
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_disttrain.client.cells.events import CommSent
from jupyter_disttrain.notebook.output import transcript as transcript_module
from jupyter_disttrain.notebook.output.comms import WidgetBars
from jupyter_disttrain.notebook.output.merge import merge
from jupyter_disttrain.notebook.output.terminal import COLUMNS
from jupyter_disttrain.notebook.output.transcript import Transcript

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from jupyter_disttrain.notebook.output.rows import Line

# Few different lines, so that ranks often print equal ones; an empty one, an indented one, one that is not ASCII.
LINES = st.lists(st.sampled_from(["", "a", "b", "  c", "d\t", "é🙂"]), max_size=12)
Chunk = tuple[int, str, str]  # rank, stream, text


def transcript_of(chunks: Iterable[Chunk], max_lines: int = 10_000) -> Transcript:
    transcript = Transcript(max_lines, 1 << 30)
    for chunk in chunks:
        transcript.add_text(*chunk)
    transcript.close()
    return transcript


def draw(transcript: Transcript) -> Transcript:
    """Merge and divide as for a draw while the cell runs."""
    transcript.arrange()
    transcript.divide()
    return transcript


def all_lines(transcript: Transcript) -> list[Line]:
    return [line for section in transcript.sections for line in section.lines]


def texts_of(transcript: Transcript) -> list[str]:
    return [line.row.text for line in all_lines(transcript)]


def lines_of(transcript: Transcript, rank: int, stream: str = "stdout") -> list[str]:
    return [line.row.text for line in all_lines(transcript) if rank in line.ranks and line.row.stream == stream]


def shown(transcript: Transcript) -> list[tuple[tuple[int, ...], str]]:
    return [(tuple(sorted(line.ranks)), line.row.text) for line in all_lines(transcript)]


def test_distant_cursor_position_uses_bounded_memory() -> None:
    (text,) = texts_of(transcript_of([(0, "stdout", "a\x1b[100000000Gb\n")]))
    assert text.replace(" ", "") == "ab"
    assert len(text) <= COLUMNS


def cut(draw: st.DrawFn, text: str) -> list[str]:
    """Cut text at any positions."""
    at = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[start:end] for start, end in zip([0, *at], [*at, len(text)], strict=True)]


@st.composite
def interleaved(draw: st.DrawFn, texts: dict[int, str]) -> list[Chunk]:
    """Cut each rank's text and interleave the pieces; each rank's pieces keep their order."""
    left = {rank: cut(draw, text) for rank, text in texts.items()}
    order = draw(st.permutations([rank for rank, pieces in left.items() for _ in pieces]))
    return [(rank, "stdout", left[rank].pop(0)) for rank in order]


@st.composite
def some_ranks(draw: st.DrawFn) -> tuple[dict[int, list[str]], list[Chunk]]:
    lines = dict(enumerate(draw(st.lists(LINES, min_size=1, max_size=4))))
    return lines, draw(interleaved({rank: "".join(f"{line}\n" for line in texts) for rank, texts in lines.items()}))


@given(some_ranks())
def test_lines_of_each_rank_keep_their_order(output: tuple[dict[int, list[str]], list[Chunk]]) -> None:
    lines, chunks = output
    transcript = transcript_of(chunks)
    assert {rank: lines_of(transcript, rank) for rank in lines} == lines


def test_line_after_one_placed_above_an_open_line_stays_below_it() -> None:
    chunks = [(3, "stdout", "end"), (0, "stdout", "\n"), (3, "stdout", "\n"), (1, "stdout", "\na\nend\n")]
    assert shown(transcript_of(chunks)) == [((0, 1), ""), ((1,), "a"), ((1, 3), "end")]


@st.composite
def ranks_that_agree(draw: st.DrawFn) -> tuple[list[str], list[Chunk]]:
    lines = draw(LINES)
    count = draw(st.integers(2, 5))
    return lines, draw(interleaved(dict.fromkeys(range(count), "".join(f"{line}\n" for line in lines))))


@given(ranks_that_agree())
def test_equal_output_is_merged_whichever_rank_is_faster(output: tuple[list[str], list[Chunk]]) -> None:
    lines, chunks = output
    ranks = tuple(sorted({rank for rank, _, _ in chunks}))
    assert shown(transcript_of(chunks)) == [(ranks, line) for line in lines]


@st.composite
def ranks_that_differ_between(draw: st.DrawFn) -> tuple[list[str], int, list[Chunk]]:
    common = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=6, unique=True))
    count = draw(st.integers(2, 4))
    texts = {rank: "".join(f"{line}\nI am {rank} at {line}\n" for line in common) for rank in range(count)}
    return common, count, draw(interleaved({rank: f"{text}end\n" for rank, text in texts.items()}))


@given(ranks_that_differ_between())
def test_differing_lines_are_in_rank_order_between_common_lines(
    output: tuple[list[str], int, list[Chunk]],
) -> None:
    common, count, chunks = output
    everyone = tuple(range(count))
    expected: list[tuple[tuple[int, ...], str]] = []
    for line in common:
        expected += [(everyone, line), *(((rank,), f"I am {rank} at {line}") for rank in everyone)]
    assert shown(transcript_of(chunks)) == [*expected, (everyone, "end")]


@st.composite
def interleaved_twice(draw: st.DrawFn) -> tuple[list[Chunk], list[Chunk]]:
    lines = dict(enumerate(draw(st.lists(LINES, min_size=2, max_size=4))))
    texts = {rank: "".join(f"{line}\n" for line in own) for rank, own in lines.items()}
    return draw(interleaved(texts)), draw(interleaved(texts))


@given(some_ranks(), st.integers(1, 6))
def test_lines_are_complete_and_in_order_while_ranks_print(
    output: tuple[dict[int, list[str]], list[Chunk]], most: int
) -> None:
    _, chunks = output
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(transcript_module, "LIVE_LINES", most)
        patched.setattr(transcript_module, "SECTION_LINES", 2)
        transcript = Transcript(10_000, 1 << 30)
        printed = dict.fromkeys(range(4), "")
        for rank, stream, text in chunks:
            transcript.add_text(rank, stream, text)
            printed[rank] += text
            draw(transcript)
            for each, text_so_far in printed.items():
                assert lines_of(transcript, each) == text_so_far.removesuffix("\n").split("\n") * bool(text_so_far)
        transcript.close()
    assert shown(transcript) == shown(transcript_of(chunks))


def test_a_rank_that_is_far_behind_joins_the_lines_of_the_others() -> None:
    transcript = Transcript(10_000, 1 << 30)
    text = "".join(f"step {at}\n" for at in range(3000))
    for rank in range(2):
        transcript.add_text(rank, "stdout", text)
        transcript.add_text(rank, "stdout", f"own {rank}\n")
        draw(transcript)
    steps = [((0, 1), f"step {at}") for at in range(3000)]
    assert shown(transcript) == [*steps, ((0,), "own 0"), ((1,), "own 1")]


def test_own_lines_are_in_rank_order_above_a_common_one_and_in_order_of_time_below() -> None:
    transcript = Transcript(1000, 1 << 30)
    for rank, text in ((1, "1 a\n"), (0, "0 a\n"), (1, "end\n1 b\n"), (0, "end\n0 b\n"), (1, "1 c\n")):
        transcript.add_text(rank, "stdout", text)
        draw(transcript)
    assert texts_of(transcript) == ["0 a", "1 a", "end", "1 b", "0 b", "1 c"]


@given(interleaved_twice())
def test_result_does_not_depend_on_which_rank_was_faster(orders: tuple[list[Chunk], list[Chunk]]) -> None:
    first, second = map(transcript_of, orders)
    assert shown(first) == shown(second)


@given(st.permutations([rank for rank in range(4) for _ in range(6)]))
@settings(max_examples=5)
def test_long_output_ends_in_rank_order(order: list[int]) -> None:
    left = {
        rank: [[f"{rank}: {line}" for line in range(at, at + 250)] for at in range(0, 1500, 250)] for rank in range(4)
    }
    expected = [((rank,), line) for rank, blocks in left.items() for lines in blocks for line in lines]
    transcript = transcript_of((rank, "stdout", "\n".join([*left[rank].pop(0), ""])) for rank in order)
    assert shown(transcript) == expected
    assert [len(section.lines) for section in transcript.sections] == [200] * 30


def test_scattered_groups_come_before_lines_of_single_ranks() -> None:
    printed = {rank: ["odd" if rank % 2 else "even", f"mine {rank}"] for rank in range(4)}
    transcript = transcript_of((rank, "stdout", "\n".join([*printed[rank], ""])) for rank in (3, 0, 1, 2))
    own = [((rank,), f"mine {rank}") for rank in range(4)]
    assert shown(transcript) == [((0, 2), "even"), ((1, 3), "odd"), *own]


@given(st.permutations([rank for rank in range(3) for _ in range(7)]))
def test_bars_are_in_rank_order_above_lines_printed_below_them(order: list[int]) -> None:
    def pieces(rank: int) -> list[tuple[str, str]]:
        steps = [[("stdout", f"step {at}\n"), ("stderr", f"\r{at} of 3, {rank} s")] for at in range(3)]
        return [("stderr", "\r0 of 3"), *(piece for step in steps for piece in step)]

    left = {rank: pieces(rank) for rank in range(3)}
    transcript = Transcript(1000, 1 << 30)
    begun: set[int] = set()
    for rank in order:
        begun.add(rank)
        transcript.add_text(rank, *left[rank].pop(0))
        last = [min(line.ranks) for line in all_lines(draw(transcript))[-len(begun) :]]
        if len(begun) == sum(7 - len(rest) for rest in left.values()):  # only bars
            assert last == sorted(begun)
    transcript.close()
    bars = [((rank,), f"2 of 3, {rank} s") for rank in range(3)]
    assert shown(transcript) == [*bars, *(((0, 1, 2), f"step {at}") for at in range(3))]


@pytest.mark.parametrize(
    ("pieces", "has_bar"),
    [
        (["\r 0 of 3"], False),  # it may be the only one
        (["\r 0 of 3", "\r 1 of 3"], True),
        (["0 of 3", "\x1b[2K\r1 of 3"], True),
        (["\r0 of 3", "\r1 of 3", "\n"], False),
        (["\r0 of 3", "\r1 of 3", "\r      \r"], False),
        (["begun", ", goes on", "\x1b[31m, in red"], False),
        (["above\n", "\x1b[Aother"], True),
        (["\router 0", "\n\rinner 0\x1b[A", "\n\rinner 1\x1b[A"], True),
        (["\router 0", "\n\rinner 0\x1b[A", "\n\rinner 1\x1b[A", "\n\r       \r\x1b[A", "\router 1"], True),
    ],
)
def test_bar_is_an_unfinished_line_that_is_rewritten(pieces: list[str], *, has_bar: bool) -> None:
    transcript = Transcript(1000, 1 << 30)
    for rank in range(2):  # in step: bars that both have finished are one line
        for piece in pieces:
            transcript.add_text(rank, "stderr", piece)
    assert transcript.has_bar == has_bar
    transcript.close()
    assert not transcript.has_bar


@pytest.mark.parametrize(
    ("state", "has_bar"),
    [
        ({"_model_name": "IntProgressModel", "value": 1, "max": 3}, True),
        ({"_model_name": "FloatProgressModel", "value": "nan", "max": 1.0}, False),  # as Jupyter sends NaN
        ("running", False),  # of a comm of the user's own
        (None, False),
    ],
)
def test_widget_is_a_bar_while_its_value_is_between_the_ends(state: object, *, has_bar: bool) -> None:
    bars = WidgetBars()
    content = {"comm_id": "1", "data": {"state": state}}
    bars.take(CommSent(rank=0, time_s=0.0, msg_type="comm_open", content=content, metadata={}, buffers=[]))
    assert bars.has_bar == has_bar


@given(st.permutations([rank for rank in range(4) for _ in range(3)]))
def test_trailing_displays_are_in_rank_order_while_they_arrive(order: list[int]) -> None:
    transcript = Transcript(1000, 1 << 30)
    transcript.add_text(0, "stdout", "before\n")
    for place, rank in enumerate(order):
        count = order[:place].count(rank)
        transcript.show(rank, {"text/plain": f"{rank} {count}"}, {}, f"{rank} {count}", "display_data")
        ranks = [min(line.ranks) for line in all_lines(draw(transcript))]
        assert ranks == [0, *sorted(order[: place + 1])]
    shown = [data["text/plain"] for data in (section.data for section in transcript.sections) if data]
    assert shown == [f"{rank} {count}" for rank in range(4) for count in range(3)]
    transcript.show(2, {"text/plain": "new"}, {}, "2 1", "update_display_data")
    assert transcript.displays()[2, "2 1"].data == {"text/plain": "new"}


def test_displays_that_differ_in_random_ids_are_merged() -> None:
    alike = [
        '<style>#T_{0}7355_row0 {{color: red}}</style><table id="T_{0}7355"><td id="T_{0}7355_row0">1</td></table>',
        '<div id="1b671a64-40d5-491e-99b0-da01ff1f33{0}{0}"></div>',
        '<script>show("1b671a6440d5491e99b0da01ff1f33{0}{0}")</script>',
    ]
    differ = ["<td>1b671a64-40d5-491e-99b0-da01ff1f33{0}{0}</td>", "<td>T_{0}7355</td>"]
    transcript = Transcript(1000, 1 << 30)
    for rank, letter in enumerate("ab"):
        for markup in [*alike, *differ]:
            data = {"text/html": markup.format(letter), "text/plain": f"<Styler at 0x7f{letter}0>"}
            transcript.show(rank, data, {}, None, "display_data")
        transcript.show(rank, {"text/plain": f"[<Line2D at 0x7f{letter}0>]"}, {}, None, "execute_result")
        transcript.show(rank, {"text/plain": f"'0x7f{letter}0'"}, {}, None, "execute_result")
    transcript.close()
    everyone, zero, one = (0, 1), (0,), (1,)
    ranks = [tuple(sorted(line.ranks)) for line in all_lines(transcript)]
    assert ranks == [everyone] * 3 + [zero, zero, one, one, everyone, zero, one]


def test_empty_display_has_no_label() -> None:
    transcript = Transcript(1000, 1 << 30)
    for rank in range(2):
        transcript.show(rank, {"text/plain": "50 %"}, {}, f"bar {rank}", "display_data")
        transcript.show(rank, {"text/html": "<pre style=''>\n</pre>", "text/plain": "\n"}, {}, None, "display_data")
        transcript.show(rank, {"text/plain": ""}, {}, f"bar {rank}", "update_display_data")
        transcript.add_text(rank, "stdout", "end\n")
    transcript.close()
    assert shown(transcript) == [((0, 1), "end")]
    assert len(transcript.sections) == 1


MOVES = ["\r", "\x08", "\x1b[A", "\x1b[2A", "\x1b[B", "\x1b[K", "\x1b[2K", "\x1b[?25l", "\x1b[3J"]
COLOURS = ["\x1b[31m", "\x1b[1;32m", "\x1b[39m", "\x1b[0m", "\x1b[38;5;9m"]
TEXTS = ["\n", "\r\n", "\n\n", "x", "long text", "é🙂", "  ", "\x00"]
CONTROLS = st.lists(st.sampled_from([*MOVES, *COLOURS, *TEXTS]), max_size=20)


@st.composite
def cut_twice(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    text = "".join(draw(CONTROLS))
    return cut(draw, text), cut(draw, text)


@given(cut_twice())
@settings(max_examples=300)
def test_chunk_boundaries_do_not_change_the_result(pieces: tuple[list[str], list[str]]) -> None:
    first, second = (shown(transcript_of((0, "stdout", piece) for piece in cuts)) for cuts in pieces)
    assert first == second


@st.composite
def control_mixes(draw: st.DrawFn) -> list[tuple[str, Chunk | int]]:
    ranks = st.integers(0, 2)
    say = st.tuples(st.just("say"), st.tuples(ranks, st.sampled_from(["stdout", "stderr"]), CONTROLS.map("".join)))
    clear = st.tuples(st.sampled_from(["clear", "clear later", "show", "update"]), ranks)
    return draw(st.lists(st.one_of(say, clear), max_size=25))


@given(control_mixes(), st.integers(1, 8))
@settings(max_examples=300)
def test_any_mix_of_lines_displays_and_clears_is_accepted(mix: list[tuple[str, Chunk | int]], max_lines: int) -> None:
    transcript = Transcript(max_lines, 1 << 30)
    for what, argument in mix:
        if isinstance(argument, tuple):
            transcript.add_text(*argument)
        elif what in ("show", "update"):
            kind = "display_data" if what == "show" else "update_display_data"
            transcript.show(argument, {"image/png": "same"}, {}, "id" if what == "update" else None, kind)
        else:
            transcript.clear(argument, wait=what == "clear later")
    transcript.close()
    assert not any(row.is_open for line in all_lines(transcript) for row in line.rows)
    assert all(section.lines or section.data for section in transcript.sections)


@given(some_ranks(), st.integers(1, 10))
def test_lines_beyond_the_limit_are_counted(output: tuple[dict[int, list[str]], list[Chunk]], max_lines: int) -> None:
    lines, chunks = output
    transcript = transcript_of(chunks, max_lines)
    on_screen = sum(len(lines_of(transcript, rank)) for rank in lines)
    hidden = sum(output.hidden_lines for output in transcript.hidden)
    assert on_screen + hidden == sum(map(len, lines.values()))
    assert len(all_lines(transcript)) <= max_lines


@st.composite
def ranks_that_draw(draw: st.DrawFn) -> list[Chunk]:
    left = {
        rank: ["say before\n", f"show {rank}", "show same", "say below\n", f"show last {rank}"] for rank in range(3)
    }
    order = draw(st.permutations([rank for rank, pieces in left.items() for _ in pieces]))
    return [(rank, *left[rank].pop(0).split(" ", 1)) for rank in order]


@given(ranks_that_draw())
def test_images_are_in_rank_order_whichever_rank_is_faster(output: list[Chunk]) -> None:
    transcript = Transcript(1000, 1 << 30)
    for rank, what, text in output:
        if what == "say":
            transcript.add_text(rank, "stdout", text)
        else:
            transcript.show(rank, {"image/png": text}, {}, None, "display_data")
    transcript.close()
    texts = [
        [(sorted(line.ranks), line.row.text) for line in section.lines] or section.data
        for section in transcript.sections
    ]
    assert texts == [
        [([0, 1, 2], "before"), ([0], "")],
        {"image/png": "0"},
        [([1], "")],
        {"image/png": "1"},
        [([2], "")],
        {"image/png": "2"},
        [([0, 1, 2], "")],
        {"image/png": "same"},
        [([0, 1, 2], "below"), ([0], "")],
        {"image/png": "last 0"},
        [([1], "")],
        {"image/png": "last 1"},
        [([2], "")],
        {"image/png": "last 2"},
    ]


def test_clear_of_one_rank_keeps_the_lines_of_others() -> None:
    transcript = Transcript(1000, 1 << 30)
    transcript.add_text(0, "stdout", "both\n")
    transcript.add_text(1, "stdout", "both\nmine\n")
    assert shown(draw(transcript)) == [((0, 1), "both"), ((1,), "mine")]
    transcript.clear(0, wait=False)
    assert shown(draw(transcript)) == [((1,), "both"), ((1,), "mine")]


def test_cleared_lines_do_not_count_towards_the_limit() -> None:
    transcript = Transcript(10, 1000)
    for turn in range(100):
        transcript.clear(0, wait=True)
        transcript.add_text(0, "stdout", f"turn {turn}\n" * 3)
    assert shown(draw(transcript)) == [((0,), "turn 99")] * 3
    assert not transcript.hidden


def test_thousand_colour_changes_use_bounded_memory() -> None:
    transcript = transcript_of([(0, "stdout", f"\x1b[31mred {line}\x1b[39m plain\n") for line in range(1000)])
    assert max(map(len, texts_of(transcript))) < 30


def test_colour_continues_on_the_next_line() -> None:
    transcript = transcript_of([(0, "stdout", "\x1b[1;31mred\nstill\x1b[0m not\nplain\n")])
    assert texts_of(transcript) == [
        "\x1b[1;31mred",
        "\x1b[1m\x1b[31mstill\x1b[0m not",
        "plain",
    ]


def test_bar_that_erased_itself_leaves_nothing() -> None:
    assert shown(transcript_of([(0, "stderr", "50%"), (0, "stderr", "\r   \r")])) == []


def test_earlier_lines_can_be_rewritten_after_many_arrived_at_once() -> None:
    transcript = transcript_of(
        [(0, "stdout", "a\nb\nc\nd\n"), (0, "stdout", "\x1b[3Anew b\n\n\n"), (0, "stdout", "e\n")]
    )
    assert texts_of(transcript) == ["a", "new b", "c", "d", "e"]


def test_rewritten_lines_are_merged_and_count_towards_the_limit() -> None:
    def pulled(max_lines: int) -> Transcript:
        transcript = Transcript(max_lines, 1 << 30)
        for number in range(300):
            for rank in range(2):
                transcript.add_text(rank, "stdout", f"begun {number}\n\x1b[1A\x1b[2Kdone {number}\n")
            draw(transcript)
        transcript.close()
        return transcript

    assert shown(pulled(1000)) == [((0, 1), f"done {number}") for number in range(300)]
    assert len(shown(pulled(100))) <= 100


def test_cursor_reaches_no_line_of_another_stream_beyond_the_limit() -> None:
    transcript = Transcript(2, 1 << 30)
    transcript.add_text(0, "stdout", "a\nb\nc\nd\n")
    draw(transcript)
    transcript.add_text(0, "stdout", "e\nf\n")
    transcript.add_text(0, "stderr", "x\ny\nz\n")
    transcript.add_text(0, "stderr", "\x1b[9Anew")
    (output,) = transcript.hidden
    assert {row.text for row in output.tail if row.stream == "stdout"} >= {"e", "f"}


@given(order=st.lists(st.integers(0, 1), min_size=12, max_size=12))
def test_unfinished_lines_of_both_streams_keep_their_order(order: list[int]) -> None:
    output = [("stdout", "out\n"), ("stderr", "err\n"), ("stdout", "begun"), ("stderr", "trouble")]
    left = [list(output), list(output)]
    transcript = Transcript(1000, 1_000_000)
    for rank in [*order, *[0] * len(output), *[1] * len(output)]:
        if left[rank]:
            transcript.add_text(rank, *left[rank].pop(0))
    transcript.close()
    assert shown(transcript) == [((0, 1), text.strip()) for _, text in output]


def test_displays_among_many_lines_stay_while_ranks_print() -> None:
    transcript = Transcript(10_000, 1 << 30)
    transcript.add_text(0, "stdout", "".join(f"{line}\n" for line in range(50)))
    transcript.show(0, {"image/png": "figure"}, {}, "plot", "display_data")
    for line in range(1500):
        transcript.add_text(0, "stdout", f"step {line}\n")
        if line % 10 == 0:
            assert [section.data for section in draw(transcript).sections if section.data] == [{"image/png": "figure"}]


@pytest.mark.parametrize("behind", [100, 1000, 2000, 4500])
def test_lines_within_the_limit_are_shown_however_far_a_rank_is_behind(behind: int) -> None:
    count, transcript = 4500, Transcript(5000, 1 << 30)

    def run(rank: int, at: int) -> None:
        own = f"rank {rank} at {at}\n" if at % 500 == 0 else ""
        transcript.add_text(rank, "stdout", own + "".join(f"step {line}\n" for line in range(at, at + 100)))
        draw(transcript)

    for at in range(0, count + behind, 100):
        if at < count:
            run(0, at)
        if at >= behind:
            run(1, at - behind)
    transcript.close()
    assert len(shown(transcript)) == count + 2 * count // 500
    assert not transcript.hidden


def merged_lines(sequences: Mapping[int, Sequence[str]]) -> list[list[tuple[int, int]]]:
    """Return the items of each line."""
    return [[(rank, place + at) for rank, place in items] for items, number in merge(sequences) for at in range(number)]


STEPS = ("forward", "backward", "step") * 50


@pytest.mark.parametrize(
    ("sequences", "lines"),
    [
        # Each node prints a line of its own first.
        ([["node A", *STEPS], ["node A", *STEPS], ["node B", *STEPS], ["node B", *STEPS]], 152),
        ([["forward", *STEPS], STEPS], 151),  # one rank prints a repeated line more often
        ([STEPS, STEPS[:70] + STEPS[71:]], 150),
    ],
)
def test_repeated_lines_are_merged_beside_lines_that_not_all_ranks_have(
    sequences: list[Sequence[str]], lines: int
) -> None:
    assert len(merged_lines(dict(enumerate(sequences)))) == lines


def test_lines_of_one_rank_stay_beside_those_of_the_others() -> None:
    sequences = {0: "e0t5", 1: "o1t6", 2: "e2r7", 3: "o3t8", 4: "e4r9"}
    assert [sequences[items[0][0]][items[0][1]] for items in merged_lines(sequences)] == list("eo01234tr56789")


@pytest.mark.parametrize(
    ("sequences", "merged"),
    [
        (("Xabc", "abcX"), ["0 X", "01 a", "01 b", "01 c", "1 X"]),  # of lines in different order the one far apart
        (("-a-b-", "a-b-"), ["0 -", "01 a", "01 -", "01 b", "01 -"]),  # a line of one rank shifts no repeated ones
        (("abab", "baba", "abab"), ["02 a", "012 b", "012 a", "012 b", "1 a"]),
    ],
)
def test_lines_that_are_repeated_or_in_different_order(sequences: tuple[str, ...], merged: list[str]) -> None:
    lines = merged_lines(dict(enumerate(sequences)))
    shown = [f"{''.join(str(rank) for rank, _ in items)} {sequences[items[0][0]][items[0][1]]}" for items in lines]
    assert shown == merged


def test_lines_of_ranks_that_still_print_are_in_the_order_of_time() -> None:
    sequences = {0: "abcXd", 1: "xyzXw"}
    times = {0: [1, 2, 5, 7, inf], 1: [3, 4, 5, 8, inf]}
    merged = merge(sequences, times)
    shown = [sequences[items[0][0]][items[0][1] :][:number] for items, number in merged]
    # What is above a common line has its time; equal times, and what has none, are in the order of the ranks.
    assert shown == ["abc", "xyz", "X", "d", "w"]
    assert merge({0: "abc", 1: "xyz"}, {0: [1, 2, 5], 1: [3, 4, 6]}) == [
        ([(0, 0)], 2), ([(1, 0)], 2), ([(0, 2)], 1), ([(1, 2)], 1),
    ]  # fmt: skip


def cost_of_merging(ranks: int, *, is_live: bool) -> float:
    """Return the CPU seconds for lines of which many are equal and few in the same order."""
    draw = random.Random(ranks)
    lines_of_rank = {rank: [draw.randrange(50) for _ in range(400)] for rank in range(ranks)}
    times = {rank: list(range(400)) for rank in lines_of_rank} if is_live else None
    costs = []
    gc.disable()
    for _ in range(5):
        start = time.process_time()
        merge(lines_of_rank, times)
        costs.append(time.process_time() - start)
    gc.enable()
    return min(costs)


@pytest.mark.parametrize("is_live", [True, False])
def test_cost_per_line_is_independent_of_the_number_of_ranks(is_live: bool) -> None:
    few, many = (cost_of_merging(ranks, is_live=is_live) for ranks in (8, 64))
    assert many < 25 * few  # 40 times as much if each rank is compared with all before it
