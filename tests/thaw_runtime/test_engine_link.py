"""The proxy's view of its engine process: its start, its requests and its end."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from relay.clients.channel import Channel
from relay.protocol.frames import MAX_PAYLOAD_BYTES
from thaw.errors import ErrorInfo, InitFailed, InstanceGone, ModelUnsupported, ProtocolError, ThawError, WorkerLost
from thaw_runtime.engine.link import Answer, EngineLink
from thaw_runtime.engine.protocol import EngineRequest, EngineStarted, Event, Failed, Finished, Sampling, Token, Usage
from thaw_runtime.engine.wire import (
    Abort,
    AdapterEnded,
    EngineReady,
    EngineStartFailed,
    Events,
    LoadAdapter,
    Message,
    Submit,
    decode,
    encode,
)

WAIT_S = 10.0


@dataclass
class Played:
    """The link, and the engine's side of its socket.  ``process`` takes the place of the engine's process."""

    link: EngineLink
    engine: Channel
    process: subprocess.Popen[bytes]
    lost: queue.SimpleQueue[int]

    def says(self, *messages: Message) -> None:
        for message in messages:
            self.engine.send(encode(message))

    def heard(self) -> Message:
        return decode(self.engine.receive()[0])


@pytest.fixture
def played() -> Iterator[Played]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(WAIT_S)
    with ours, theirs, subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        made = Played(EngineLink(Channel(ours), process.pid), Channel(theirs), process, queue.SimpleQueue())
        made.link.listen(made.lost.put)
        yield made
        theirs.close()
        if made.lost.empty():
            made.lost.get(timeout=WAIT_S)  # the link's thread has reaped the process


def request(name: str) -> EngineRequest:
    return EngineRequest(name, (1, 2), Sampling(8), 0)


def read(answer: Answer, n: int) -> list[Event]:
    found: list[Event] = []
    while len(found) < n:
        found += answer.next(WAIT_S)
    return found


def ends(played: Played, status: int | None) -> int:
    """Let the engine exit, or kill it if ``status`` is None.  Return the link's report on its end."""
    if status is not None:
        assert played.process.stdin is not None
        played.process.stdin.close()  # input() raises: status 1
        os.waitid(os.P_PID, played.process.pid, os.WEXITED | os.WNOWAIT)
    played.engine.close()
    signal_number = played.lost.get(timeout=WAIT_S)
    played.lost.put(signal_number)
    return signal_number


def test_a_start_that_went_well_tells_what_the_engine_found(played: Played) -> None:
    played.says(EngineReady(EngineStarted(max_model_len=77)))
    assert played.link.wait_started().max_model_len == 77


def test_a_start_that_failed_raises_what_the_engine_said(played: Played) -> None:
    played.says(EngineStartFailed(ModelUnsupported("no such architecture", hint="another").info()))
    with pytest.raises(ModelUnsupported, match="no such architecture") as raised:
        played.link.wait_started()
    assert raised.value.hint == "another"


@pytest.mark.parametrize(
    ("status", "error", "said"),
    [
        (1, InitFailed, "the engine process ended with status 1 while it started"),
        (None, WorkerLost, "the engine process was killed by SIGKILL while it started"),
    ],
)
def test_an_engine_that_ends_while_it_starts_failed_and_one_that_was_killed_was_lost(
    played: Played, status: int | None, error: type[ThawError], said: str
) -> None:
    assert ends(played, status) == (0 if status else 9)
    with pytest.raises(error, match=said) as raised:
        played.link.wait_started()
    assert type(raised.value) is error


def test_each_request_gets_its_own_events_in_order_and_is_forgotten_with_its_last(played: Played) -> None:
    one, two = played.link.submit(request("one")), played.link.submit(request("two"))
    assert [played.heard(), played.heard()] == [Submit(request("one")), Submit(request("two"))]
    end, failed = Finished("length", Usage(2, 2)), Failed(ErrorInfo("ModelCorrupt", "a byte"))
    played.says(Events((("one", Token(0, 5)), ("two", Token(0, 6)), ("nobody", Token(0, 1)))))
    assert (read(one, 1), read(two, 1)) == ([Token(0, 5)], [Token(0, 6)])
    assert played.link.inflight() == 2
    played.says(Events((("two", failed), ("one", Token(1, 7)), ("one", end), ("one", Token(2, 8)))))
    assert (read(one, 2), read(two, 1)) == ([Token(1, 7), end], [failed])
    assert played.link.inflight() == 0


def test_an_aborted_request_ends_for_its_reader_and_the_engine_is_told_once(played: Played) -> None:
    answer = played.link.submit(request("one"))
    for _ in range(2):
        played.link.abort("one")
    played.link.abort("another")
    assert read(answer, 1) == [Finished("abort", Usage(0, 0))]
    assert played.link.inflight() == 0
    played.link.submit(request("next"))
    assert [played.heard() for _ in range(3)] == [Submit(request("one")), Abort("one"), Submit(request("next"))]


def test_with_its_engine_every_open_request_is_lost_and_none_is_taken_any_more(played: Played) -> None:
    answers = [played.link.submit(request(name)) for name in ("one", "two")]
    assert ends(played, None) == 9
    lost = Failed(ErrorInfo("WorkerLost", "the engine process was killed by SIGKILL"))
    assert [read(answer, 1) for answer in answers] == [[lost], [lost]]
    assert played.link.inflight() == 0
    with pytest.raises(InstanceGone):
        played.link.submit(request("three"))


def test_an_engine_that_says_what_only_the_proxy_says_is_ended(played: Played) -> None:
    answer = played.link.submit(request("one"))
    played.says(Abort("one"))
    assert played.lost.get(timeout=WAIT_S) == 0  # nobody killed it from outside
    played.lost.put(0)
    (failed,) = read(answer, 1)
    assert isinstance(failed, Failed)
    assert failed.error.message == "the engine process sent a damaged message (the engine sent Abort)"
    with pytest.raises(InitFailed, match="the engine process sent a damaged message"):
        played.link.wait_started()


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


def test_two_loads_of_one_adapter_both_end(played: Played) -> None:
    with open(os.devnull) as weights:
        loads = [
            threading.Thread(target=played.link.load_adapter, args=("a", "", "{}", weights.fileno()), daemon=True)
            for _ in range(2)
        ]
        for load in loads:
            load.start()
        for _ in loads:
            message = played.heard()
            assert isinstance(message, LoadAdapter)
            played.says(AdapterEnded(message.number))
        for load in loads:
            load.join(WAIT_S)
    assert not any(load.is_alive() for load in loads)


def test_an_adapter_that_does_not_fit_in_a_frame_leaves_nothing_behind(played: Played) -> None:
    with open(os.devnull) as weights, pytest.raises(ProtocolError):
        played.link.load_adapter("a", "", "x" * MAX_PAYLOAD_BYTES, weights.fileno())
    assert not played.link._loads
