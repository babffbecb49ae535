"""The TCP transport: rights to connect, addresses, the effects of a cut, and the shortcut in addition to redis."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import redis

from relay.protocol import frames
from relay.protocol.frames import FrameHeader, FrameKind, Priority
from relay.protocol.messages import GroupCredential
from relay.transports import handshake
from relay.transports.auto import AutoTransport
from relay.transports.base import Flow
from relay.transports.redis_in import RedisLane
from relay.transports.tcp import TcpTransport
from tests.conformance.transports import Worker, cut, settle
from tests.relay.samples import forged
from thaw.errors import PlatformError, ProtocolError, Unavailable, WorkerLost
from thaw.ids import GroupId
from thaw.tracing.hops import HopPath

GROUP = GroupId("ab" * 16)
GROUP_BYTES = bytes.fromhex(GROUP)
HIDDEN = FrameHeader(FrameKind.HIDDEN_STATES, group_id=GROUP_BYTES)
CREDENTIAL = GroupCredential("default", "the group's secret")
FLOW = Flow(chunk_bytes=1000, window_bytes=20_000, resume_s=2.0)
T = TypeVar("T", TcpTransport, AutoTransport)


@pytest.fixture
def url(valkey_url: str) -> Iterator[str]:
    """The URL of a relay server on which the default user has the group's secret."""
    with redis.Redis.from_url(valkey_url) as client:
        client.execute_command("ACL", "SETUSER", "default", f">{CREDENTIAL.secret}")
        yield valkey_url
        client.execute_command("ACL", "SETUSER", "default", f"<{CREDENTIAL.secret}")
        client.execute_command("ACL", "SETUSER", "default", "nopass")


def stage(kind: type[T], url: str, number: int, *peers: int, host: str = "127.0.0.1") -> T:
    return kind(url, GROUP, number, peers, host_address=host, credential=CREDENTIAL, flow=FLOW)


@pytest.fixture
def ends(url: str) -> Iterator[list[TcpTransport]]:
    with closing(stage(TcpTransport, url, 0, 1)) as one, closing(stage(TcpTransport, url, 1, 0)) as two:
        yield [one, two]


def dial(transport: TcpTransport) -> tuple[socket.socket, bytes]:
    host, port = transport._ends._acceptor.address.split(":")
    sock = socket.create_connection((host, int(port)), 10)
    return sock, sock.recv(handshake.GREETING_BYTES, socket.MSG_WAITALL)


def closed_by_peer(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


HELLO = handshake.Hello(GROUP_BYTES, 0, 1, Priority.INFERENCE)


STRANGERS = {
    "secret": (HELLO, "another group's secret"),
    "no secret": (HELLO, ""),
    "group": (replace(HELLO, group_id=bytes(16)), CREDENTIAL.secret),
    "receiver": (replace(HELLO, receiver=2), CREDENTIAL.secret),
    "sender": (replace(HELLO, sender=7), CREDENTIAL.secret),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_gets_no_answer_and_its_connection_is_closed(ends: list[TcpTransport], stranger: str) -> None:
    sock, greeting = dial(ends[1])
    with sock:
        sock.sendall(handshake.hello(greeting, *STRANGERS[stranger]))
        assert closed_by_peer(sock)
    assert ends[1]._ends._acceptor._lanes == {}


def test_a_proof_cannot_be_used_twice(ends: list[TcpTransport]) -> None:
    first, greeting = dial(ends[1])
    with first:
        proof = handshake.hello(greeting, HELLO, CREDENTIAL.secret)
        first.sendall(proof)
        answer = first.recv(handshake.WELCOME_BYTES, socket.MSG_WAITALL)
        assert handshake.read_welcome(proof, answer, CREDENTIAL.secret) == (0, 0)
        with pytest.raises(ProtocolError, match="does not know the group's secret"):
            handshake.read_welcome(proof, answer, "another")
        second, _ = dial(ends[1])
        with second:
            second.sendall(proof)
            assert closed_by_peer(second)


def test_strangers_that_say_nothing_are_few(ends: list[TcpTransport]) -> None:
    strangers = [dial(ends[1])[0] for _ in range(40)]
    assert closed_by_peer(strangers[0])  # later strangers replaced it
    ends[0].send(1, HIDDEN, b"still served", deadline_s=20)
    assert bytes(ends[1].receive(deadline_s=20).payload) == b"still served"
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("address", ["", "0.0.0.0", "::", "*", "0.0.0.0:7000"])
def test_a_stage_never_listens_on_every_address(url: str, address: str) -> None:
    with pytest.raises(PlatformError, match="does not listen on"):
        stage(TcpTransport, url, 0, 1, host=address)


def test_a_stage_listens_on_its_host_address_and_is_gone_when_closed(ends: list[TcpTransport]) -> None:
    host, port = ends[1]._ends._acceptor.address.split(":")
    assert host == "127.0.0.1"
    with socket.socket() as elsewhere:
        assert elsewhere.connect_ex(("127.0.0.2", int(port))) != 0
    ends[1].close()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(port))) != 0


def test_a_receiver_that_is_not_there_yet_is_waited_for(url: str) -> None:
    with closing(stage(TcpTransport, url, 0, 1)) as sender, closing(stage(TcpTransport, url, 2, 1)) as late:
        with pytest.raises(Unavailable, match="has not said where it listens"):
            sender.send(1, HIDDEN, b"x", deadline_s=0.1)
        sending = Worker(lambda: late.send(1, HIDDEN, b"waits", deadline_s=20))
        with closing(stage(TcpTransport, url, 1, 0, 2)) as receiver:
            assert bytes(receiver.receive(deadline_s=10).payload) == b"waits"
            sending.join()


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (44, 0xFFFFFFFF, "the limit is"),
        (40, 0xFFFFFFFF, "a message of more than"),
        (0, 0, "not a frame"),
        (28, 9, "message 9 chunk 0 came"),
        (8, 1, "another group"),
    ],
)
def test_a_member_that_forges_frames_is_refused_before_memory_is_taken(
    ends: list[TcpTransport], offset: int, value: int, message: str
) -> None:
    sock, greeting = dial(ends[1])
    with sock:
        sock.sendall(handshake.hello(greeting, HELLO, CREDENTIAL.secret))
        sock.recv(handshake.WELCOME_BYTES, socket.MSG_WAITALL)
        sock.sendall(forged(frames.encode(HIDDEN, bytes(600)), offset, value))
        with pytest.raises(ProtocolError, match=message):
            ends[1].receive(deadline_s=20)
        assert closed_by_peer(sock)


def test_what_was_sent_before_a_cut_is_sent_again_by_the_thread_that_waits_for_the_answer(
    ends: list[TcpTransport],
) -> None:
    ends[0].send(1, HIDDEN, b"first", deadline_s=20)
    assert bytes(ends[1].receive(deadline_s=20).payload) == b"first"
    link = ends[0]._ends.link(1, Priority.INFERENCE)
    assert len(link.queue) == 1  # it is kept, because the receiver does not acknowledge so little
    cut(ends[1])
    ends[0].send(1, HIDDEN, b"into the void", deadline_s=20)
    waiting = Worker(lambda: ends[0].receive(deadline_s=20))  # this connects again
    assert bytes(ends[1].receive(deadline_s=10).payload) == b"into the void"
    ends[1].send(0, HIDDEN, b"the answer", deadline_s=20)
    waiting.join()


def test_a_cut_that_is_noticed_by_looking_for_acknowledgements_is_repaired_too(ends: list[TcpTransport]) -> None:
    ends[0].send(1, HIDDEN, b"first", deadline_s=20)
    assert bytes(ends[1].receive(deadline_s=20).payload) == b"first"
    link = ends[0]._ends.link(1, Priority.INFERENCE)
    n_kept = -(-FLOW.credit_bytes // 1000)  # with this many more messages the sender does not yet read acknowledgements
    for i in range(n_kept):
        ends[0].send(1, HIDDEN, bytes([i]) * 900, deadline_s=20)
    cut(ends[1])
    ends[0].send(1, HIDDEN, bytes([n_kept]) * 900, deadline_s=20)  # the last message: the sender needs an answer now
    assert link._sock is None
    waiting = Worker(lambda: ends[0].receive(deadline_s=20))
    assert [ends[1].receive(deadline_s=10).payload[0] for _ in range(n_kept + 1)] == list(range(n_kept + 1))
    ends[1].send(0, HIDDEN, b"the answer", deadline_s=20)
    waiting.join()


def test_a_lost_link_is_not_forgotten_while_somebody_sends_on_it(ends: list[TcpTransport]) -> None:
    ends[0].send(1, HIDDEN, b"x", deadline_s=20)
    link = ends[0]._ends.link(1, Priority.INFERENCE)
    with link._lock:
        link._drop()
        assert link.revive(5.0) == pytest.approx(5.0, abs=0.1)  # it wants to be called again soon
    assert link.revive(5.0) is None
    assert link._sock is not None


def test_a_message_above_the_window_passes_while_it_is_read(ends: list[TcpTransport]) -> None:
    payload = bytes(range(256)) * 2000
    sending = Worker(lambda: ends[0].send(1, HIDDEN, payload, deadline_s=20))
    assert bytes(ends[1].receive(deadline_s=20).payload) == payload
    sending.join()
    assert sum(f.n_bytes for f in ends[0]._ends.link(1, Priority.INFERENCE).queue) <= FLOW.window_bytes


# ── the shortcut in addition to redis ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def pair(url: str) -> Iterator[list[AutoTransport]]:
    with closing(stage(AutoTransport, url, 0, 1)) as one, closing(stage(AutoTransport, url, 1, 0)) as two:
        yield [one, two]


def talk_until_up(pair: list[AutoTransport]) -> int:
    """Send messages through redis until the helper has connected, and one by the short cut.  Return their number.

    The receiver that waited for the last one has asked the relay for more.
    """
    count, deadline, is_up = 0, time.monotonic() + 20, False
    while not is_up:
        assert time.monotonic() < deadline
        is_up = pair[0].path(1) is HopPath.TCP
        pair[0].send(1, HIDDEN, count.to_bytes(4, "little"), deadline_s=20)
        assert bytes(pair[1].receive(deadline_s=20).payload) == count.to_bytes(4, "little")
        count += 1
    return count


def test_a_link_moves_to_the_short_cut_and_keeps_its_order(pair: list[AutoTransport]) -> None:
    count = talk_until_up(pair)
    for i in range(count, count + 20):
        pair[0].send(1, HIDDEN, i.to_bytes(4, "little") * 200, deadline_s=20)
    for i in range(count, count + 20):
        assert bytes(pair[1].receive(deadline_s=20).payload) == i.to_bytes(4, "little") * 200
    link: Any = pair[0]._ends
    assert link.link(1, Priority.INFERENCE).queue  # they did not go through the relay server


def test_a_short_cut_that_is_lost_leaves_everything_to_redis(pair: list[AutoTransport]) -> None:
    count = talk_until_up(pair)
    pair[0].send(1, HIDDEN, count.to_bytes(4, "little") * 300, deadline_s=20)  # it is not read yet
    listener: Any = pair[1]._ends
    listener._acceptor.close()  # so no peer can connect to it again
    cut(pair[1])
    for i in range(count + 1, count + 12):
        pair[0].send(1, HIDDEN, i.to_bytes(4, "little") * 300, deadline_s=10)
    for i in range(count, count + 12):
        assert bytes(pair[1].receive(deadline_s=10).payload) == i.to_bytes(4, "little") * 300
    assert pair[0].path(1) is HopPath.RELAY


def test_what_came_by_the_short_cut_before_its_turn_is_acknowledged_when_its_turn_has_come(
    pair: list[AutoTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    number = talk_until_up(pair)
    link = pair[0]._links[1, Priority.INFERENCE]
    with link.lock:  # the helper may have been told twice to connect, and would put the link up again
        monkeypatch.setattr(pair[0], "_dial", lambda link, receiver: None)
        link.up, link.next_try_s = False, math.inf
    pair[0].send(1, HIDDEN, bytes([number]) * 900, deadline_s=20)
    settle(pair[1], Priority.INFERENCE)
    link.up = True
    inbox: Any = pair[1]._inbox
    redis_fd, redis_lane = next(
        (fd, lane)
        for fd, lane in inbox._lanes.items()
        if isinstance(lane, RedisLane) and lane.priority is Priority.INFERENCE
    )
    inbox.forget(redis_fd)  # the relay is slow
    count = FLOW.window_bytes // (900 + frames.HEADER_BYTES)
    for i in range(number + 1, number + 1 + count):
        pair[0].send(1, HIDDEN, bytes([i]) * 900, deadline_s=20)
    with pytest.raises(TimeoutError):
        pair[1].receive(deadline_s=0.1)
    inbox.watch(redis_fd, redis_lane)
    for i in range(number, number + 1 + count):
        assert bytes(pair[1].receive(deadline_s=20).payload) == bytes([i]) * 900
    with pytest.raises(TimeoutError):
        pair[1].receive(deadline_s=0.1)  # a further receive acknowledges
    pair[0].send(1, HIDDEN, bytes(900), deadline_s=20)  # the window has room for it
    assert bytes(pair[1].receive(deadline_s=20).payload) == bytes(900)


@pytest.mark.parametrize("by_shortcut", [True, False])
def test_a_message_that_was_cut_off_on_one_way_breaks_the_link_on_both(
    pair: list[AutoTransport], by_shortcut: bool
) -> None:
    talk_until_up(pair)
    link = pair[0]._links[1, Priority.INFERENCE]
    link.up = by_shortcut
    with pytest.raises(Unavailable, match="does not keep up"):  # the receiver does not read
        pair[0].send(1, HIDDEN, bytes(50 * FLOW.window_bytes if by_shortcut else 2 * FLOW.window_bytes), deadline_s=0.5)
    for way_now in (by_shortcut, not by_shortcut):
        link.up = way_now
        with pytest.raises(WorkerLost, match="a message was cut off"):
            pair[0].send(1, HIDDEN, b"another", deadline_s=20)


def test_a_broken_short_cut_that_is_given_up_leaves_the_link_broken(pair: list[AutoTransport]) -> None:
    talk_until_up(pair)
    link = pair[0]._links[1, Priority.INFERENCE]
    with pytest.raises(Unavailable, match="does not keep up"):
        pair[0].send(1, HIDDEN, bytes(50 * FLOW.window_bytes), deadline_s=0.5)
    with link.lock:
        pair[0]._surrender(link, 1)
    with pytest.raises(WorkerLost, match="a message was cut off"):
        pair[0].send(1, HIDDEN, b"another", deadline_s=20)


def test_what_a_given_up_short_cut_could_not_leave_to_redis_breaks_the_link(pair: list[AutoTransport]) -> None:
    count = talk_until_up(pair)
    link = pair[0]._links[1, Priority.INFERENCE]
    pair[0].send(1, HIDDEN, bytes([count]) * 900, deadline_s=20)
    link.sender.close()  # the redis transport takes no more messages
    with link.lock:
        pair[0]._surrender(link, 1)
    with pytest.raises(WorkerLost, match="broke"):
        pair[0].send(1, HIDDEN, b"the next", deadline_s=20)


def test_an_end_that_cannot_listen_keeps_to_redis(url: str) -> None:
    with (
        closing(stage(AutoTransport, url, 0, 1, host="192.0.2.1")) as bad,
        closing(stage(AutoTransport, url, 1, 0)) as good,
    ):
        assert "cannot listen on 192.0.2.1" in bad.no_shortcut
        for _ in range(3):
            bad.send(1, HIDDEN, b"x", deadline_s=20)
            good.receive(deadline_s=20)
            good.send(0, HIDDEN, b"y", deadline_s=20)
            assert bytes(bad.receive(deadline_s=20).payload) == b"y"
