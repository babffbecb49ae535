"""The storage of a namespace's packages, triggers and rules: it is counted at each write, and bounded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import redis

from relay.state import keys, redis_link
from relay.state.entities import Change, Entities
from thaw.entities import Package, Rule, Trigger
from thaw.errors import Conflict, TooLarge
from thaw.ids import ActionName, Namespace

GUEST = Namespace("guest")
TRIGGER = Trigger(GUEST, "t", parameters={"a": "x" * 100})


def used(client: Any) -> dict[str, int]:
    return {redis_link.text(what): int(n) for what, n in client.hgetall(keys.entities_used(GUEST)).items()}


def kept(client: Any) -> dict[str, int]:
    """Return the same counts, computed from every row."""
    rows = {kind: client.hgetall(keys.entities(kind, GUEST)) for kind in ("packages", "triggers", "rules")}
    n_bytes = sum(len(name) + len(row) for of_kind in rows.values() for name, row in of_kind.items())
    return {"bytes": n_bytes, **{kind: len(of_kind) for kind, of_kind in rows.items()}}


def test_every_write_keeps_count_of_what_a_namespace_has(client: redis.Redis) -> None:
    entities, package = Entities(client), Package(GUEST, "p")
    rule = Rule(GUEST, "r", "t", ActionName("guest/a"))
    entities.swap(Change(None, package))
    entities.swap(Change(None, TRIGGER), Change(None, rule))
    assert used(client) == kept(client) == {**kept(client), "packages": 1, "triggers": 1, "rules": 1}
    was = entities.get(Trigger, GUEST, "t")
    shorter = replace(TRIGGER, parameters={})
    entities.swap(Change(was, shorter))
    entities.swap(Change(was, shorter))  # the answer was lost, and the client asked again
    assert used(client) == kept(client)
    with pytest.raises(Conflict):
        entities.swap(Change(was, None))
    assert used(client) == kept(client)
    entities.swap(Change(entities.get(Rule, GUEST, "r"), None), Change(entities.get(Trigger, GUEST, "t"), None))
    assert entities.drop_package(package)
    assert entities.drop_package(package), "a repeat takes nothing away"
    assert used(client) == kept(client) == {"bytes": 0, "packages": 0, "triggers": 0, "rules": 0}


def test_a_namespace_has_so_many_of_a_kind_and_no_more(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relay.state.entities._MOST_OF_A_KIND", 2)
    entities = Entities(client)
    for name in ("a", "b"):
        entities.swap(Change(None, Trigger(GUEST, name)))
    with pytest.raises(TooLarge, match="has 2 of a kind of entity, and 2 are allowed"):
        entities.swap(Change(None, Package(GUEST, "p")), Change(None, Trigger(GUEST, "c")))
    assert entities.find(Package, GUEST, "p") is None, "none of the rows is written"
    entities.swap(Change(None, Package(GUEST, "p")))
    was = entities.get(Trigger, GUEST, "a")
    entities.swap(Change(was, replace(was.entity, parameters={"a": 1})))
    entities.swap(Change(entities.get(Trigger, GUEST, "b"), None), Change(None, Trigger(GUEST, "c")))
    entities.swap(Change(None, Trigger(Namespace("other"), "c")))


def test_a_write_reads_its_own_rows_alone(client: redis.Redis) -> None:
    """Otherwise each write would block the state server for all others while it reads all rows."""
    entities = Entities(client)
    for n in range(20):
        entities.swap(Change(None, Trigger(GUEST, f"t{n}")))
    client.config_resetstat()
    entities.swap(Change(None, TRIGGER))
    calls: Any = client.info("commandstats")
    assert {name: stat["calls"] for name, stat in calls.items() if name.startswith("cmdstat_h")} == {
        "cmdstat_hget": 3,
        "cmdstat_hset": 1,
        "cmdstat_hincrby": 2,
    }
