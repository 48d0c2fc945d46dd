"""Settings of Horovod, TensorFlow and JAX ranks without the frameworks: variables, ports, one line of advice.

With the frameworks themselves: ``tests/frameworks``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from jupyter_disttrain.config.cluster import ClusterConfig, parse_roles
from jupyter_disttrain.config.frameworks import framework_environment, tf_config
from jupyter_disttrain.errors import UsageError

if TYPE_CHECKING:
    from jupyter_disttrain.config.cluster import Roles


@pytest.mark.parametrize(
    ("text", "roles"),
    [(None, ()), ("", ()), ("worker=2", (("worker", 2),)), ("chief=1, ps=2", (("chief", 1), ("ps", 2)))],
)
def test_roles_are_parsed(text: str | None, roles: Roles) -> None:
    assert parse_roles(text) == roles


@pytest.mark.parametrize("part", ["worker", "worker=0", "worker=x", "boss=1", "worker=-1", "=2"])
def test_invalid_role_is_named(part: str) -> None:
    with pytest.raises(UsageError, match=f"cannot read '{part}' in --tf-config ps=1,{part}; write each role once"):
        parse_roles(f"ps=1,{part}")
    with pytest.raises(UsageError, match="cannot read 'ps=2'"):
        parse_roles("ps=1,ps=2")


def test_roles_determine_the_number_of_ranks() -> None:
    assert ClusterConfig(tf_roles=parse_roles("worker=2,ps=1")).count == 3
    with pytest.raises(UsageError, match=r"--tf-config worker=2,ps=1 is for 3 ranks, not 2; leave -n out"):
        ClusterConfig(n=2, tf_roles=parse_roles("worker=2,ps=1"))


def test_each_rank_gets_its_role() -> None:
    places = ["a:1", "a:2", "b:1"]
    configs = [tf_config(rank, places, parse_roles("worker=2,ps=1")) for rank in range(3)]
    assert all(each["cluster"] == {"worker": ["a:1", "a:2"], "ps": ["b:1"]} for each in configs)
    assert [each["task"] for each in configs] == [
        {"type": "worker", "index": 0},
        {"type": "worker", "index": 1},
        {"type": "ps", "index": 0},
    ]
    assert json.loads(framework_environment(2, places, (("worker", 3),))["TF_CONFIG"])["task"]["index"] == 2
    assert "TF_CONFIG" not in framework_environment(2, places, ())
