"""The storage that a namespace uses in a real state server, and its limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import redis

from relay.protocol.messages import DemandAdded
from relay.state import keys, redis_link
from relay.state.recount import recount
from relay.state.registry import Registry
from relay.state.storage import Storage
from tests.conftest import ValkeyServer
from tests.relay.samples import GUEST, MANY, function, pending, record, with_quotas
from thaw import wire
from thaw.activation import ActivationStatus
from thaw.errors import Forbidden, PlatformError, StorageFull, Throttled, TooLarge
from thaw.ids import ActionName, ActivationId, GatewayId, Namespace

OTHER = Namespace("other")
MIB = 1024 * 1024


def test_a_record_counts_until_all_of_its_hour_has_expired(client: redis.Redis) -> None:
    records, storage = with_quotas(client)
    assert storage.usage(GUEST).record_bytes == 0
    records.end(replace(record("a"), result={"x": "y" * 10_000}))
    records.end(record("a"))  # it has ended
    first = storage.usage(GUEST).record_bytes
    assert 10_000 < first < 12_000
    client.hset(keys.used(GUEST), "h100", 5_000)
    client.hincrby(keys.used(GUEST), "records", 5_000)
    assert storage.usage(GUEST).record_bytes == first
    assert storage.usage(OTHER).record_bytes == 0


def test_the_first_record_of_an_hour_subtracts_what_has_expired(client: redis.Redis) -> None:
    records, _ = with_quotas(client)
    client.hset(keys.used(GUEST), mapping={"records": 5_000, "h100": 5_000})
    records.end(record("a"))
    fields: Any = client.hgetall(keys.used(GUEST))
    assert b"h100" not in fields
    assert 0 < int(fields[b"records"]) < 5_000
    assert client.ttl(keys.used(GUEST)) == -1, "202s may be pending for longer than records are kept"


def test_a_202_counts_until_it_has_ended_whichever_way(client: redis.Redis) -> None:
    records, storage = with_quotas(client)
    entries = {name: records.accept(pending(name, payload="z" * 1_000)) for name in "abc"}
    assert storage.usage(GUEST).accepted == 3
    assert storage.usage(GUEST).record_bytes > 3_000
    for _ in range(2):  # a repeat, after an answer that was lost
        records.end(record("a"), pending_entry=entries["a"])
        records.end(record("b"), pending_entry=entries["b"])
    records.end(record("c"))
    records.end(record("c"), pending_entry=entries["c"])  # its gateway died in between
    assert storage.usage(GUEST).accepted == 0
    assert storage.usage(GUEST).record_bytes < 3_000


def test_a_202_that_could_not_be_promised_is_not_counted(valkey_url: str) -> None:
    class Unsynced(redis.Redis):
        def pipeline(self, *args: Any, **kwargs: Any) -> Any:
            pipe = super().pipeline(*args, **kwargs)
            execute = pipe.execute
            pipe.execute = lambda **kw: [*execute(**kw)[:-1], [0, 0]]  # type: ignore[method-assign]
            return pipe

    with Unsynced.from_url(valkey_url) as client:
        records, storage = with_quotas(client)
        with pytest.raises(PlatformError, match="did not sync"):
            records.accept(pending("a"))
        assert (storage.usage(GUEST).accepted, client.xlen(keys.PENDING)) == (0, 0)


def test_the_end_of_a_202_that_a_version_without_quotas_accepted_is_not_subtracted(client: redis.Redis) -> None:
    records, storage = with_quotas(client)
    entry: Any = client.xadd(keys.PENDING, {"p": wire.dumps(pending("a")), "id": "a", "o": ""})
    records.end(record("a"), pending_entry=entry)
    assert (storage.usage(GUEST).accepted, client.xlen(keys.PENDING)) == (0, 0)


def at_once(n: int, do: Callable[[int], object], refused: type[Exception]) -> tuple[int, list[str]]:
    """Make ``n`` calls at once. Return how many succeeded, and the messages of the others."""
    start = threading.Barrier(n)

    def one(i: int) -> str | None:
        start.wait(60)
        try:
            do(i)
        except refused as e:
            return str(e)
        return None

    with ThreadPoolExecutor(n) as pool:
        told = list(pool.map(one, range(n)))
    return told.count(None), [text for text in told if text is not None]


def test_gateways_together_accept_as_many_202s_as_a_namespace_may_have(client: redis.Redis) -> None:
    gateways = [with_quotas(client, accepted=5)[0] for _ in range(3)]
    n, told = at_once(12, lambda i: gateways[i % 3].accept(pending(f"a{i}")), Throttled)
    assert n == client.xlen(keys.PENDING) == 5
    assert set(told) == {
        "Too many concurrent requests in flight (count: 6, allowed: 5). THAW_QUOTA_ACCEPTED is the quota for all, "
        "thaw namespace quota guest --accepted N sets it for one."
    }
    gateways[0].accept(pending("b", OTHER))
    gateways[0].accept(pending("c"), owner="a blocking call that runs is not refused")


def test_gateways_together_keep_as_many_actions_as_a_namespace_may_have(client: redis.Redis) -> None:
    gateways = [with_quotas(client, actions=4)[0] for _ in range(3)]
    n, told = at_once(9, lambda i: gateways[i % 3].put_action(function(f"f{i}"), last=None), Forbidden)
    assert n == client.hlen(keys.actions(GUEST)) == 4
    assert all("(count: 5, allowed: 4). THAW_QUOTA_ACTIONS" in text for text in told)
    kept = gateways[0].actions(GUEST)[0]
    gateways[0].put_action(replace(kept, version="0.0.2"), last="0.0.1")
    gateways[0].delete_action(GUEST, kept.name)
    gateways[0].put_action(function("new"), last=None)


def test_code_has_a_quota_and_what_is_too_large_may_shrink(client: redis.Redis) -> None:
    records, storage = with_quotas(client, code_bytes=10_000)
    records.put_action(function("a", 6_000), last=None)
    with pytest.raises(TooLarge, match=r"larger than allowed: \d+ > 10000 bytes. THAW_QUOTA_CODE_BYTES"):
        records.put_action(function("b", 6_000), last=None)
    assert 6_000 < storage.usage(GUEST).code_bytes < 10_000
    less, _ = with_quotas(client, code_bytes=1_000)
    less.put_action(replace(function("a", 5_000), version="0.0.2"), last="0.0.1")


def test_a_long_record_without_room_is_kept_without_its_result(client: redis.Redis) -> None:
    records, storage = with_quotas(client, record_bytes=20_000)
    long = replace(record("a"), result={"x": "y" * 22_000}, logs=("line",))
    records.end(long)
    sentence = "The result was not kept: the namespace has no room for it. thaw namespace quota shows what it has."
    last = records.activation(long.activation_id)
    assert last is not None
    assert last.status is ActivationStatus.INTERNAL_ERROR, "nobody takes the sentence for the result"
    assert last.result == {"error": sentence}
    failed = replace(long, activation_id=ActivationId("f"), status=ActivationStatus.APPLICATION_ERROR)
    records.end(failed)
    last = records.activation(failed.activation_id)
    assert last is not None
    assert last.status is ActivationStatus.APPLICATION_ERROR
    records.end(record("d"))  # a short one is kept as it is
    assert records.activation(ActivationId("d")) == record("d")
    assert storage.usage(GUEST).record_bytes < 20_000


def test_an_invocation_is_refused_where_results_that_wait_to_be_written_take_all_room(client: redis.Redis) -> None:
    records, storage = with_quotas(client, record_bytes=4_000)
    entry = records.accept(pending("a"))
    storage.usage(GUEST)
    storage.expect(GUEST, 3_000)
    storage.check(GUEST)
    storage.expect(GUEST, 500)
    with pytest.raises(StorageFull, match=r"no room for more records: .* have 4\d+ of 4000 bytes.* THAW_QUOTA_RECORD"):
        storage.check(GUEST)
    storage.check(OTHER)
    records.end(record("a"), pending_entry=entry)
    storage.check(GUEST)


def test_a_namespace_without_room_is_asked_for_anew_once_a_second(client: redis.Redis) -> None:
    now = [0.0]
    storage = Storage(client, lambda _: replace(MANY, record_bytes=1_000), lambda: now[0])
    client.hset(keys.used(GUEST), mapping={"records": 5_000, "h100": 5_000})  # it expires at the first question
    storage.learn(GUEST, 5_000, 5_000)
    storage.check(GUEST)
    storage.learn(GUEST, 5_000, 5_000)
    with pytest.raises(StorageFull):
        storage.check(GUEST)
    now[0] = 1.0
    storage.check(GUEST)


def test_a_namespace_gets_no_more_than_is_free_of_the_servers_memory(own_valkey: ValkeyServer) -> None:
    with redis_link.connect(own_valkey.url) as client:
        client.config_set("maxmemory", "40mb")
        records, storage = with_quotas(client)
        storage.look()
        result = {"x": "y" * 900_000}
        for namespace in (GUEST, OTHER):
            for i in range(30):
                records.end(replace(record(f"{namespace}{i}", namespace=namespace), result=result))
        whole = {
            n: sum(row is not None and row.result == result for row in records.activations(n, limit=100).whole())
            for n in (GUEST, OTHER)
        }
        memory: Any = client.info("memory")
        assert memory["used_memory"] < 0.9 * 40 * MIB
        assert 10 <= whole[GUEST] <= 20, "alone it gets half"
        assert whole[OTHER] >= 4, "the next one gets half of the rest"
        with pytest.raises(StorageFull, match="The state server has no room"):
            records.accept(pending("x"))
        with pytest.raises(StorageFull, match="maxmemory"):
            records.put_action(function("large", 30_000_000), last=None)


def test_logs_go_before_a_result_does(client: redis.Redis) -> None:
    records, _ = with_quotas(client, record_bytes=20_000)
    long = replace(record("a"), result={"x": "y" * 8_000}, logs=("z" * 15_000,))
    assert records.end(long)
    found = records.activation(ActivationId("a"))
    assert found is not None
    assert (found.result, found.status) == (long.result, long.status)
    assert found.logs == ("The logs were not kept: the namespace has no room for them.",)


def of_a_server(storage: Storage, free: int) -> None:
    """Let the state server have ``free`` bytes left of its bound, which is 900 MiB: nine tenths of its memory."""
    storage.learn_memory({"maxmemory": 1_000 * MIB, "used_memory": 900 * MIB - free})


def test_the_result_of_a_202_is_kept_though_others_have_taken_their_shares(client: redis.Redis) -> None:
    records, storage = with_quotas(client)
    records.put_action(function("large", 1_000_000), last=None)
    entry = records.accept(pending("a"))
    entry_of_none = records.accept(pending("b"))
    result = {"x": "y" * 100_000}
    of_a_server(storage, free=200_000)
    client.hset(keys.used(GUEST), "records", 200 * MIB)
    for name, pending_entry in (("a", entry), ("c", None)):
        records.end(replace(record(name), result=result), pending_entry=pending_entry)
    of_a_server(storage, free=0)
    records.end(replace(record("b"), result=result), pending_entry=entry_of_none)
    found = [records.activation(ActivationId(name)) for name in "acb"]
    assert [row is not None and row.result == result for row in found] == [True, False, False]
    assert client.xlen(keys.PENDING) == 0


def test_greed_of_others_ends_no_call_whose_answer_goes_to_its_client(client: redis.Redis) -> None:
    _, storage = with_quotas(client)
    storage.look = lambda: None  # type: ignore[method-assign]
    for free, used, is_refused in ((60, 300, False), (50, 300, True), (50, 100, False), (0, 100, True)):
        client.hset(keys.used(GUEST), "records", used * MIB)
        of_a_server(storage, free * MIB)
        assert storage.usage(GUEST).record_bytes == used * MIB
        with pytest.raises(StorageFull, match="maxmemory") if is_refused else nullcontext():
            storage.check(GUEST)


def test_code_and_records_have_one_share_of_what_is_free(client: redis.Redis) -> None:
    records, storage = with_quotas(client)
    records.put_action(function("f", 1_000), last=None)
    of_a_server(storage, 300 * MIB)
    client.hset(keys.used(GUEST), mapping={"records": 200 * MIB, "code": 101 * MIB})
    with pytest.raises(StorageFull):
        records.accept(pending("a"))
    assert 1_000 < storage.usage(GUEST).code_bytes < 2_000  # and notes it
    records.accept(pending("a"))
    client.hset(keys.used(GUEST), "records", 300 * MIB)
    with pytest.raises(StorageFull):
        records.put_action(function("g", 1_000), last=None)
    records.delete_action(GUEST, ActionName("guest/f"))
    assert client.hget(keys.used(GUEST), "code") == b"0"


def test_the_end_of_a_202_that_is_not_counted_takes_nothing_from_others(client: redis.Redis) -> None:
    records, storage = with_quotas(client)
    entry = records.accept(pending("a"))
    client.delete(keys.used(GUEST))
    records.end(record("a"), pending_entry=entry)
    assert storage.usage(GUEST).accepted == 0
    assert client.hget(keys.used(GUEST), "accepted_bytes") == b"0"


def test_waiting_requests_are_counted_once_and_given_back_once(client: redis.Redis, registry: Registry) -> None:
    ours, theirs = GatewayId("ours"), GatewayId("theirs")
    registry, name = registry, ActionName("guest/f")
    demand = DemandAdded(ActivationId("a"), name, GUEST, ours, 1)
    for _ in range(2):  # told again
        registry.add_demand(demand)
    registry.add_demand(replace(demand, activation_id=ActivationId("b")))
    registry.add_demand(DemandAdded(ActivationId("c"), ActionName("other/f"), OTHER, theirs, 1))
    assert (registry.n_held(GUEST), registry.n_held(OTHER)) == (2, 1)
    registry.drop_demand(demand.activation_id, name, theirs)  # it waits with ours
    assert registry.n_held(GUEST) == 2
    for _ in range(2):
        registry.drop_demand(demand.activation_id, name, ours)
    assert registry.n_held(GUEST) == 1
    registry.drop_demand(ActivationId("b"), name, ours)
    assert client.hkeys(keys.HELD) == [b"other"]


def test_a_202_whose_demand_is_announced_ahead_does_not_count_as_waiting_until_it_waits(registry: Registry) -> None:
    registry, name, ours = registry, ActionName("guest/f"), GatewayId("ours")
    waits = DemandAdded(ActivationId("a"), name, GUEST, ours, 1)
    ahead = replace(waits, ahead=True)
    counts = []
    for demand in (ahead, waits, ahead, ahead, waits, waits):
        registry.add_demand(demand)
        counts.append(registry.n_held(GUEST))
    assert counts == [0, 1, 0, 0, 1, 1]
    registry.add_demand(replace(ahead, activation_id=ActivationId("b")))
    registry.drop_demand(ActivationId("b"), name, ours)
    assert registry.n_held(GUEST) == 1


def test_counts_that_versions_without_quotas_left_wrong_are_put_right(client: redis.Redis, registry: Registry) -> None:
    records, storage = with_quotas(client)
    kept = records.accept(pending("a", payload="z" * 1_000))
    counted = storage.usage(GUEST)
    records.accept(pending("x", OTHER))
    for name in "bcd":
        entry = records.accept(pending(name, payload="z" * 1_000))
        client.xdel(keys.PENDING, entry)  # as a gateway without quotas ends it
    client.xadd(keys.PENDING, {"p": wire.dumps(pending("e")), "id": "e", "o": ""})
    client.hset(keys.used("gone"), mapping={"accepted": 7, "accepted_bytes": 7_000})
    for i in range(5):
        demand = DemandAdded(ActivationId(f"{i}"), ActionName("guest/f"), GUEST, GatewayId("g"), 1, ahead=i == 4)
        if i == 3:
            client.hset(keys.DEMAND, demand.activation_id, wire.dumps(demand))  # added by one without quotas
        else:
            registry.add_demand(demand)
    client.hdel(keys.DEMAND, "0", "1")  # dropped by one
    client.hset(keys.HELD, "gone", 3)
    recount(client)
    assert storage.usage(GUEST) == replace(counted, held=2)
    assert storage.usage(OTHER).accepted == 1
    assert storage.usage(Namespace("gone")).accepted == 0
    assert client.hgetall(keys.HELD) == {b"guest": b"2"}
    records.end(record("a"), pending_entry=kept)
    assert storage.usage(GUEST).accepted == 0
