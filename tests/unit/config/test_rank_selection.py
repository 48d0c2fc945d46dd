"""Parse rank specifications and GPU lists."""

from __future__ import annotations

import pytest

from jupyter_disttrain.client.startup import gpus
from jupyter_disttrain.config.cluster import ClusterConfig
from jupyter_disttrain.config.rank_selection import parse_ranks
from jupyter_disttrain.errors import UsageError
from jupyter_disttrain.protocol.ranks import format_ranks, label_ranks


@pytest.mark.parametrize(
    ("variable", "count", "visible"),
    [
        (None, 0, []),
        (None, 2, ["0", "1"]),
        ("1,0", 2, ["1", "0"]),
        ("", 2, []),
        ("-1", 2, []),
        ("0,-1,1", 2, ["0"]),
        ("0,5,1", 2, ["0"]),
        ("GPU-8f2c, 1", 2, ["GPU-8f2c", "1"]),
        ("0", 0, []),
    ],
)
def test_gpus_visible_to_cuda(variable: str | None, count: int, visible: list[str]) -> None:
    assert gpus.shown_gpus(count, variable) == visible


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, ["3", "GPU-a", "5"]),
        ({"n": 2}, ["3", "GPU-a", "5"]),
        ({"gpus": (2, 0)}, ["5", "3"]),
        ({"backend": "gloo"}, []),
        ({"backend": "none", "n": 9}, []),
        ({"n": 9, "share_gpus": True}, ["3", "GPU-a", "5"]),
    ],
)
def test_gpus_are_divided_among_ranks(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, object], chosen: list[str]
) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", lambda: ["3", "GPU-a", "5"])
    assert gpus.choose_gpus(ClusterConfig(**options)) == chosen  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("visible", "options", "message"),
    [
        (
            ["0", "1"],
            {"n": 3},
            (
                "3 ranks need 3 GPUs, and 2 can be used; use -n 2, add --share-gpus to put several ranks on one, "
                "or --backend gloo for the CPU"
            ),
        ),
        (
            ["0", "1"],
            {"gpus": (0, 9)},
            "there is no GPU 9: this machine shows GPUs 0-1; choose others with -g, or leave -g out",
        ),
        ([], {"gpus": (0,)}, "there is no GPU 0: this machine shows no GPU; choose others with -g, or leave -g out"),
        (
            [],
            {"backend": "nccl"},
            "the backend nccl needs an NVIDIA GPU, and none is visible here; use --backend gloo, or auto",
        ),
    ],
)
def test_missing_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, visible: list[str], options: dict[str, object], message: str
) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", lambda: visible)
    with pytest.raises(UsageError) as caught:
        gpus.choose_gpus(ClusterConfig(**options))  # type: ignore[arg-type]
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("spec", "ranks"),
    [
        ("all", (0, 1, 2, 3)),
        ("0,2-3", (0, 2, 3)),
        ("[0, 2-3]", (0, 2, 3)),
        ("[1]", (1,)),
        (" 3 , 0,0", (0, 3)),
        ("1:2", (1, 2)),
        (2, (2,)),
        ([3, 1], (1, 3)),
    ],
)
def test_rank_specifications_are_parsed(spec: str | int | list[int], ranks: tuple[int, ...]) -> None:
    assert parse_ranks(spec, world_size=4) == ranks


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "no rank is named in ''; write e.g. '0,2-3' or 'all'"),
        ("[]", "no rank is named in '[]'; write e.g. '0,2-3' or 'all'"),
        (",", "no rank is named in ','; write e.g. '0,2-3' or 'all'"),
        ([], "no rank is named in []; write e.g. '0,2-3' or 'all'"),
        ("4", "there is no rank 4: this cluster has ranks 0-3; write e.g. '0' or 'all'"),
        (-1, "there is no rank -1: this cluster has ranks 0-3; write e.g. '0' or 'all'"),
        ("2-9", "there is no rank 4: this cluster has ranks 0-3; write e.g. '0' or 'all'"),
        ("7,5", "there are no ranks 5,7: this cluster has ranks 0-3; write e.g. '0' or 'all'"),
        ("3-1", "ranks '3-1' in '3-1' are in reverse order; write '1-3'"),
        ("x", "cannot read 'x' in ranks 'x'; write e.g. '0,2-3' or 'all'"),
        ("-1", "cannot read '-1' in ranks '-1'; write e.g. '0,2-3' or 'all'"),
    ],
)
def test_invalid_rank_specifications_are_refused(spec: str | int | list[int], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_ranks(spec, world_size=4)
    assert str(caught.value) == message


def test_rank_lists_are_formatted() -> None:
    assert format_ranks([5, 0, 2, 1]) == "0-2,5"
    assert (label_ranks([3]), label_ranks([1, 0])) == ("rank 3", "ranks 0-1")
