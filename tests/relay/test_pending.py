"""Entries of 202s as gateways read them."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest
import redis

from relay import keys, redis_link
from relay.pending import Entry, PendingReader, create_group
from relay.records import Pending, Records
from thaw.ids import ActionName, ActivationId, GatewayId, Namespace
from thaw.logs import Log

OURS = GatewayId("ours")


@pytest.fixture
def client(valkey_url: str) -> Iterator[redis.Redis]:
    with redis_link.connect(valkey_url) as connected:
        yield connected


def accept(client: redis.Redis, name: str) -> None:
    Records(client).accept(Pending(ActivationId(name), Namespace("a"), "a", ActionName("a/f"), "0.0.1", {}, 0, 0))


def test_what_was_lost_with_a_connection_comes_again_and_then_the_new(client: redis.Redis, valkey_url: str) -> None:
    create_group(client)
    for n in range(5):
        accept(client, f"lost{n}")
    client.xreadgroup(keys.PENDING_GROUP, OURS, {keys.PENDING: ">"}, count=5)  # an answer that nobody read
    client.xdel(keys.PENDING, client.xrange(keys.PENDING)[1][0])
    accept(client, "new")
    seen: queue.Queue[Entry] = queue.Queue()
    reader = PendingReader(valkey_url, OURS, seen.put, lambda: 2, Log("gateway"))
    reader.start()
    try:
        names = [seen.get(timeout=10).pending.activation_id for _ in range(5)]
    finally:
        reader.stop()
        reader.join(10)
    assert names == ["lost0", "lost2", "lost3", "lost4", "new"]
