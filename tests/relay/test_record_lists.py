"""Records are found by time and by name, and the oldest give way, in a real state server."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis

from relay.state import keys, redis_link
from relay.state.records import Ended, Records
from relay.state.storage import Storage
from tests.relay.samples import record
from thaw.activation import Activation
from thaw.ids import ActionName, ActivationId, Namespace
from thaw.quotas import Quotas
from thaw.tracing.trace import Phase, TraceEvent

GUEST = Namespace("guest")


@pytest.fixture
def client(valkey_url: str) -> Iterator[redis.Redis]:
    with redis_link.connect(valkey_url) as connected:
        yield connected


def kept(client: redis.Redis, most: int = 10**6, age_s: int = 3600) -> tuple[Records, Storage]:
    quotas = Quotas(10**6, 10**12, 10**12, 10**6, 10**6, 10**6, records=most, record_age_s=age_s)
    storage = Storage(client, lambda _: quotas)
    return Records(client, storage=storage), storage


def of(i: int, action: str = "guest/f", binding: str = "") -> Activation:
    return replace(record(f"{i:032x}", start_ms=1_000 + i), action=ActionName(action), binding=binding)


def write(records: Records, *some: Activation) -> None:
    records.end_all([Ended(one, (TraceEvent(Phase.RECEIVED),)) for one in some])


def starts(found: list[Activation]) -> list[int]:
    return [one.start_ms - 1_000 for one in found]


def test_a_record_is_listed_by_its_actions_name_however_many_others_are_newer(client: redis.Redis) -> None:
    records = Records(client)
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
    client: redis.Redis, action: str, binding: str, names: set[str]
) -> None:
    records = Records(client)
    write(records, of(1, action, binding))
    asked = {"f", "act", "tools/act", "mine/act", "guest/f", "guest/tools/act", "guest/mine/act", "other/tools/act"}
    found = {name for name in asked if records.activations(GUEST, limit=9, name=name).whole()}
    # "guest/tools/act" is "tools/act" of the namespace that is asked for, so it shows another one's tools, too
    assert found - {"guest/tools/act"} == names - {"guest/tools/act"}
    assert starts(records.activations(GUEST, limit=9).whole()) == [1]


def test_a_page_is_the_part_of_the_list_that_was_asked_for(client: redis.Redis) -> None:
    records, chance = Records(client), random.Random(16)
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
    records, storage = kept(client, most=3)
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
    write(kept(client)[0], *(of(i) for i in range(300)))
    records, _ = kept(client, most=10)
    counts = []
    for i in range(300, 304):
        write(records, of(i))
        counts.append(records.count_activations(GUEST))
    assert counts == [200, 100, 10, 10]
    assert records.count_activations(GUEST, name="f") == 10


def test_a_record_is_kept_for_the_namespaces_seconds_and_so_are_its_trace_and_places(client: redis.Redis) -> None:
    records, storage = kept(client, age_s=7_200)
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
    records, _ = kept(client, age_s=500)
    write(records, of(1, "guest/old"), of(2, "guest/f"))
    client.delete(keys.activation(of(1).activation_id))
    write(records, of(500_002))
    assert records.count_activations(GUEST, name="old") == 0
    assert records.count_activations(GUEST, name="f") == 2
    assert starts(records.activations(GUEST, limit=9).whole()) == [500_002, 2]


def test_long_records_are_read_few_at_a_time(client: redis.Redis) -> None:
    records = Records(client)
    long = [replace(of(i), result={"x": "y" * 600_000}) for i in range(3)]
    write(records, *long, of(3), of(4), replace(of(5), result={"x": "y" * 2_000_000}))
    client.delete(keys.activation(of(3).activation_id))
    parts = records.activations(GUEST, limit=9)
    assert [starts(part) for part in parts] == [[5], [4, 2], [1], [0]]
    assert records.caused_by(ActivationId("none"), GUEST, 0) == []
