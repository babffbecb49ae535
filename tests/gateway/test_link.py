"""The outcome of a run whose connection ends without an answer."""

from __future__ import annotations

import errno
import socket
import time

import pytest

from gateway.serving.hangup import Hangup
from gateway.serving.routing.invoker_pool import InvokerPool, Reply
from relay.clients.http11 import Connection
from thaw.errors import ThawError, TimeLimitExceeded, WorkerLost


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (TimeoutError(errno.ETIMEDOUT, "Connection timed out"), WorkerLost),  # the kernel found that the host vanished
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), WorkerLost),
        (TimeoutError("timed out"), TimeLimitExceeded),  # the socket's timeout, which is the call's deadline
    ],
)
def test_only_the_calls_own_deadline_is_a_time_limit(
    monkeypatch: pytest.MonkeyPatch, error: OSError, named: type[ThawError]
) -> None:
    ours, theirs = socket.socketpair()
    connection = Connection(ours)

    def fail() -> None:
        raise error

    monkeypatch.setattr(connection, "read_head", fail)
    reply = Reply(InvokerPool("token"), "host:1", connection, time.monotonic() + 60, Hangup())
    with theirs, pytest.raises(named):
        reply.read_head()
    assert ours.fileno() == -1
