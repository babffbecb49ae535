"""Triggers and rules over a real socket: a firing starts actions and is recorded, also when a part is gone."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import redis

from relay.state import keys
from relay.state.entities import Change, Entities
from tests.conftest import ValkeyServer
from tests.gateway.conftest import HERE, GatewayProcess, Start, notes, pairs, values
from tests.gateway.test_sequences import sequence
from thaw.entities import Trigger
from thaw.errors import Conflict
from thaw.ids import Namespace


def rule(gateway: GatewayProcess, name: str, action: str, trigger: str = "/_/t") -> dict[str, Any]:
    return gateway.put(f"rules/{name}", trigger=trigger, action=action)


def fire(gateway: GatewayProcess, trigger: str = "t", **event: Any) -> Any:
    return gateway.call("POST", f"{HERE}/triggers/{trigger}", json=event)


def switch(gateway: GatewayProcess, rule: str, status: str, expect: int = 200) -> dict[str, Any]:
    reply = gateway.call("POST", f"{HERE}/rules/{rule}", json={"status": status})
    assert reply.status_code == expect, reply.text
    return dict(reply.json())


def lines_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record["logs"]]


@pytest.fixture
def joined(gateway: GatewayProcess) -> GatewayProcess:
    """The trigger t with the rule r, which calls hello."""
    gateway.serve_python()
    gateway.put("triggers/t", parameters=pairs(a="trigger", b="trigger"))
    rule(gateway, "r", "/_/hello")
    return gateway


def test_a_trigger_is_created_read_updated_listed_and_deleted(gateway: GatewayProcess) -> None:
    made = gateway.put("triggers/t", parameters=pairs(a=1), annotations=pairs(feed="/whisk.system/alarms/alarm"))
    assert made.items() >= {"name": "t", "version": "0.0.1", "rules": {}, "limits": {}}.items()
    assert values(made) == {"a": 1}
    assert gateway.put("triggers/t", 409)["error"] == "resource already exists"
    updated = gateway.put("triggers/t?overwrite=true", parameters=pairs(b=2))
    assert (updated["version"], values(updated)) == ("0.0.2", {"b": 2})
    assert notes(updated) == {"feed": "/whisk.system/alarms/alarm"}
    (listed,) = gateway.read("triggers")
    assert listed["name"] == "t"
    assert gateway.read("triggers?count=true") == {"triggers": 1}
    assert gateway.delete("triggers/t").status_code == 200
    assert gateway.call("GET", f"{HERE}/triggers/t").status_code == 404


def test_a_rule_and_its_trigger_say_the_same_of_each_other(joined: GatewayProcess) -> None:
    found = joined.read("rules/r")
    link = {"action": {"path": "guest", "name": "hello"}, "status": "active"}
    assert found.items() >= {**link, "trigger": {"path": "guest", "name": "t"}}.items()
    assert joined.read("triggers/t")["rules"] == {"guest/r": link}
    assert switch(joined, "r", "inactive")["status"] == "inactive"
    assert joined.read("rules/r")["status"] == "inactive"
    assert joined.read("rules")[0]["status"] == "inactive"
    assert joined.read("triggers/t")["rules"]["guest/r"]["status"] == "inactive"
    switch(joined, "r", "on", 400)
    joined.put("triggers/other")
    moved = joined.put("rules/r?overwrite=true", trigger="other")
    assert (moved["status"], moved["version"], moved["trigger"]["name"]) == ("inactive", "0.0.2", "other")
    assert joined.read("triggers/t")["rules"] == {}
    assert list(joined.read("triggers/other")["rules"]) == ["guest/r"]
    assert joined.delete("rules/r").status_code == 200
    assert joined.read("triggers/other")["rules"] == {}
    assert joined.read("rules?count=true") == {"rules": 0}


def test_a_rule_needs_its_trigger_and_its_action(joined: GatewayProcess) -> None:
    for body, error in (
        ({"trigger": "/_/nothing", "action": "/_/hello"}, "/guest/nothing does not exist."),
        ({"trigger": "/_/t", "action": "/_/nothing"}, "/guest/nothing does not exist."),
        ({"trigger": "/_/t"}, "The request content was malformed:\na rule needs a trigger and an action"),
    ):
        assert joined.put("rules/x", 400, **body)["error"] == error
    assert joined.put("rules/x", 403, trigger="/_/t", action="/other/hello")["error"]
    assert joined.put("rules/x", 400, trigger="/other/t", action="/_/hello")["error"]
    assert joined.put("rules/r", 409, trigger="/_/t", action="/_/hello")["error"] == "resource already exists"


def test_a_firing_calls_the_actions_of_the_active_rules_and_records_which(joined: GatewayProcess) -> None:
    joined.put("actions/seq", **sequence("hello"))
    rule(joined, "s", "/_/seq")
    rule(joined, "off", "/_/hello")
    switch(joined, "off", "inactive")
    fired = fire(joined, b="event", c="event")
    assert fired.status_code == 202
    assert fired.headers["X-Openwhisk-Activation-Id"] == fired.json()["activationId"]
    record = joined.record(fired)
    event = {"a": "trigger", "b": "event", "c": "event"}
    assert (record["name"], record["response"]["result"]) == ("t", event)
    lines = lines_of(record)
    assert [(line["rule"], line["action"], line["success"], line["statusCode"]) for line in lines] == [
        ("guest/r", "guest/hello", True, 0),
        ("guest/s", "guest/seq", True, 0),
    ]
    for line in lines:
        ended = joined.ended(line["activationId"])
        assert (ended.result, ended.cause) == (event, record["activationId"])
    assert len(joined.invoker.runs) == 2


def test_a_firing_without_an_active_rule_is_a_204(joined: GatewayProcess) -> None:
    switch(joined, "r", "inactive")
    assert fire(joined).status_code == 204
    assert fire(joined, "nothing").status_code == 404
    assert joined.call("POST", f"{HERE}/triggers/t", data=b"[1]").status_code == 400


def test_a_rule_whose_action_is_gone_keeps_no_other_from_its_call(joined: GatewayProcess) -> None:
    joined.put_python("gone")
    rule(joined, "a", "/_/gone")
    joined.delete("actions/gone")
    lines = lines_of(joined.record(fire(joined)))
    assert {line["rule"]: line["success"] for line in lines} == {"guest/r": True, "guest/a": False}
    assert [line["error"] for line in lines if not line["success"]] == ["The requested resource does not exist."]


def test_the_rules_of_a_deleted_trigger_are_inactive_until_they_are_switched_on(joined: GatewayProcess) -> None:
    joined.delete("triggers/t")
    assert joined.read("rules/r")["status"] == "inactive"
    switch(joined, "r", "active", 400)
    switch(joined, "r", "inactive")
    joined.put("triggers/t")
    assert fire(joined).status_code == 204
    switch(joined, "r", "active")
    assert fire(joined).status_code == 202


def test_a_rule_is_not_written_when_its_trigger_changed_meanwhile(joined: GatewayProcess, valkey_url: str) -> None:
    """One script writes both rows or none."""
    with redis.Redis.from_url(valkey_url) as client:
        entities = Entities(client)
        was = entities.get(Trigger, Namespace("guest"), "t")
        joined.put("triggers/t?overwrite=true", parameters=[])
        new = Trigger(Namespace("guest"), "new")
        with pytest.raises(Conflict):
            entities.swap(Change(None, new), Change(was, None))
        assert entities.find(Trigger, Namespace("guest"), "new") is None
        now = entities.get(Trigger, Namespace("guest"), "t")
        entities.swap(Change(None, new), Change(now, None))
        entities.swap(Change(None, new), Change(now, None))  # the answer was lost, and the client asked again
        assert entities.find(Trigger, Namespace("guest"), "t") is None


def test_a_firing_that_the_state_server_does_not_keep_is_an_error_and_starts_nothing(
    start_gateway: Start, own_valkey: ValkeyServer
) -> None:
    gateway = start_gateway(own_valkey.url)
    with_rules(gateway, 2)
    gateway.invoker.client.config_set("appendonly", "no")
    assert (fire(gateway, x=1).status_code, n_pending(gateway)) == (500, 0)
    gateway.invoker.client.config_set("appendonly", "yes")
    assert (fire(gateway, x=1).status_code, n_pending(gateway)) == (202, 2)


def with_rules(gateway: GatewayProcess, n: int) -> None:
    gateway.put_python()
    gateway.put("triggers/t")
    for i in range(n):
        rule(gateway, f"r{i}", "/_/hello")


def n_pending(gateway: GatewayProcess) -> int:
    return int(gateway.invoker.client.xlen(keys.PENDING))


def test_each_rule_that_a_firing_starts_counts_as_an_invocation(start_gateway: Start) -> None:
    gateway = start_gateway(THAW_INVOCATIONS_PER_MINUTE="5")
    with_rules(gateway, 3)
    statuses = [fire(gateway).status_code for _ in range(3)]  # a minute may end in between
    assert statuses[0] == 202
    assert 429 in statuses
    assert n_pending(gateway) == 3 * statuses.count(202)


def test_a_trigger_has_so_many_rules_and_a_firing_so_many_bytes_and_no_more(gateway: GatewayProcess) -> None:
    with_rules(gateway, 64)
    full = gateway.put("rules/more", 413, trigger="/_/t", action="/_/hello")
    assert full["error"] == "The trigger has 64 rules, and 64 are allowed."
    gateway.put("rules/r0?overwrite=true", annotations=pairs(note=1))
    large = fire(gateway, x="x" * 900_000)
    assert (large.status_code, "are larger than allowed" in large.text) == (413, True)
    assert n_pending(gateway) == 0


def test_nothing_that_a_firing_accepted_is_lost_with_its_gateway(start_gateway: Start) -> None:
    """An idempotent action is run again.  A sequence that had begun is not, and its record says so, and names the
    components that ended."""
    first = start_gateway()
    invoker = first.invoker
    first.put_python("hello", annotations=pairs(idempotent=True))
    first.put_python("a", parameters=pairs(quick=True))
    first.put_python("b")
    first.serve("hello", "a", "b")
    first.put("actions/seq", **sequence("a", "b"))
    first.put("triggers/t")
    rule(first, "r", "/_/hello")
    rule(first, "s", "/_/seq")
    held = threading.Event()
    invoker.function = lambda value: (200, {"x": 1} if "quick" in value or held.wait(60) else {})
    lines = lines_of(first.record(fire(first, x=1)))
    for _ in range(3):
        assert invoker.entered.acquire(timeout=60)
    (done,) = (run["activation_id"] for run in invoker.runs if run["action_name"] == "/guest/a")
    first.ended(done)
    first.kill()
    held.set()
    start_gateway(THAW_GATEWAY_HEARTBEAT_S="0.3")
    ended = {line["rule"]: first.ended(line["activationId"]) for line in lines}
    lost = {"error": "A gateway was lost while this sequence ran; it is not run twice."}
    assert {name: record.result for name, record in ended.items()} == {"guest/r": {"x": 1}, "guest/s": lost}
    assert ended["guest/s"].logs == (done,)
    assert [run["action_name"] for run in invoker.runs].count("/guest/a") == 1
