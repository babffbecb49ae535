"""What the proxy remembers of a request."""

from __future__ import annotations

import socket

import pytest

from relay.channel import Channel
from relay.frames import MAX_PAYLOAD_BYTES
from thaw.errors import ProtocolError
from thaw_runtime.engine import EngineRequest, Sampling
from thaw_runtime.engine_link import EngineLink


def test_nothing_is_remembered_of_a_request_that_could_not_be_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = EngineLink(Channel(ours), 0)
        with pytest.raises(ProtocolError):
            link.submit(EngineRequest("r", (10**6,) * (MAX_PAYLOAD_BYTES // 7), Sampling(8), 0))
        assert link.inflight() == 0
