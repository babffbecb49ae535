"""Records are found by time and by name, and the oldest give way to newer ones, in a real state server."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import pytest
import redis

from relay.state import keys
from relay.state.records import Records
from relay.state.storage import Storage
from tests.relay.samples import GROUP, GUEST, MANY, of, pending, record, starts, with_quotas, write
from thaw.errors import StorageFull
from thaw.ids import ActionName, ActivationId, Namespace
from thaw.quotas import OwnQuotas
from thaw.tracing.trace import Phase, TraceEvent

DAY_S = 24 * 3600
CHAT = ActionName("guest/chat")


def test_a_record_is_listed_by_its_actions_name_however_many_others_are_newer(records: Records) -> None:
    write(records, of(0, "guest/rare"), *(of(i) for i in range(1, 2_500)))
    for name in ("rare", "guest/rare"):
        assert starts(records.activations(GUEST, limit=10, name=name).whole()) == [0]
        assert records.count_activations(GUEST, name=name) == 1
    assert records.count_activations(GUEST, name="f") == 2_499
    assert starts(records.activations(GUEST, limit=2, skip=2_497, name="f").whole()) == [2, 1]
    assert records.activations(GUEST, limit=10, name="other").whole() == []
    assert records.activations(Namespace("other"), limit=10, name="rare").whole() == []


@pytest.mark.parametrize(
    ("action", "binding", "names"),
    [
        ("guest/f", "", {"f", "guest/f"}),
        ("guest/tools/act", "", {"tools/act", "guest/tools/act"}),
        ("guest/tools/act", "guest/mine", {"tools/act", "guest/tools/act", "mine/act", "guest/mine/act"}),
        ("other/tools/act", "", {"tools/act", "other/tools/act"}),
        ("other/tools/act", "guest/mine", {"tools/act", "other/tools/act", "mine/act", "guest/mine/act"}),
    ],
)
def test_a_record_is_listed_by_the_names_of_its_action_and_its_binding(
    records: Records, action: str, binding: str, names: set[str]
) -> None:
    write(records, of(1, action, binding))
    asked = {"f", "act", "tools/act", "mine/act", "guest/f", "guest/tools/act", "guest/mine/act", "other/tools/act"}
    found = {name for name in asked if records.activations(GUEST, limit=9, name=name).whole()}
    # "guest/tools/act" is "tools/act" of the namespace that is asked for, so it shows another one's tools, too
    assert found - {"guest/tools/act"} == names - {"guest/tools/act"}
    assert starts(records.activations(GUEST, limit=9).whole()) == [1]


def test_a_page_is_the_part_of_the_list_that_was_asked_for(records: Records) -> None:
    records, chance = records, random.Random(16)
    write(records, *(of(i - i % 3, "guest/f" if i % 2 else "guest/g") for i in range(0, 40, 3)))
    for _ in range(200):
        name = chance.choice(["", "f", "g"])
        since, upto = (chance.choice([None, 990 + chance.randrange(60)]) for _ in range(2))
        skip, limit = chance.randrange(20), 1 + chance.randrange(20)
        whole = [i for i in range(39, -1, -3) if name in ("", "f" if i % 2 else "g")]
        inside = [i for i in whole if (since or 0) <= i + 1_000 <= (upto or 9_999)]
        page = records.activations(GUEST, limit=limit, skip=skip, since_ms=since, upto_ms=upto, name=name).whole()
        assert starts(page) == inside[skip : skip + limit]
        assert records.count_activations(GUEST, since_ms=since, upto_ms=upto, name=name) == len(inside)


def test_beyond_its_number_a_namespaces_oldest_record_gives_way_everywhere(client: redis.Redis) -> None:
    records, storage = with_quotas(client, records=3)
    write(records, *(of(i, "guest/f" if i % 2 else "guest/g") for i in range(3)))
    full = storage.usage(GUEST)
    assert full.records == 3
    for i in range(3, 9):
        write(records, of(i, "guest/f" if i % 2 else "guest/g"))
    assert starts(records.activations(GUEST, limit=9).whole()) == [8, 7, 6]
    assert starts(records.activations(GUEST, limit=9, name="f").whole()) == [7]
    assert starts(records.activations(GUEST, limit=9, name="g").whole()) == [8, 6]
    assert storage.usage(GUEST) == full, "what gave way counts no more"
    gone = ActivationId(f"{5:032x}")
    assert records.activation(gone) is None
    assert records.trace(gone) == []
    write(records, of(0))
    assert starts(records.activations(GUEST, limit=9).whole()) == [8, 7, 0], (
        "the oldest is the one that was written first"
    )


def test_a_smaller_number_takes_records_away_a_few_with_each_write(client: redis.Redis) -> None:
    write(with_quotas(client)[0], *(of(i) for i in range(300)))
    records, _ = with_quotas(client, records=10)
    counts = []
    for i in range(300, 304):
        write(records, of(i))
        counts.append(records.count_activations(GUEST))
    assert counts == [200, 100, 10, 10]
    assert records.count_activations(GUEST, name="f") == 10


def test_a_record_is_kept_for_the_namespaces_seconds_and_so_are_its_trace_and_places(client: redis.Redis) -> None:
    records, storage = with_quotas(client, record_age_s=7_200)
    write(records, of(1))
    names = [keys.activation(of(1).activation_id), keys.trace(of(1).activation_id), keys.activations(GUEST)]
    for name in (*names, keys.activations_of(GUEST, "f")):
        assert 7_100 < client.ttl(name) <= 7_200, name
    fields: Any = client.hgetall(keys.used(GUEST))
    (hour,) = (int(name[1:]) for name in fields if name.startswith(b"h"))
    seconds, _ = client.time()
    assert seconds // 3600 + 2 - 168 - hour in (0, 1), "its bytes count until then"
    assert storage.usage(GUEST).record_bytes > 0
    assert storage.usage(GUEST).records == 1


def test_names_lose_the_records_that_have_expired(client: redis.Redis) -> None:
    records, _ = with_quotas(client, record_age_s=500)
    write(records, of(1, "guest/old"), of(2, "guest/f"))
    client.delete(keys.activation(of(1).activation_id))
    write(records, of(500_002))
    assert records.count_activations(GUEST, name="old") == 0
    assert records.count_activations(GUEST, name="f") == 2
    assert starts(records.activations(GUEST, limit=9).whole()) == [500_002, 2]


def test_long_records_are_read_few_at_a_time(client: redis.Redis, records: Records) -> None:
    long = [replace(of(i), result={"x": "y" * 600_000}) for i in range(3)]
    write(records, *long, of(3), of(4), replace(of(5), result={"x": "y" * 2_000_000}))
    client.delete(keys.activation(of(3).activation_id))
    parts = records.activations(GUEST, limit=9)
    assert [starts(part) for part in parts] == [[5], [4, 2], [1], [0]]
    assert records.caused_by(ActivationId("none"), GUEST, 0) == []


def now_ms() -> int:
    return round(time.time() * 1000)


def let_pass(client: redis.Redis, seconds: int) -> None:
    """Move the times of the records so many seconds into the past."""
    rows: Any = client.zrange(keys.written(GUEST), 0, -1, withscores=True)
    client.zadd(keys.written(GUEST), {member: score - seconds * 1e6 for member, score in rows})


def test_the_result_of_a_202_that_ran_for_long_is_there_however_new_the_others_are(client: redis.Redis) -> None:
    records, _ = with_quotas(client, records=5)
    write(records, *(of(i, start_ms=10**6 + i) for i in range(5)))
    slow = of(9, "guest/slow", start_ms=1)
    entry = records.accept(pending(slow.activation_id))
    assert records.end(slow, pending_entry=entry)
    assert records.activation(slow.activation_id) == slow
    write(records, *(of(i, start_ms=10**6 + i) for i in range(10, 14)))
    assert records.activation(slow.activation_id) == slow, "four are newer"
    write(records, of(14, start_ms=10**6))
    assert records.activation(slow.activation_id) is None


def test_what_is_written_together_stays_until_the_next_write(client: redis.Redis) -> None:
    records, _ = with_quotas(client, records=3, record_bytes=1)
    write(records, *(of(i) for i in range(10)))
    assert len(records.activations(GUEST, limit=99).whole()) == 10
    write(records, of(10))
    assert records.activations(GUEST, limit=99).whole() == [of(10)]


def test_beyond_its_bytes_a_namespaces_oldest_records_give_way_and_it_is_not_refused(client: redis.Redis) -> None:
    records, storage = with_quotas(client, record_bytes=50_000)
    for i in range(150):
        storage.check(GUEST)
        write(records, of(i))
    assert 40_000 < storage.usage(GUEST).record_bytes <= 50_000
    found = records.activations(GUEST, limit=999).whole()
    assert 30 < len(found) < 100
    assert found == [of(149 - i) for i in range(len(found))]
    records.accept(pending("a"))


def test_a_long_record_takes_the_place_of_as_many_older_ones_as_it_needs(client: redis.Redis) -> None:
    records, storage = with_quotas(client, record_bytes=200_000)
    write(records, *(of(i) for i in range(180)))
    long = [replace(of(i), result={"x": "y" * 150_000}) for i in (200, 201)]
    for one in long:
        write(records, one)
        assert records.activation(one.activation_id) == one
    assert records.activation(long[0].activation_id) is None
    assert storage.usage(GUEST).record_bytes <= 200_000


def test_202s_that_have_not_ended_take_at_most_half_of_a_namespaces_bytes(client: redis.Redis) -> None:
    records, _ = with_quotas(client, record_bytes=20_000)
    write(records, *(of(i) for i in range(30)))
    entry = records.accept(pending("a", payload="z" * 5_000))
    with pytest.raises(StorageFull, match=r"have \d+ of 10000 bytes.*when some of them have ended.*THAW_QUOTA_RECORD"):
        records.accept(pending("b", payload="z" * 5_000))
    records.end(record("a"), pending_entry=entry)
    records.accept(pending("b", payload="z" * 5_000))


def test_a_smaller_quota_makes_room_for_a_namespace_that_the_servers_memory_refused(client: redis.Redis) -> None:
    now_s, own = [0.0], [OwnQuotas()]
    storage = Storage(client, lambda _: own[0].over(MANY), lambda: now_s[0])
    write(Records(client, storage=storage), *(of(i) for i in range(300)))
    storage.look = lambda: None  # type: ignore[method-assign]
    storage.learn_memory({"maxmemory": 100_000, "used_memory": 89_000})
    with pytest.raises(StorageFull, match="are free for all.*thaw namespace quota"):
        storage.check(GUEST)
    own[0] = OwnQuotas(records=3)
    now_s[0] = 1.0
    storage.check(GUEST)
    assert storage.usage(GUEST).records == 3


def test_records_that_are_older_than_a_smaller_age_are_taken_away(client: redis.Redis) -> None:
    records, storage = with_quotas(client, record_age_s=3_600)
    write(records, *(of(i, "guest/old") for i in range(20)))
    let_pass(client, 100)
    records, storage = with_quotas(client, record_age_s=60)
    write(records, of(50))
    assert records.activations(GUEST, limit=99).whole() == [of(50)]
    assert records.count_activations(GUEST, name="old") == 0
    assert records.activation(of(1).activation_id) is None
    assert storage.usage(GUEST).record_bytes < 2_000


def test_a_record_is_listed_as_long_as_it_is_kept_however_early_it_began(client: redis.Redis) -> None:
    records, _ = with_quotas(client, record_age_s=60)
    write(records, of(1, "guest/slow", start_ms=now_ms() - 120_000), of(2, start_ms=now_ms()))
    assert len(records.activations(GUEST, limit=9).whole()) == 2
    assert len(records.activations(GUEST, limit=9, name="slow").whole()) == 1


def test_indexes_lose_what_has_expired_also_where_another_version_took_it_out_of_one(client: redis.Redis) -> None:
    records, _ = with_quotas(client)
    write(records, *(of(i) for i in range(10)))
    client.zremrangebyscore(keys.activations(GUEST), "-inf", 1_004)
    client.delete(keys.written(GUEST), *(keys.activation(of(i).activation_id) for i in range(10)))
    for i in range(20, 25):
        write(records, of(i, start_ms=now_ms()))
    assert records.count_activations(GUEST) == 5
    assert records.count_activations(GUEST, name="f") == 5


def test_what_has_expired_before_others_that_are_kept_for_longer_is_in_no_list(client: redis.Redis) -> None:
    write(with_quotas(client, record_age_s=60)[0], of(1), of(2))
    client.delete(keys.activation(of(1).activation_id), keys.activation(of(2).activation_id))
    records, _ = with_quotas(client, record_age_s=DAY_S)
    write(records, of(3))
    assert records.count_activations(GUEST) == records.count_activations(GUEST, name="f") == 1


def test_no_index_expires_before_a_record_that_is_in_it(client: redis.Redis) -> None:
    write(with_quotas(client, record_age_s=7_200)[0], of(1))
    write(with_quotas(client, record_age_s=5)[0], of(2))
    for name in (keys.activations(GUEST), keys.activations_of(GUEST, "f"), keys.written(GUEST)):
        assert client.ttl(name) > 7_000, name


def test_versions_before_lists_by_name_and_this_one_list_one_anothers_records(client: redis.Redis) -> None:
    records, _ = with_quotas(client)
    write(records, of(1, "guest/tools/act"))
    members: Any = client.zrange(keys.activations(GUEST), 0, -1)
    assert [m.decode() for m in members] == [of(1).activation_id]
    client.zadd(keys.activations(GUEST), {of(0).activation_id: 999})  # as they write it; it has expired since
    write(records, of(2))
    assert records.count_activations(GUEST) == 2


def test_the_trace_of_a_records_start_is_kept_as_long_as_the_record(client: redis.Redis) -> None:
    records, _ = with_quotas(client, record_age_s=30 * DAY_S)
    records.add_trace(CHAT, GROUP, [TraceEvent(Phase.RECEIVED)])
    assert client.ttl(keys.trace(GROUP)) <= 7 * DAY_S
    write(records, replace(of(1), group_id=GROUP))
    assert client.ttl(keys.trace(GROUP)) > 29 * DAY_S
    records.add_trace(CHAT, GROUP, [TraceEvent(Phase.FINISHED)])
    assert client.ttl(keys.trace(GROUP)) > 29 * DAY_S
    write(with_quotas(client, record_age_s=60)[0], replace(of(2), group_id=GROUP))
    assert client.ttl(keys.trace(GROUP)) > 29 * DAY_S


def test_what_others_add_to_a_trace_is_taken_from_no_count(client: redis.Redis) -> None:
    records, storage = with_quotas(client, records=10)
    write(records, *(of(i) for i in range(10)))
    full = storage.usage(GUEST)
    for i in range(10):
        records.add_trace(CHAT, of(i).activation_id, [TraceEvent(Phase.RECEIVED)] * 10)
    for i in range(10, 15):
        write(records, of(i))
    assert storage.usage(GUEST) == full


def test_records_stand_in_the_order_in_which_they_were_written_whatever_the_clock_does(client: redis.Redis) -> None:
    records, _ = with_quotas(client)
    for i in range(3):
        write(records, of(i), of(10 + i))
        if i == 1:
            let_pass(client, -3_600)
    rows: Any = client.zrange(keys.written(GUEST), 0, -1, withscores=True)
    assert [int(member[:32], 16) for member, _ in rows] == [0, 10, 1, 11, 2, 12]
    scores = [score for _, score in rows]
    assert scores == sorted(set(scores))


def test_a_package_with_its_namespaces_name_is_found_by_it(client: redis.Redis) -> None:
    records, _ = with_quotas(client)
    write(records, of(1, "guest/x"))
    assert records.activations(GUEST, limit=9, name="guest/x").whole() == [of(1, "guest/x")]
    write(records, of(2, "guest/guest/x"))
    for name in ("guest/x", "guest/guest/x"):
        assert records.activations(GUEST, limit=9, name=name).whole() == [of(2, "guest/guest/x")], name
    assert records.activations(GUEST, limit=9, name="x").whole() == [of(1, "guest/x")]


def test_a_record_that_cannot_be_read_hides_no_others(client: redis.Redis) -> None:
    records, _ = with_quotas(client)
    write(records, of(1), of(2), of(3))
    client.set(keys.activation(of(2).activation_id), "{")
    parts = records.activations(GUEST, limit=9)
    assert [one for part in parts for one in part] == [of(3), of(1)]
    assert parts.n_unreadable == 1


def test_records_that_a_version_before_wrote_make_no_newer_ones_give_way(client: redis.Redis) -> None:
    """They stand in no order of writing, and expire."""
    records, storage = with_quotas(client, record_bytes=50_000)
    hour = int(time.time()) // 3600
    client.hset(keys.used(GUEST), mapping={"records": 60_000, f"h{hour}": 60_000})
    for i in range(20):
        storage.check(GUEST)
        write(records, of(i))
    assert records.count_activations(GUEST) == 20
    long = replace(of(99), result={"x": "y" * 10_000})
    write(records, long)
    assert records.activation(long.activation_id) == long


def test_what_has_expired_with_its_index_counts_no_more(client: redis.Redis) -> None:
    records, _ = with_quotas(client, record_bytes=20_000)
    write(records, *(of(i) for i in range(18)))
    client.delete(keys.written(GUEST), *(keys.activation(of(i).activation_id) for i in range(18)))
    long = replace(of(99), result={"x": "y" * 10_000})
    write(records, long)
    write(records, of(100))
    assert records.activations(GUEST, limit=99).whole() == [of(100), long]
