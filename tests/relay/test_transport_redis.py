"""Properties of the Redis transport alone: the entries that the relay server holds, forged entries, and lost keys."""

from __future__ import annotations

import contextlib
import shutil
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import redis

from relay.protocol import frames
from relay.protocol.frames import HEADER_BYTES, MAX_PAYLOAD_BYTES, FrameHeader, FrameKind, Priority
from relay.protocol.messages import GroupCredential, GroupLink
from relay.state.credentials import drop_group
from relay.transports.base import Flow, Transport
from relay.transports.connect import connect
from relay.transports.quota import LinkQuota
from relay.transports.redis import RedisTransport
from relay.transports.redis_server import TTL_MS
from tests.conformance.transports import Worker, cut, settle
from tests.conftest import ValkeyServer
from tests.fetchd.harness import wait_until
from tests.relay.samples import forged
from thaw.errors import ProtocolError, Unavailable, WorkerLost
from thaw.ids import GroupId, random_hex_id
from thaw.plan import TransportKind

Make = Callable[..., RedisTransport]
GROUP = GroupId(random_hex_id())
HIDDEN = FrameHeader(FrameKind.HIDDEN_STATES, group_id=bytes.fromhex(GROUP))
KV = FrameHeader(FrameKind.KV, Priority.KV)
BULK = FrameHeader(FrameKind.BULK, Priority.BULK)
STREAM = f"thaw:relay:{GROUP}:0:1:0"
FLOW = Flow(chunk_bytes=1000, window_bytes=20_000, resume_s=2.0)
PATIENT = replace(FLOW, resume_s=20.0)
"""For a relay server that comes back, and may take seconds to start on a busy machine."""


@pytest.fixture
def make(valkey_url: str) -> Iterator[Make]:
    with contextlib.ExitStack() as stack:

        def build(stage: int, url: str = valkey_url, flow: Flow = FLOW) -> RedisTransport:
            return stack.enter_context(contextlib.closing(RedisTransport(url, GROUP, stage, (1 - stage,), flow=flow)))

        yield build


def passes(sender: Transport, receiver: Transport, *sizes: int) -> None:
    """Messages of inference of so many bytes arrive, each before the next one is sent."""
    for n_bytes in sizes:
        sender.send(1, HIDDEN, bytes(n_bytes), deadline_s=20)
        assert receiver.receive(deadline_s=20).payload.nbytes == n_bytes


def test_what_was_read_is_deleted_and_what_nobody_reads_expires(make: Make, client: redis.Redis) -> None:
    sender, receiver = make(0), make(1)
    passes(sender, receiver, *[1] * 16)  # the receiver acknowledges this many together
    sender.send(1, KV, b"y", deadline_s=20)
    assert receiver.receive(deadline_s=20).kind is FrameKind.KV  # a further receive acknowledges
    sender.send(1, HIDDEN, b"never read", deadline_s=20)
    settle(receiver, Priority.INFERENCE)
    assert client.xlen(STREAM) == 1
    for key in client.scan_iter(f"thaw:relay:{GROUP}:*:*:*"):
        assert 0 < client.pttl(key) <= TTL_MS
    for key in client.scan_iter("thaw:relay:*"):
        assert client.pttl(key) > 0
    drop_group(client, GROUP)
    assert list(client.scan_iter("thaw:relay:*")) == []


def age(client: redis.Redis, ms: int) -> None:
    """Make the relay server's keys ``ms`` older, as if nothing had happened for so long."""
    for key in list(client.scan_iter(f"thaw:relay:{GROUP}:*")):
        left_ms = client.pttl(key) - ms
        client.pexpire(key, left_ms) if left_ms > 0 else client.delete(key)


def test_a_quiet_group_does_not_forget_what_its_receiver_has_taken(
    make: Make, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.transports.redis_out.TOUCH_S", 0.0)
    sender, receiver = make(0), make(1)
    many_hours_ms = 20 * 3600 * 1000  # the second of these quiet times follows a mere sign of life
    quiet_ms = [*[[2 * TTL_MS] * 10] * 6, [many_hours_ms], [many_hours_ms]]
    for n_bytes, pauses_ms in zip((5000, 5000, 5000, 6000, 100, 6000, 14, 9000), quiet_ms, strict=True):
        for ms in pauses_ms:
            age(client, ms)
        passes(sender, receiver, n_bytes)


@pytest.mark.parametrize("n_bytes", [0, 1, 63, 64, 70, 100])
def test_a_truncated_frame_is_refused(make: Make, client: redis.Redis, n_bytes: int) -> None:
    whole = frames.encode(HIDDEN, bytes(40))
    receiver = make(1)
    client.xadd(STREAM, {"f": whole[:n_bytes]}, id="1-0")
    with pytest.raises(ProtocolError, match="not a frame|claims 40 bytes"):
        receiver.receive(deadline_s=20)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"f": b"\x80\x04pickle, not a frame" * 5}, "not a frame"),
        ({"f": frames.encode(HIDDEN, b"x"), "more": "fields"}, "another shape|not a frame"),
        ({"other": frames.encode(HIDDEN, b"x" * 700)}, "another shape"),
        ({"f": frames.encode(FrameHeader(FrameKind.KV), b"x")}, "another group or priority"),
        ({"f": frames.encode(FrameHeader(FrameKind.KV, Priority.KV, group_id=HIDDEN.group_id), b"x")}, "priority"),
        ({"f": frames.encode_chunk(HIDDEN, HIDDEN.group_id, 0, 0, 1, b"sound") + b"bytes"}, "failed its checksum"),
        ({"f": frames.encode_chunk(HIDDEN, HIDDEN.group_id, 5, 0, 1, b"early") + b"early"}, "message 5 chunk 0 came"),
    ],
    ids=["pickle", "fields", "field", "group", "priority", "damaged", "gap"],
)
def test_a_forged_frame_is_refused(
    make: Make, client: redis.Redis, fields: dict[str | bytes, bytes | str], message: str
) -> None:
    receiver = make(1)
    client.xadd(STREAM, fields, id="1-0")  # type: ignore[arg-type]
    for _ in range(2):  # also the second time, because nothing after the bad entry may be accepted
        with pytest.raises(ProtocolError, match=message):
            receiver.receive(deadline_s=20)


@pytest.mark.parametrize(("offset", "value"), [(40, 0xFFFFFFFF), (40, 2_000_000), (44, 0xFFFFFFFF), (44, 1 << 23)])
def test_a_header_that_claims_too_much_costs_no_memory(
    make: Make, client: redis.Redis, offset: int, value: int
) -> None:
    receiver = make(1)
    tracemalloc.start()
    try:
        client.xadd(STREAM, {"f": forged(frames.encode(HIDDEN, bytes(600)), offset, value)}, id="1-0")
        with pytest.raises(ProtocolError):
            receiver.receive(deadline_s=20)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_an_entry_above_the_limit_is_refused_before_it_is_read(make: Make, client: redis.Redis) -> None:
    receiver = make(1)
    client.xadd(STREAM, {"f": bytes(MAX_PAYLOAD_BYTES + 65)}, id="1-0")
    with pytest.raises(ProtocolError, match=r"an entry of 8388673 bytes"):
        receiver.receive(deadline_s=20)


def test_a_second_writer_on_ones_stream_is_noticed(make: Make, client: redis.Redis) -> None:
    sender = make(0)
    client.xadd(STREAM, {"f": b"x"}, id="99-0")
    with pytest.raises(ProtocolError, match="somebody else writes"):
        for _ in range(2):
            sender.send(1, HIDDEN, bytes(100_000)[:15_000], deadline_s=20)


def test_a_receiver_that_connects_anew_says_again_how_much_it_has_taken(make: Make, client: redis.Redis) -> None:
    """Its last report may have been lost with the connection, and a sender that is a window ahead waits for it."""
    sender, receiver = make(0), make(1)
    for _ in range(16):
        sender.send(1, HIDDEN, bytes(1000), deadline_s=20)
    for _ in range(16):
        receiver.receive(deadline_s=20)
    with pytest.raises(TimeoutError):
        receiver.receive(deadline_s=0.01)  # this asks for more, and so reports the taken entries
    wait_until(lambda: bool(client.exists(f"{STREAM}:credit")))
    client.delete(f"{STREAM}:credit")  # this is the same as a relay server that never got the report
    cut(receiver)
    receiving = Worker(lambda: receiver.receive(deadline_s=10))
    sender.send(1, HIDDEN, bytes(15_000), deadline_s=20)
    receiving.join()


def test_what_the_relay_has_confirmed_is_kept_no_longer(make: Make) -> None:
    sender, receiver = make(0), make(1)
    lane = sender._senders[Priority.INFERENCE]
    for n_bytes in (5, 5_000):
        passes(sender, receiver, *[n_bytes] * 20)
        lane.settle(5.0)
        assert (lane._kept_bytes, len(lane._unconfirmed)) == (0, 0)


def test_a_relay_that_restarts_with_its_memory_loses_and_doubles_nothing(make: Make, own_valkey: ValkeyServer) -> None:
    sender, receiver = (make(k, own_valkey.url, PATIENT) for k in (0, 1))
    count = 60
    arrived: list[bytes] = []

    def talk() -> None:
        for i in range(count):
            sender.send(1, HIDDEN, b"%d-" % i * 400, deadline_s=20)

    sending = Worker(talk)
    for i in range(count):
        arrived.append(bytes(receiver.receive(deadline_s=20).payload))
        if i in (10, 30):
            own_valkey.kill()
            own_valkey.start()
    sending.join()
    assert arrived == [b"%d-" % i * 400 for i in range(count)]


def test_a_relay_that_lost_its_memory_is_a_clear_error_at_both_ends(make: Make, own_valkey: ValkeyServer) -> None:
    sender, receiver = (make(k, own_valkey.url, PATIENT) for k in (0, 1))
    passes(sender, receiver, 1)
    own_valkey.kill()
    shutil.rmtree(own_valkey.directory / "appendonlydir")
    own_valkey.start()
    for call in (lambda: receiver.receive(deadline_s=20), lambda: sender.send(1, HIDDEN, bytes(20_000), deadline_s=20)):
        with pytest.raises(WorkerLost, match=r"the relay server has lost what group \w+ had sent"):
            call()


def test_a_relay_that_stays_away_ends_in_unavailable(make: Make, own_valkey: ValkeyServer) -> None:
    sender, receiver = make(0, own_valkey.url), make(1, own_valkey.url)
    passes(sender, receiver, 1)
    own_valkey.kill()
    with pytest.raises(Unavailable, match="the relay server does not answer"):
        receiver.receive(deadline_s=30)
    with pytest.raises(Unavailable, match="the relay server does not answer"):
        for _ in range(2):  # the first message is kept, because a later call may be able to send it
            sender.send(1, HIDDEN, b"x", deadline_s=0.3)


def test_a_full_relay_refuses_and_says_so(make: Make, own_valkey: ValkeyServer) -> None:
    flow = Flow(chunk_bytes=100_000, window_bytes=100 << 20)
    sender = make(0, own_valkey.url, flow)
    with redis.Redis.from_url(own_valkey.url) as client:
        client.config_set("maxmemory", "5mb")
    with pytest.raises(Unavailable, match="the relay server's memory is full"):
        for _ in range(100):
            sender.send(1, HIDDEN, bytes(1_000_000), deadline_s=20)
    # the error names the reason why the link broke, and not the message that was cut off
    with pytest.raises(WorkerLost, match="the link to stage 1 broke: the relay server's memory is full"):
        sender.send(1, HIDDEN, b"x", deadline_s=20)


def test_a_dead_group_at_its_quota_leaves_the_relay_room_for_others(own_valkey: ValkeyServer) -> None:
    quota = 4 << 20
    link = GroupLink(TransportKind.REDIS, own_valkey.url, GroupCredential("", ""))
    with redis.Redis.from_url(own_valkey.url) as client, contextlib.ExitStack() as stack:

        def stage(group_id: GroupId, k: int) -> Transport:
            return stack.enter_context(contextlib.closing(connect(link, group_id, k, 2, flow=Flow.of_group(2, quota))))

        before = client.info("memory")["used_memory"]
        dead = stage(GROUP, 0)
        for header in (HIDDEN, KV):
            with pytest.raises(Unavailable, match="stage 1 does not keep up"):
                while True:
                    dead.send(1, header, bytes(20_000), deadline_s=0.5)
        held = client.info("memory")["used_memory"] - before
        assert quota / 3 < held < quota  # about half of the quota, because one of two links is full
        client.config_set("maxmemory", before + 2 * quota)
        other = GroupId(random_hex_id())
        sender, receiver = stage(other, 0), stage(other, 1)
        passes(sender, receiver, *[20_000] * 200)


def sent_until_full(sender: RedisTransport, header: FrameHeader) -> int:
    """Send to stage 1 until it does not keep up.  Return the bytes that were sent, headers included."""
    n_bytes = 0
    with pytest.raises(Unavailable, match="stage 1 does not keep up"):
        while n_bytes < 1_000_000:
            sender.send(1, header, bytes(900), deadline_s=1)
            n_bytes += 900 + HEADER_BYTES
    return n_bytes


def test_a_priority_alone_has_its_whole_link_and_what_it_borrowed_from_kv_goes_back_as_it_is_read(make: Make) -> None:
    window = 10_000
    flow = Flow.of_group(2, 2 * 3 * window)
    sender, receiver = make(0, flow=flow), make(1, flow=flow)
    alone = sent_until_full(sender, HIDDEN)
    assert 0.9 * 3 * window < alone <= 3 * window
    n_borrowed = alone // (900 + HEADER_BYTES)
    sending = Worker(lambda: sender.send(1, KV, bytes(flow.at_once_bytes - HEADER_BYTES), deadline_s=30))
    kinds = [receiver.receive(deadline_s=20).kind for _ in range(n_borrowed + 1)]
    sending.join()
    assert kinds.count(FrameKind.HIDDEN_STATES) == n_borrowed
    acknowledge(receiver)
    sender.send(1, KV, bytes(flow.at_once_bytes - HEADER_BYTES), deadline_s=20)
    most = 2 * window  # its own part and that of bulk messages, but not that of KV
    assert most - flow.credit_bytes - 1000 < sent_until_full(sender, HIDDEN) <= most
    sender.send(1, KV, bytes(1000), deadline_s=20)


def acknowledge(receiver: RedisTransport) -> None:
    """Make the receiver report the entries that it has taken: it does so when it asks for more."""
    with pytest.raises(TimeoutError):
        receiver.receive(deadline_s=0)


def test_what_a_receiver_took_and_did_not_report_makes_no_message_wait(make: Make) -> None:
    sender, receiver = make(0), make(1)
    passes(sender, receiver, *[236] * 16, *[900] * 5)  # 16 are acknowledged by number; 5 have too few bytes for that
    acknowledge(receiver)
    sender.send(1, HIDDEN, bytes(FLOW.at_once_bytes - HEADER_BYTES), deadline_s=20)


def test_a_report_that_another_priority_reads_first_wakes_the_one_that_waits(
    make: Make, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads of a link's priorities share the receiver's reports, and any of them may read a report first."""
    sender, receiver = make(0), make(1)
    n_messages = sent_until_full(sender, HIDDEN) // (900 + HEADER_BYTES)
    take, refusals = LinkQuota.take, iter(range(3))

    def take_and_be_overtaken(quota: LinkQuota, priority: Priority, n_bytes: int) -> bool:
        if take(quota, priority, n_bytes):
            return True
        if next(refusals) == 1:  # now the sender is about to wait for a report
            for _ in range(n_messages):
                receiver.receive(deadline_s=20)
            acknowledge(receiver)
            quota.report(priority, int(client.xrevrange(f"{STREAM}:credit")[0][0].partition(b"-")[0]))
        return False

    monkeypatch.setattr(LinkQuota, "take", take_and_be_overtaken)
    began_s = time.monotonic()
    sender.send(1, HIDDEN, bytes(900), deadline_s=20)
    assert time.monotonic() - began_s < 15  # it used to wait until its deadline


def test_a_refusal_of_a_small_message_is_told_to_the_thread_that_waits_for_the_answer(
    make: Make, own_valkey: ValkeyServer
) -> None:
    sender = make(0, own_valkey.url)
    sender.send(1, HIDDEN, b"x", deadline_s=20)
    with redis.Redis.from_url(own_valkey.url) as client:
        client.config_set("maxmemory", "1")
    with pytest.raises(Unavailable, match="the relay server's memory is full"):
        sender.send(1, HIDDEN, b"x", deadline_s=20)  # this mostly does not wait for the answer
        sender.receive(deadline_s=2)


def test_a_lost_connection_is_not_forgotten_while_somebody_sends(make: Make) -> None:
    transport = make(0)
    transport.send(1, HIDDEN, b"x", deadline_s=20)
    sender = transport._senders[Priority.INFERENCE]
    with sender._lock:
        sender._drop()
        assert sender.revive(5.0) == pytest.approx(5.0, abs=0.1)  # it wants to be called again soon
