"""One suite for every transport.  Here so far: redis, over a real server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import redis

from relay.frames import FLAG_TENSORS, FrameHeader, FrameKind, Priority
from relay.transports.base import Transport
from relay.transports.redis import TTL_MS, RedisTransport, drop_group
from thaw.errors import ProtocolError, Unavailable
from thaw.ids import GroupId, random_hex_id

Make = Callable[[int, tuple[int, ...]], Transport]
GROUP = GroupId(random_hex_id())
HIDDEN = FrameHeader(FrameKind.HIDDEN_STATES, Priority.INFERENCE, FLAG_TENSORS, stream_id=3, step=11)
KV = FrameHeader(FrameKind.KV, Priority.KV)
BULK = FrameHeader(FrameKind.BULK, Priority.BULK)


@pytest.fixture
def make(valkey_url: str) -> Iterator[Make]:
    made: list[Transport] = []

    def build(stage: int, peers: tuple[int, ...]) -> Transport:
        made.append(RedisTransport(valkey_url, GROUP, stage, peers, chunk_bytes=1000, window_bytes=20_000))
        return made[-1]

    yield build
    for transport in made:
        transport.close()


def test_a_message_arrives_whole_with_what_its_header_says(make: Make) -> None:
    sender, receiver = make(0, (1,)), make(1, (0,))
    payload = bytes(range(256)) * 30  # eight chunks
    sender.send(1, HIDDEN, payload, deadline_s=5)
    message = receiver.receive(deadline_s=5)
    assert bytes(message.payload) == payload
    assert (message.sender, message.kind, message.flags, message.stream_id, message.step) == (
        0,
        FrameKind.HIDDEN_STATES,
        1,
        3,
        11,
    )


def test_order_holds_within_a_priority(make: Make) -> None:
    sender, receiver = make(0, (1,)), make(1, (0,))
    for i in range(12):
        sender.send(1, HIDDEN, bytes([i]) * (i * 150), deadline_s=5)
    assert [len(receiver.receive(deadline_s=5).payload) for _ in range(12)] == [i * 150 for i in range(12)]


def test_inference_overtakes_kv_and_kv_overtakes_bulk(make: Make) -> None:
    sender, receiver = make(0, (1,)), make(1, (0,))
    for header in (BULK, KV, HIDDEN):
        sender.send(1, header, b"x", deadline_s=5)
    kinds = [receiver.receive(deadline_s=5).kind for _ in range(3)]
    assert kinds == [FrameKind.HIDDEN_STATES, FrameKind.KV, FrameKind.BULK]


def test_a_sender_a_window_ahead_waits_and_goes_on_when_the_receiver_reads(make: Make) -> None:
    sender, receiver = make(0, (1,)), make(1, (0,))
    sent = 0
    with pytest.raises(Unavailable, match="stage 1 does not keep up"):
        while sent < 100:
            sender.send(1, BULK, bytes(900), deadline_s=0.2)
            sent += 1
    assert sent == 20_000 // (900 + 64)
    sender.send(1, KV, b"another priority has its own window", deadline_s=1)
    waiting = threading.Thread(target=sender.send, args=(1, BULK, b"the next"), kwargs={"deadline_s": 10})
    waiting.start()
    received = [bytes(receiver.receive(deadline_s=5).payload) for _ in range(sent + 2)]
    waiting.join(10)
    assert received[0] == b"another priority has its own window"
    assert received[-1] == b"the next"


def test_an_empty_link_ends_in_a_timeout_not_in_a_hang(make: Make) -> None:
    with pytest.raises(TimeoutError, match="nothing came in 0.1 s"):
        make(1, (0,)).receive(deadline_s=0.1)


def test_several_senders_are_told_apart(make: Make) -> None:
    receiver = make(2, (0, 1))
    make(0, (2,)).send(2, HIDDEN, b"from 0", deadline_s=5)
    make(1, (2,)).send(2, HIDDEN, b"from 1", deadline_s=5)
    got = {m.sender: bytes(m.payload) for m in (receiver.receive(deadline_s=5) for _ in range(2))}
    assert got == {0: b"from 0", 1: b"from 1"}


def test_what_was_read_is_deleted_and_what_nobody_reads_expires(make: Make, valkey_url: str) -> None:
    sender, receiver = make(0, (1,)), make(1, (0,))
    sender.send(1, HIDDEN, b"x", deadline_s=5)
    receiver.receive(deadline_s=5)
    sender.send(1, KV, b"never read", deadline_s=5)
    with redis.Redis.from_url(valkey_url) as client:
        assert client.xlen(f"thaw:relay:{GROUP}:0:1:0") == 0
        for key in client.scan_iter("thaw:relay:*"):
            assert 0 < client.pttl(key) <= TTL_MS
        drop_group(client, GROUP)
        assert list(client.scan_iter("thaw:relay:*")) == []


def test_a_forged_frame_is_refused(make: Make, valkey_url: str) -> None:
    receiver = make(1, (0,))
    with redis.Redis.from_url(valkey_url) as client:
        client.xadd(f"thaw:relay:{GROUP}:0:1:0", {"f": b"\x80\x04pickle, not a frame" * 5})
    with pytest.raises(ProtocolError, match="not a frame"):
        receiver.receive(deadline_s=5)


def test_a_frame_of_another_group_is_refused(make: Make, valkey_url: str) -> None:
    receiver = make(1, (0,))
    other = RedisTransport(valkey_url, GroupId("0" * 32), 0, (1,))
    other.send(1, HIDDEN, b"x", deadline_s=5)
    other.close()
    with redis.Redis.from_url(valkey_url) as client:
        ((_, fields),) = client.xrange(f"thaw:relay:{'0' * 32}:0:1:0")
        client.xadd(f"thaw:relay:{GROUP}:0:1:0", fields)
    with pytest.raises(ProtocolError, match="another group"):
        receiver.receive(deadline_s=5)
