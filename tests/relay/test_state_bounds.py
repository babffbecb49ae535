"""Every key that a tenant can make grow has a limit in bytes, and a full state server recovers by itself.

docs/formats/state-server.md is the table of the limits.  The attacks here go through the platform's own clients, as fast
as they can, against a real state server.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import redis

from relay.protocol.messages import (
    ActionChanged,
    Command,
    DemandAdded,
    InstanceChanged,
    ModelInspected,
    Start,
    StartFailed,
    StreamWanted,
)
from relay.state import bounded_stream, bus, endings, keys, redis_link, starts
from relay.state.entities import Change, Entities
from relay.state.lease import SchedulerLease
from relay.state.pending import create_group
from relay.state.records import DELETED_KEPT, STARTS_KEPT, Ended, Records
from relay.state.recount import recount
from relay.state.registry import Registry
from relay.state.storage import Storage
from relay.state.streams import HandedOver, StreamHomes
from relay.state.unchecked import Unchecked
from tests.conftest import ValkeyServer
from tests.relay.samples import GROUP, GUEST, INSTANCE, MANY, MODEL, PLAN, function, pending, record, with_quotas
from tests.relay.test_bus import Inbox, inbox
from tests.scheduler.facts import FACTS
from thaw.entities import Trigger
from thaw.errors import ErrorInfo, ModelUnsupported, PlatformError, Unavailable
from thaw.host import HostReport
from thaw.ids import ActionName, ActivationId, CommandId, GatewayId, GroupId, HostId, InstanceId
from thaw.instance import InstanceState
from thaw.standing import ColdStart
from thaw.tracing.trace import Phase, TraceEvent

__all__ = ["inbox"]

PAGE = Path(__file__).parents[2] / "docs" / "formats" / "state-server.md"
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20}
LONG = "\U00020000" * 250
"""The longest part of a name: each letter has four bytes."""
OUTPUT = "\x01" * 70_000
"""Six bytes of JSON for each character."""
FAILED = ErrorInfo("InitFailed", OUTPUT, OUTPUT, OUTPUT, OUTPUT)
N_ACTIONS = 20
HOST = HostId("host-0")


@dataclass(frozen=True)
class Row:
    """A row of the page.  ``most_bytes`` is None for what a quota counts; ``each``: for each field of the key."""

    name: str
    pattern: re.Pattern[str]
    most_bytes: int | None
    each: bool


def rows() -> Iterator[Row]:
    for line in PAGE.read_text().splitlines():
        if not line.startswith("| `thaw:"):
            continue
        names, bound = line.split(" | ")[:2]
        for name in re.findall(r"`(thaw:[^`]*)`", names):
            pattern = re.compile(re.sub(r"[A-Z]{2,}", ".+", name), re.S)
            found = re.match(r"(\d+) (KiB|MiB)(?: an? (\w+))?", bound)
            most = None if found is None else int(found[1]) * UNITS[found[2]]
            if "THAW_RECONNECT_STREAM_BYTES" in bound:
                most = 4 << 20
            yield Row(name, pattern, most, found is not None and found[3] not in (None, "namespace"))


ROWS = tuple(rows())


def row_of(key: str) -> Row:
    """The row with the longest name that the key matches: ``thaw:events:bytes`` before ``thaw:events``."""
    found = [row for row in ROWS if row.pattern.fullmatch(key)]
    assert found, f"{PAGE.name} has no row for {key:.80}"
    return max(found, key=lambda row: len(row.name))


def of_operators(key: str) -> bool:
    words = PAGE.read_text().split("The other keys grow with operators' orders")[1].split("\n\n")[0]
    patterns = [re.sub(r"[A-Z]{2,}", ".+", name) for name in re.findall(r"`(thaw:[^`]*)`", words)]
    return any(re.fullmatch(pattern, key) for pattern in patterns)


def n_fields(client: redis.Redis, key: str) -> int:
    counts: dict[str, Any] = {"hash": client.hlen, "zset": client.zcard}
    kind = redis_link.text(client.type(key))
    return max(1, int(counts[kind](key))) if kind in counts else 1


def name_of(i: int) -> ActionName:
    return ActionName(f"guest/{LONG[:200]}/{i}{LONG[:200]}")


def deploy_and_delete(records: Records) -> None:
    for i in range(DELETED_KEPT + 100):
        records.put_action(replace(function("x"), name=name_of(i + 1_000)), last=None)
        records.delete_action(GUEST, name_of(i + 1_000))
    for i in range(N_ACTIONS):
        records.put_action(replace(function("x"), name=name_of(i)), last=None)


def start_and_fail(client: redis.Redis, registry: Registry) -> None:
    for i in range(600):
        action = name_of(i % N_ACTIONS)
        instance = replace(INSTANCE, instance_id=InstanceId(f"i{i}"), action=action, state=InstanceState.STARTING)
        registry.put_instance(instance)
        registry.put_instance(replace(instance, state=InstanceState.GONE, error=FAILED))
        starts.start_failed(
            client, StartFailed(action, tuple(ActivationId(f"{n:032x}") for n in range(50)), FAILED, GROUP)
        )
        starts.cold_started(client, action, ColdStart(i, 100))
    for i in range(20):
        running = replace(INSTANCE, instance_id=InstanceId(f"r{i}"), action=name_of(i), error=FAILED)
        registry.put_instance(running)
        registry.put_plan(replace(PLAN, group_id=GroupId(f"{i:032x}"), action=name_of(i), model=MODEL))


def ask_hosts(client: redis.Redis, registry: Registry) -> None:
    waiting = tuple(ActivationId(f"{n:032x}") for n in range(2_000))
    for i in range(400):
        body = Start(replace(PLAN, action=name_of(i)), 0, InstanceId("i"), waiting)
        bus.send_command(client, HOST, Command(CommandId(str(i)), 1, 2, body))
    for i in range(20):
        files = {f"{n:03d}{'f' * 180}": n for n in range(500)}
        registry.put_model(replace(FACTS, uri=f"s3://m/{i}{'u' * 2_000}", files=files))
        bus.publish(client, ModelInspected("s3://m/x", HOST, replace(FACTS, files=files), None))


def trace_starts(records: Records) -> None:
    long = TraceEvent(Phase.PLANNED_END, attrs={"why": OUTPUT[:1_000]})
    for i in range(STARTS_KEPT + 200):
        records.add_trace(name_of(0), f"ff{i:030x}", [long] * 4)


def run(client: redis.Redis, records: Records, n: int = 3_000) -> None:
    """202s that are accepted, started, and end."""
    for begin in range(0, n, 100):
        some = [f"{i:032x}" for i in range(begin, begin + 100)]
        entries = [records.accept(pending(one)) for one in some]
        for one in some:
            records.mark_started(ActivationId(one), "gateway")
        ended = [replace(record(one), action=name_of(0), binding=f"guest/{LONG[:200]}") for one in some]
        traced = (TraceEvent(Phase.RECEIVED), TraceEvent(Phase.FINISHED))
        records.end_all([Ended(e, traced, entry) for e, entry in zip(ended, entries, strict=True)])


def wait_and_stream(client: redis.Redis, registry: Registry) -> None:
    for i in range(100):
        one = ActivationId(f"{i:032x}")
        registry.add_demand(DemandAdded(one, name_of(i), GUEST, GatewayId("g"), 0, adapter="s3://m/" + "a" * 2_000))
        Unchecked(client).add(name_of(i % N_ACTIONS))
        homes = StreamHomes(client, client, GatewayId("g"))
        assert homes.note(one, 3_600)
        homes.refuse(StreamWanted(one, GatewayId("g"), GatewayId("h"), f"{i}"))
        assert homes.hand(StreamWanted(one, GatewayId("g"), GatewayId("h"), f"x{i}"), HandedOver((), None, 0, 0), 3_600)


def write_entities(client: redis.Redis) -> None:
    entities = Entities(client)
    for i in range(900):
        entities.swap(Change(None, Trigger(GUEST, f"{i}{LONG[:200]}", parameters={"x": "y" * 5_000})))


def test_whatever_a_tenant_does_each_key_has_its_row_and_is_no_longer_than_that_says(client: redis.Redis) -> None:
    registry = Registry(client)
    records, storage = with_quotas(client, records=1_000)
    deploy_and_delete(records)
    start_and_fail(client, registry)
    ask_hosts(client, registry)
    trace_starts(records)
    run(client, records)
    wait_and_stream(client, registry)
    write_entities(client)
    found: defaultdict[str, list[int]] = defaultdict(list)
    for raw in client.scan_iter(count=1_000):
        key = redis_link.text(raw)
        if of_operators(key):
            continue
        row, n_bytes = row_of(key), int(client.memory_usage(key, samples=0) or 0)  # type: ignore[no-untyped-call]
        found[row.name].append(n_bytes)
        if row.most_bytes is not None:
            most = row.most_bytes * (n_fields(client, key) if row.each else 1)
            assert n_bytes <= most, f"{row.name} has {n_bytes} bytes, and {most} are allowed"
    assert {row.name for row in ROWS} - found.keys() <= UNSEEN
    assert len(found["thaw:last-version:ACTION"]) == N_ACTIONS + DELETED_KEPT
    assert len(found["thaw:trace:ID"]) == 1_000 + STARTS_KEPT
    assert len(found["thaw:started:ID"]) == len(found["thaw:activation:ID"]) == 1_000
    has = sum(sum(found[name]) for name in OF_RECORDS) + sum(sorted(found["thaw:trace:ID"])[:1_000])
    assert has < 1.25 * storage.usage(GUEST).record_bytes


OF_RECORDS = (
    *("thaw:activation:ID", "thaw:started:ID", "thaw:written:NS", "thaw:activations:NS"),
    *("thaw:activations-of:NS/NAME", "thaw:pending"),
)
UNSEEN = {
    *("thaw:code:ID", "thaw:released-code:NS", "thaw:code-sizes:NS", "thaw:pools:NS"),
    *("thaw:packages:NS", "thaw:rules:NS", "thaw:history", "thaw:best"),
}
"""Rows of what this attack does not write: code is bounded by its quota, and by tests/relay/test_storage.py."""


def test_a_name_that_was_deleted_long_before_is_used_again_with_a_later_version(records: Records) -> None:
    records.put_action(replace(function("old"), version="0.0.7"), last=None)
    records.delete_action(GUEST, ActionName("guest/old"))
    assert records.last_version(ActionName("guest/new")) is None
    for i in range(DELETED_KEPT):
        records.put_action(function(f"other{i}"), last=None)
        records.delete_action(GUEST, ActionName(f"guest/other{i}"))
    assert records.last_version(ActionName("guest/other0")) == "0.0.1"
    assert [records.last_version(ActionName(f"guest/{name}")) for name in ("old", "new")] == ["0.0.7"] * 2
    assert records.last_version(ActionName("other/new")) is None


def test_an_action_that_is_there_keeps_its_version_however_many_others_are_deleted(records: Records) -> None:
    records.put_action(function("kept"), last=None)
    records.delete_action(GUEST, ActionName("guest/kept"))
    records.put_action(replace(function("kept"), version="0.0.2"), last="0.0.1")
    for i in range(DELETED_KEPT + 1):
        records.put_action(function(f"other{i}"), last=None)
        records.delete_action(GUEST, ActionName(f"guest/other{i}"))
    records.put_action(replace(function("kept"), version="0.0.3"), last="0.0.2")


def test_a_deleted_action_is_not_looked_at_any_more(client: redis.Redis, records: Records) -> None:
    records.put_action(function("x"), last=None)
    Unchecked(client).add(ActionName("guest/x"))
    records.delete_action(GUEST, ActionName("guest/x"))
    assert client.zcard(keys.UNCHECKED) == 0


def test_the_mark_of_a_run_goes_with_its_record(client: redis.Redis) -> None:
    records, storage = with_quotas(client, records=1)
    one, other = ActivationId("a" * 32), ActivationId("b" * 32)
    used = []
    for each in (one, other):
        entry = records.accept(pending(each))
        assert records.mark_started(each, "g")
        records.end(record(each), pending_entry=entry)
        used.append(storage.usage(GUEST).record_bytes)
    assert [client.exists(keys.started(each)) for each in (one, other)] == [0, 1]
    assert used[0] == used[1]


def test_the_output_of_a_failed_start_is_cut_where_it_enters_an_event() -> None:
    gone = replace(INSTANCE, state=InstanceState.GONE, error=FAILED)
    for message in (InstanceChanged(gone), StartFailed(INSTANCE.action, (), FAILED, GROUP)):
        assert len(bus.pack(message)) < 64 << 10
    short = ErrorInfo("InitFailed", "it did not load", "look", "Traceback\n", "hello\n")
    assert bus.unpack(bus.pack(StartFailed(INSTANCE.action, (), short, GROUP))).error == short
    ends = bus.bounded_error(replace(short, printed="x" * 30_000 + "the end", message="the begin" + "y" * 30_000))
    assert ends.printed.endswith("the end")
    assert ends.message.startswith("the begin")
    assert len(ends.printed) == bus.OUTPUT_BYTES


def test_facts_that_are_too_long_are_kept_without_parts_or_refused(registry: Registry) -> None:
    files = {f"{n:03d}{'f' * 180}": n for n in range(500)}
    assert registry.put_model(FACTS) == FACTS
    wide = replace(FACTS, architecture="a" * 200_000)
    assert registry.put_model(wide) == replace(wide, parts=None, architecture="a" * 200) == registry.model(wide.uri)
    with pytest.raises(ModelUnsupported, match="more than 131072 bytes"):
        registry.put_model(replace(FACTS, files={**files, **{"x" + name: 1 for name in files}}))


def fill(client: redis.Redis) -> None:
    """Let the server have twice as much as it may."""
    memory: Any = client.info("memory")
    client.config_set("maxmemory", memory["used_memory"] // 2)


def test_a_full_server_takes_what_keeps_a_platform_going_and_the_rest_is_a_503(own_valkey: ValkeyServer) -> None:
    with redis_link.connect(own_valkey.url) as client:
        registry, records = Registry(client), Records(client)
        records.put_action(replace(function("x"), name=INSTANCE.action), last=None)
        registry.put_instance(replace(INSTANCE, state=InstanceState.STARTING))
        client.set(keys.activation("a" * 32), b"a record")
        client.set("ballast", b"x" * 1_000_000)
        fill(client)
        for _ in range(2):
            registry.report_host(
                HostReport(HOST, "boot", "127.0.0.1:1", (), 2, 10**8, "none", "process", 0, 1), announce=True
            )
            registry.gateway_alive(GatewayId("g"))
            registry.put_instance(INSTANCE)
            registry.put_instance(replace(INSTANCE, state=InstanceState.GONE, error=FAILED))
            bus.publish(client, ActionChanged(INSTANCE.action))
            starts.cold_started(client, INSTANCE.action, ColdStart(1, 100))
            bus.send_command(client, HOST, Command(CommandId("1"), 1, 2, Start(PLAN, 0, InstanceId("i"))))
            assert registry.host_token("token") == "token"
            registry.put_plan(PLAN)
            records.add_trace(INSTANCE.action, GROUP, [TraceEvent(Phase.COMMAND)])
            assert records.mark_started(ActivationId("b" * 32), "g")
            create_group(client)
            recount(client)
            assert Storage(client, lambda _: MANY).usage(GUEST).actions == 1
            endings.tell(client, GUEST, [record("a" * 32)])
            Unchecked(client).add(INSTANCE.action)
        lease = SchedulerLease(client, "s")
        assert (lease.acquire(), lease.renew(), SchedulerLease(client, "t").acquire()) == (1, True, None)
        assert registry.live_host(HOST) is not None
        assert registry.is_gateway_alive(GatewayId("g"))
        demand = DemandAdded(ActivationId("a" * 32), INSTANCE.action, GUEST, GatewayId("g"), 0)
        for refused in (
            lambda: records.accept(pending("b" * 32)),
            lambda: records.put_action(function("y"), last=None),
            lambda: registry.add_demand(demand),
        ):
            with pytest.raises(Unavailable, match="takes no writes now"):
                refused()
        records.delete_action(GUEST, INSTANCE.action)


def test_a_server_that_old_events_have_filled_empties_itself(own_valkey: ValkeyServer, inbox: Inbox) -> None:
    """A version without limits of bytes wrote them."""
    with redis_link.connect(own_valkey.url) as client:
        for _ in range(100):
            client.xadd(keys.EVENTS, {"f": b"x" * 237_000})
        fill(client)
        with pytest.raises(redis.ResponseError, match="maxmemory"):
            client.set("x", b"x")
        bus.publish(client, ActionChanged(INSTANCE.action))
        client.set("x", b"x" * 1_000_000)
        assert int(client.memory_usage(keys.EVENTS, samples=0) or 0) < bus.EVENTS_BYTES  # type: ignore[no-untyped-call]


def test_a_reader_that_missed_events_begins_anew(own_valkey: ValkeyServer, inbox: Inbox) -> None:
    with redis_link.connect(own_valkey.url) as client:
        inbox.read_events(own_valkey.url)
        bus.publish(client, ActionChanged(ActionName("guest/a")))
        assert inbox.next() == ActionChanged(ActionName("guest/a"))
        with client.pipeline(transaction=True) as pipe:
            for name in ("guest/b", "guest/c"):
                bus.append(pipe, ActionChanged(ActionName(name)))
                pipe.xtrim(keys.EVENTS, maxlen=0 if name == "guest/b" else 1, approximate=False)
            pipe.execute()
        inbox.up.get(timeout=60)
        bus.publish(client, ActionChanged(ActionName("guest/d")))
        assert inbox.next() == ActionChanged(ActionName("guest/d"))


def test_events_of_a_version_without_limits_are_read_among_others(own_valkey: ValkeyServer, inbox: Inbox) -> None:
    with redis_link.connect(own_valkey.url) as client:
        inbox.read_events(own_valkey.url)
        names = [ActionName(f"guest/{i}") for i in range(4)]
        for i, name in enumerate(names):
            if i % 2:
                client.xadd(keys.EVENTS, {"f": bus.pack(ActionChanged(name))})
            else:
                bus.publish(client, ActionChanged(name))
        assert [inbox.next().action for _ in names] == names
        assert inbox.up.empty()


def test_a_stream_keeps_its_newest_entries_within_its_bytes(client: redis.Redis) -> None:
    for i in range(100):
        bounded_stream.append(client, "s", f"{i:1000d}".encode(), 1_000, 20_000)
    kept = [int(fields[b"f"]) for _, fields in client.xrange("s")]
    assert kept == list(range(100 - len(kept), 100))
    assert 9 <= len(kept) <= 20
    bounded_stream.append(client, "s", b"x" * 100_000, 1_000, 20_000)
    assert client.xlen("s") == 1, "one that is too long by itself"


@pytest.mark.parametrize(
    "error", ["MISCONF Errors writing to the AOF file: No space", "NOREPLICAS Not enough", "OOM no"]
)
def test_a_server_that_takes_no_writes_for_now_is_unavailable(error: str) -> None:
    for text in (error, f"Command # 1 (EVAL x) of pipeline caused error: {error}"):
        assert isinstance(redis_link.refusal("write", redis.ResponseError(text)), Unavailable)
    other = redis_link.refusal("write", redis.ResponseError(f"ERR wrong: {error}"))
    assert type(other) is PlatformError


def test_a_replica_is_unavailable_for_writes(own_valkey: ValkeyServer) -> None:
    with redis_link.connect(own_valkey.url) as client:
        client.replicaof("127.0.0.1", "1")
        records = Records(client, storage=Storage(client, lambda _: pytest.fail("no quota is asked for")))
        with pytest.raises(Unavailable, match="takes no writes now"):
            records.accept(pending("b" * 32), owner="g")
        with pytest.raises(Unavailable, match="takes no writes now"):
            bus.publish(client, ActionChanged(INSTANCE.action))


def test_the_endings_of_a_namespace_have_their_limit(client: redis.Redis) -> None:
    some = [replace(record(f"{i:032x}"), action=name_of(0), binding=f"guest/{LONG[:200]}") for i in range(1_000)]
    client.set(keys.activation("x"), "1")
    pipe = client.pipeline(transaction=False)
    for one in some:
        pipe.set(keys.activation(one.activation_id), "1")
    for _ in range(13):
        endings.tell(pipe, GUEST, some)
    pipe.execute()
    n_bytes = int(client.memory_usage(keys.endings(GUEST), samples=0) or 0)  # type: ignore[no-untyped-call]
    assert n_bytes <= row_of(keys.endings(GUEST)).most_bytes  # type: ignore[operator]
