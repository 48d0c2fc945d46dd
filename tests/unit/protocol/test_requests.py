"""The client's requests: each is decoded as it was encoded, and has one handler."""

from __future__ import annotations

import json

import pytest

from jupyter_disttrain.protocol.requests import (
    NannyRequest,
    Numbers,
    RankControlRequest,
    RankRequest,
    Request,
    Signal,
    decode,
    kinds,
)
from jupyter_disttrain.rank.kernel import requests as rank_requests
from jupyter_disttrain.rank.nanny import nanny


def test_request_is_decoded_as_encoded() -> None:
    for request in (Numbers(name="model", path="['weight']", ranks=[0, 2]), Signal(number=9)):
        assert decode(json.loads(json.dumps(request.to_content()))) == request


def test_unknown_fields_are_ignored_and_unknown_requests_refused() -> None:
    assert decode(Signal(number=9).to_content() | {"reason": "new"}) == Signal(number=9)
    with pytest.raises(
        ValueError, match="unknown request 'Teleport'; install the same version for the notebook and the ranks"
    ):
        decode({"do": "Teleport"})
    with pytest.raises(ValueError, match="Signal is not served on this channel"):
        rank_requests.serves.serve(None, Signal(number=9).to_content(), [])


def test_each_request_has_one_handler_on_its_channel() -> None:
    def named(requests: list[type[Request]]) -> list[str]:
        return sorted(each.__name__ for each in requests)

    beside = kinds(RankControlRequest)
    assert named(list(rank_requests.serves_beside.methods)) == named(beside)
    assert named(list(rank_requests.serves.methods)) == named(
        [kind for kind in kinds(RankRequest) if kind not in beside]
    )
    assert named(list(nanny.serves.methods)) == named(kinds(NannyRequest))
