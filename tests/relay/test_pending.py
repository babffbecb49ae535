"""Entries of 202s as gateways read them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, cast

import redis

from relay.state import keys
from relay.state.pending import Entry, PendingClaims, PendingReader, create_group
from relay.state.records import Pending, Records
from thaw.ids import ActionName, ActivationId, GatewayId, Namespace
from thaw.logs import Log

OURS = GatewayId("ours")


def accept(client: redis.Redis, name: str) -> None:
    Records(client).accept(Pending(ActivationId(name), Namespace("a"), "a", ActionName("a/f"), "0.0.1", {}, 0, 0))


def test_what_was_lost_with_a_connection_comes_again_and_then_the_new(client: redis.Redis, valkey_url: str) -> None:
    create_group(client)
    for n in range(5):
        accept(client, f"lost{n}")
    client.xreadgroup(keys.PENDING_GROUP, OURS, {keys.PENDING: ">"}, count=5)  # as if this answer had been lost
    client.xdel(keys.PENDING, client.xrange(keys.PENDING)[1][0])
    accept(client, "new")
    seen: queue.Queue[Entry] = queue.Queue()
    reader = PendingReader(valkey_url, OURS, seen.put, lambda: 2, Log("gateway"))
    reader.start()
    try:
        names = [seen.get(timeout=60).pending.activation_id for _ in range(5)]
    finally:
        reader.stop()
        reader.join(60)
    assert names == ["lost0", "lost2", "lost3", "lost4", "new"]


def test_a_gateway_reads_no_more_entries_than_it_has_room_for(client: redis.Redis, valkey_url: str) -> None:
    """A gateway owns the entries that it has read, so no other gateway could begin them."""
    create_group(client)
    for n in range(5):
        accept(client, f"a{n}")
    asked_again, go_on, rooms = threading.Event(), threading.Event(), iter([2, 2])

    def room() -> int:
        """There is room for two lost entries and for two new ones, and then for none until the test ends."""
        if (n := next(rooms, 0)) == 0:
            asked_again.set()
            go_on.wait(60)
        return n

    seen: queue.Queue[Entry] = queue.Queue()
    reader = PendingReader(valkey_url, OURS, seen.put, room, Log("gateway"))
    reader.start()
    try:
        assert asked_again.wait(60)
        held = cast(Any, client.xpending_range(keys.PENDING, keys.PENDING_GROUP, "-", "+", 10))
        assert len(held) == seen.qsize() == 2
    finally:
        reader.stop()
        go_on.set()
        reader.join(60)


class _SlowToClaim(redis.Redis):
    """Another gateway claims a dead gateway's entries after this one has listed them and before it claims them."""

    between: Callable[[], object]

    def xpending_range(self, *args: Any, **kwargs: Any) -> Any:
        rows = super().xpending_range(*args, **kwargs)
        self.between()
        return rows


def test_of_two_gateways_that_see_the_same_death_one_has_the_entry(client: redis.Redis, valkey_url: str) -> None:
    create_group(client)
    accept(client, "a")
    ((_, ((entry_id, _),)),) = cast(Any, client.xreadgroup(keys.PENDING_GROUP, "dead", {keys.PENDING: ">"}))
    # the entry's gateway took it a minute ago
    client.xclaim(keys.PENDING, keys.PENDING_GROUP, "dead", 0, [entry_id], idle=60_000, justid=True)
    taken: list[Entry] = []
    with _SlowToClaim.from_url(valkey_url) as slow:
        slow.between = lambda: taken.extend(PendingClaims(client, OURS).claim(GatewayId("dead")))
        assert PendingClaims(slow, GatewayId("another")).claim(GatewayId("dead")) == []
    assert [entry.pending.activation_id for entry in taken] == ["a"]
    (held,) = cast(Any, client.xpending_range(keys.PENDING, keys.PENDING_GROUP, "-", "+", 10))
    assert held["consumer"] == OURS.encode()


def test_a_dead_gateway_without_entries_is_forgotten_and_one_with_entries_is_not(client: redis.Redis) -> None:
    create_group(client)
    accept(client, "a")
    client.xreadgroup(keys.PENDING_GROUP, "dead", {keys.PENDING: ">"})
    ours, dead = PendingClaims(client, OURS), GatewayId("dead")
    assert ours.consumers() == [dead]
    ours.claim(dead)
    assert ours.consumers() == [dead]
    client.xack(keys.PENDING, keys.PENDING_GROUP, client.xrange(keys.PENDING)[0][0])
    assert ours.claim(dead) == []
    assert ours.consumers() == []
