"""Triggers and rules over a real socket: a firing starts actions and is recorded, also when a part is gone."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis

from relay.state import keys
from relay.state.entities import Change, Entities
from tests.conftest import ValkeyServer
from tests.gateway.conftest import KEY, GatewayProcess, add_key, wait_for_record
from tests.gateway.fake_invoker import FakeInvoker
from tests.gateway.test_packages import HERE, pairs, put, values
from tests.gateway.test_sequences import sequence
from thaw.entities import Trigger
from thaw.errors import Conflict
from thaw.ids import Namespace


def rule(gateway: GatewayProcess, name: str, action: str, trigger: str = "/_/t") -> dict[str, Any]:
    return put(gateway, f"rules/{name}", trigger=trigger, action=action)


def read(gateway: GatewayProcess, path: str) -> Any:
    reply = gateway.call("GET", f"{HERE}/{path}")
    assert reply.status_code == 200, reply.text
    return reply.json()


def fire(gateway: GatewayProcess, trigger: str = "t", **event: Any) -> Any:
    return gateway.call("POST", f"{HERE}/triggers/{trigger}", json=event)


@pytest.fixture
def joined(gateway: GatewayProcess, invoker: FakeInvoker) -> GatewayProcess:
    """The trigger t with the rule r, which calls hello."""
    gateway.put_python()
    invoker.ready("guest/hello")
    gateway.wait_for_routes()
    put(gateway, "triggers/t", parameters=pairs(a="trigger", b="trigger"))
    rule(gateway, "r", "/_/hello")
    return gateway


def test_a_trigger_is_created_read_updated_listed_and_deleted(gateway: GatewayProcess) -> None:
    made = put(gateway, "triggers/t", parameters=pairs(a=1), annotations=pairs(feed="/whisk.system/alarms/alarm"))
    assert (made["name"], made["version"], made["rules"], made["limits"], values(made)) == (
        "t",
        "0.0.1",
        {},
        {},
        {"a": 1},
    )
    assert put(gateway, "triggers/t", 409)["error"] == "resource already exists"
    updated = put(gateway, "triggers/t?overwrite=true", parameters=pairs(b=2))
    assert (updated["version"], values(updated)) == ("0.0.2", {"b": 2})
    assert values(updated, "annotations") == {"feed": "/whisk.system/alarms/alarm"}
    (listed,) = read(gateway, "triggers")
    assert listed["name"] == "t"
    assert read(gateway, "triggers?count=true") == {"triggers": 1}
    assert gateway.call("DELETE", f"{HERE}/triggers/t").status_code == 200
    assert gateway.call("GET", f"{HERE}/triggers/t").status_code == 404


def test_a_rule_and_its_trigger_say_the_same_of_each_other(joined: GatewayProcess) -> None:
    found = read(joined, "rules/r")
    assert (found["status"], found["trigger"], found["action"]) == (
        "active",
        {"path": "guest", "name": "t"},
        {"path": "guest", "name": "hello"},
    )
    link = {"action": {"path": "guest", "name": "hello"}, "status": "active"}
    assert read(joined, "triggers/t")["rules"] == {"guest/r": link}
    switched = joined.call("POST", f"{HERE}/rules/r", json={"status": "inactive"})
    assert (switched.status_code, switched.json()["status"]) == (200, "inactive")
    assert read(joined, "rules/r")["status"] == "inactive"
    assert read(joined, "rules")[0]["status"] == "inactive"
    assert read(joined, "triggers/t")["rules"]["guest/r"]["status"] == "inactive"
    assert joined.call("POST", f"{HERE}/rules/r", json={"status": "on"}).status_code == 400
    put(joined, "triggers/other")
    moved = put(joined, "rules/r?overwrite=true", trigger="other")
    assert (moved["status"], moved["version"], moved["trigger"]["name"]) == ("inactive", "0.0.2", "other")
    assert read(joined, "triggers/t")["rules"] == {}
    assert list(read(joined, "triggers/other")["rules"]) == ["guest/r"]
    assert joined.call("DELETE", f"{HERE}/rules/r").status_code == 200
    assert read(joined, "triggers/other")["rules"] == {}
    assert read(joined, "rules?count=true") == {"rules": 0}


def test_a_rule_needs_its_trigger_and_its_action(joined: GatewayProcess) -> None:
    for body, error in (
        ({"trigger": "/_/nothing", "action": "/_/hello"}, "/guest/nothing does not exist."),
        ({"trigger": "/_/t", "action": "/_/nothing"}, "/guest/nothing does not exist."),
        ({"trigger": "/_/t"}, "The request content was malformed:\na rule needs a trigger and an action"),
    ):
        assert put(joined, "rules/x", 400, **body)["error"] == error
    assert put(joined, "rules/x", 403, trigger="/_/t", action="/other/hello")["error"]
    assert put(joined, "rules/x", 400, trigger="/other/t", action="/_/hello")["error"]
    assert put(joined, "rules/r", 409, trigger="/_/t", action="/_/hello")["error"] == "resource already exists"


def test_a_firing_calls_the_actions_of_the_active_rules_and_records_which(
    joined: GatewayProcess, invoker: FakeInvoker, valkey_url: str
) -> None:
    put(joined, "actions/seq", **sequence("hello"))
    rule(joined, "s", "/_/seq")
    rule(joined, "off", "/_/hello")
    joined.call("POST", f"{HERE}/rules/off", json={"status": "inactive"})
    fired = fire(joined, b="event", c="event")
    assert fired.status_code == 202
    assert fired.headers["X-Openwhisk-Activation-Id"] == fired.json()["activationId"]
    record = joined.record(fired.json()["activationId"])
    event = {"a": "trigger", "b": "event", "c": "event"}
    assert (record["name"], record["response"]["result"]) == ("t", event)
    lines = [json.loads(line) for line in record["logs"]]
    assert [(line["rule"], line["action"], line["success"], line["statusCode"]) for line in lines] == [
        ("guest/r", "guest/hello", True, 0),
        ("guest/s", "guest/seq", True, 0),
    ]
    for line in lines:
        ended = wait_for_record(valkey_url, line["activationId"])
        assert (ended.result, ended.cause) == (event, record["activationId"])
    assert len(invoker.runs) == 2


def test_a_firing_without_an_active_rule_is_a_204(joined: GatewayProcess) -> None:
    joined.call("POST", f"{HERE}/rules/r", json={"status": "inactive"})
    assert fire(joined).status_code == 204
    assert fire(joined, "nothing").status_code == 404
    assert joined.call("POST", f"{HERE}/triggers/t", data=b"[1]").status_code == 400


def test_a_rule_whose_action_is_gone_keeps_no_other_from_its_call(joined: GatewayProcess, valkey_url: str) -> None:
    joined.put_python("gone")
    rule(joined, "a", "/_/gone")
    joined.call("DELETE", f"{HERE}/actions/gone")
    lines = [json.loads(line) for line in joined.record(fire(joined).json()["activationId"])["logs"]]
    assert {line["rule"]: line["success"] for line in lines} == {"guest/r": True, "guest/a": False}
    assert [line["error"] for line in lines if not line["success"]] == ["The requested resource does not exist."]


def test_the_rules_of_a_deleted_trigger_are_inactive_until_they_are_switched_on(joined: GatewayProcess) -> None:
    joined.call("DELETE", f"{HERE}/triggers/t")
    assert read(joined, "rules/r")["status"] == "inactive"
    assert joined.call("POST", f"{HERE}/rules/r", json={"status": "active"}).status_code == 400
    assert joined.call("POST", f"{HERE}/rules/r", json={"status": "inactive"}).status_code == 200
    put(joined, "triggers/t")
    assert fire(joined).status_code == 204
    assert joined.call("POST", f"{HERE}/rules/r", json={"status": "active"}).status_code == 200
    assert fire(joined).status_code == 202


def test_a_rule_is_not_written_when_its_trigger_changed_meanwhile(joined: GatewayProcess, valkey_url: str) -> None:
    """One script writes both rows or none."""
    with redis.Redis.from_url(valkey_url) as client:
        entities = Entities(client)
        was = entities.get(Trigger, Namespace("guest"), "t")
        put(joined, "triggers/t?overwrite=true", parameters=[])
        new = Trigger(Namespace("guest"), "new")
        with pytest.raises(Conflict):
            entities.swap(Change(None, new), Change(was, None))
        assert entities.find(Trigger, Namespace("guest"), "new") is None
        now = entities.get(Trigger, Namespace("guest"), "t")
        entities.swap(Change(None, new), Change(now, None))
        entities.swap(Change(None, new), Change(now, None))  # the answer was lost, and the client asked again
        assert entities.find(Trigger, Namespace("guest"), "t") is None


def test_a_firing_that_the_state_server_does_not_keep_is_an_error_and_starts_nothing(
    own_valkey: ValkeyServer,
) -> None:
    add_key(own_valkey.url, KEY, "guest")
    gateway = GatewayProcess(own_valkey.url)
    try:
        gateway.put_python()
        put(gateway, "triggers/t")
        for name in ("r", "s"):
            rule(gateway, name, "/_/hello")
        with redis.Redis.from_url(own_valkey.url) as client:
            client.config_set("appendonly", "no")
            refused = fire(gateway, x=1)
            assert (refused.status_code, client.xlen(keys.PENDING)) == (500, 0)
            client.config_set("appendonly", "yes")
            assert (fire(gateway, x=1).status_code, client.xlen(keys.PENDING)) == (202, 2)
    finally:
        gateway.end()


def test_each_rule_that_a_firing_starts_counts_as_an_invocation(
    start_gateway: Callable[..., GatewayProcess], valkey_url: str
) -> None:
    gateway = start_gateway(THAW_INVOCATIONS_PER_MINUTE="5")
    gateway.put_python()
    put(gateway, "triggers/t")
    for i in range(3):
        rule(gateway, f"r{i}", "/_/hello")
    statuses = [fire(gateway).status_code for _ in range(3)]  # a minute may end in between
    assert statuses[0] == 202
    assert 429 in statuses
    with redis.Redis.from_url(valkey_url) as client:
        assert client.xlen(keys.PENDING) == 3 * statuses.count(202)


def test_a_trigger_has_so_many_rules_and_a_firing_so_many_bytes_and_no_more(
    gateway: GatewayProcess, valkey_url: str
) -> None:
    gateway.put_python()
    put(gateway, "triggers/t")
    for i in range(64):
        rule(gateway, f"r{i}", "/_/hello")
    full = put(gateway, "rules/more", 413, trigger="/_/t", action="/_/hello")
    assert full["error"] == "The trigger has 64 rules, and 64 are allowed."
    put(gateway, "rules/r0?overwrite=true", annotations=pairs(note=1))
    large = fire(gateway, x="x" * 900_000)
    assert (large.status_code, "are larger than allowed" in large.text) == (413, True)
    with redis.Redis.from_url(valkey_url) as client:
        assert client.xlen(keys.PENDING) == 0


def test_nothing_that_a_firing_accepted_is_lost_with_its_gateway(
    start_gateway: Callable[..., GatewayProcess], invoker: FakeInvoker, valkey_url: str
) -> None:
    """An idempotent action is run again.  A sequence that had begun is not, and its record says so, and names the
    components that ended."""
    first = start_gateway()
    first.put_python("hello", annotations=pairs(idempotent=True))
    first.put_python("a", parameters=pairs(quick=True))
    first.put_python("b")
    for i, name in enumerate(("hello", "a", "b")):
        invoker.ready(f"guest/{name}", instance=f"i{i}")
    first.wait_for_routes(3)
    put(first, "actions/seq", **sequence("a", "b"))
    put(first, "triggers/t")
    rule(first, "r", "/_/hello")
    rule(first, "s", "/_/seq")
    held = threading.Event()
    invoker.function = lambda value: (200, {"x": 1} if "quick" in value or held.wait(60) else {})
    lines = [json.loads(line) for line in first.record(fire(first, x=1).json()["activationId"])["logs"]]
    for _ in range(3):
        assert invoker.entered.acquire(timeout=60)
    (done,) = (run["activation_id"] for run in invoker.runs if run["action_name"] == "/guest/a")
    wait_for_record(valkey_url, done)
    first.kill()
    held.set()
    start_gateway(THAW_GATEWAY_HEARTBEAT_S="0.3")
    ended = {line["rule"]: wait_for_record(valkey_url, line["activationId"], timeout_s=60) for line in lines}
    assert {name: record.result for name, record in ended.items()} == {
        "guest/r": {"x": 1},
        "guest/s": {"error": "A gateway was lost while this sequence ran; it is not run twice."},
    }
    assert ended["guest/s"].logs == (done,)
    assert [run["action_name"] for run in invoker.runs].count("/guest/a") == 1
