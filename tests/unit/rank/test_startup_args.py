"""Arguments and network interface of the first process on a host.

Does not cover: jobs that start (``test_join``).
"""

from __future__ import annotations

import os

import pytest

from jupyter_disttrain.protocol.environment import ADDRESSES, NETWORK
from jupyter_disttrain.rank.startup.startup_args import INTERFACE_VARIABLES, Setup, enter, read_arguments


@pytest.mark.parametrize("name", ["my run", "exp/1"])
def test_invalid_job_name_starts_no_job(capsys: pytest.CaptureFixture[str], name: str) -> None:
    with pytest.raises(SystemExit):
        read_arguments(["--join", "job.json", "--name", name])
    assert f"argument --name: a cluster can't be named '{name}'; use up to 40 letters" in capsys.readouterr().err


def test_backends_use_the_interface_in_the_cluster_network_unless_the_user_has_set_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in INTERFACE_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in {NETWORK: "127.0.0.0/8", ADDRESSES: "10.9.8.7", "GLOO_SOCKET_IFNAME": "eth9"}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    enter(Setup())
    # NCCL takes a name for a prefix unless "=" precedes it.
    assert [os.environ[name] for name in INTERFACE_VARIABLES] == ["eth9", "lo", "=lo"]
