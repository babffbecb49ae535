"""What the proxy remembers of a request."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess

import pytest

from relay.channel import Channel
from relay.frames import MAX_PAYLOAD_BYTES
from thaw.errors import ProtocolError
from thaw_runtime.engine import EngineRequest, Failed, Sampling
from thaw_runtime.engine_link import EngineLink


def test_nothing_is_remembered_of_a_request_that_could_not_be_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = EngineLink(Channel(ours), 0)
        with pytest.raises(ProtocolError):
            link.submit(EngineRequest("r", (10**6,) * (MAX_PAYLOAD_BYTES // 7), Sampling(8), 0))
        assert link.inflight() == 0


@pytest.mark.parametrize(("number", "name"), [(signal.SIGSEGV, "SIGSEGV"), (signal.SIGRTMIN + 1, "signal 35")])
def test_an_engine_that_a_signal_killed_fails_its_requests_by_the_signals_name(number: int, name: str) -> None:
    ours, theirs = socket.socketpair()
    lost: queue.Queue[int] = queue.Queue()
    with ours, subprocess.Popen(["sleep", "1000"]) as engine:
        link = EngineLink(Channel(ours), engine.pid)
        answer = link.submit(EngineRequest("r", (1,), Sampling(8), 0))
        engine.send_signal(number)
        os.waitid(os.P_PID, engine.pid, os.WEXITED | os.WNOWAIT)
        engine.returncode = -number  # the link reaps it
        theirs.close()
        link.listen(lost.put)
        assert lost.get(timeout=20) == number
    (failed,) = answer.next(20)
    assert isinstance(failed, Failed)
    assert failed.error.message == f"the engine process was killed by {name}"
