"""A tenant fills neither the state server nor the memory of a gateway or a scheduler, and a full server recovers."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import redis

from gateway.scheduler.events import facts_of
from gateway.serving.actions.bounded_cache import BoundedCache, memory_of
from gateway.serving.answers.several import CHOICES_BYTES, SHORT_BYTES, several
from relay.protocol.messages import StartFailed
from relay.state import keys, starts
from relay.state.entities import Change, Entities
from relay.state.records import Records
from relay.state.registry import Registry
from tests.conftest import ValkeyServer
from tests.gateway.conftest import KEY, OTHER_KEY, GatewayProcess, add_key
from tests.gateway.fake_invoker import FakeInvoker
from tests.relay.samples import GROUP, GUEST, INSTANCE, function
from tests.security.conftest import SmallPlatform
from tests.security.slow import ACTIONS, NAMESPACES, Start, credentials, memory_bounded, put_code
from thaw.entities import Package
from thaw.errors import ErrorInfo
from thaw.ids import ActionName, InstanceId, Namespace
from thaw.instance import InstanceState

CODE = "def main(args):\n    return args\n"
MIB = 1 << 20
OUTPUT = "\x01" * 20_000
"""What an invoker sends of the output of ``sys.stdout.write("\\x01" * 70_000)``: 120 KB of JSON."""
FAILED = ErrorInfo("InitFailed", "it did not load", "look", OUTPUT, OUTPUT)
MANY = [[{"0": 0}] * 21_500] * 3
"""Three parameters of half a megabyte, whose objects take fifteen."""
WARM = "/api/v1/namespaces/_/warm"


def fail(client: redis.Redis, registry: Registry, i: int) -> None:
    """A start of the tenant's that fails, as an invoker and the scheduler report it."""
    instance = replace(INSTANCE, instance_id=InstanceId(f"i{i}"), action=ActionName("guest/bad0"))
    registry.put_instance(replace(instance, state=InstanceState.STARTING))
    registry.put_instance(replace(instance, state=InstanceState.GONE, error=FAILED))
    starts.start_failed(client, StartFailed(instance.action, (), FAILED, GROUP))


def test_starts_that_fail_with_much_output_do_not_fill_the_state_server(small: SmallPlatform) -> None:
    client, gateway, fake = small.client, small.gateway, small.fake
    put_code(gateway, CODE, "bad0")
    for i in range(400):
        fail(client, fake.registry, i)
    memory: Any = client.info("memory")
    assert memory["used_memory"] < 24 * MIB
    put_code(gateway, CODE, "f", OTHER_KEY)
    fake.ready("other/f")
    gateway.wait_for_routes()
    reply = gateway.call("POST", f"{ACTIONS}/f?blocking=true", json={"a": 1}, auth=credentials(OTHER_KEY))
    assert reply.status_code == 200


def test_a_full_state_server_refuses_a_202_and_a_start_with_what_the_page_says_and_recovers(
    own_valkey: ValkeyServer,
) -> None:
    with redis.Redis.from_url(own_valkey.url) as client:
        add_key(own_valkey.url, KEY, "guest")
        gateway = GatewayProcess(own_valkey.url)
        fuller = None
        try:
            put_code(gateway, CODE, "f")
            with redis.Redis.from_url(
                own_valkey.url
            ) as filler:  # the server keeps as large a buffer for its connection
                filler.set("ballast", b"x" * 20 * MIB)
            memory: Any = client.info("memory")
            client.config_set("maxmemory", memory["used_memory"] // 2)
            for method, path in (("POST", f"{ACTIONS}/f"), ("PUT", f"{ACTIONS}/g")):
                body = {"exec": {"kind": "python:3.11", "code": CODE}} if method == "PUT" else {}
                reply = gateway.call(method, path, json=body)
                assert reply.status_code == 503, reply.text
                assert reply.headers["Retry-After"] == "1"
                assert "takes no writes now" in reply.json()["error"]
            fuller = GatewayProcess(own_valkey.url)  # it starts at a full server, and knows that it is full
            for path in (f"{WARM}/f", f"{ACTIONS}/f", f"{ACTIONS}/f?blocking=true"):
                assert fuller.call("POST", path, json={}).status_code == 507
            client.delete("ballast")
            reply = gateway.call("POST", f"{ACTIONS}/f", json={})
            assert reply.status_code == 202, reply.text
        finally:
            gateway.end()
            if fuller is not None:
                fuller.end()


def put_many(client: redis.Redis, n: int) -> None:
    """Actions of before the number of objects in their parameters had a limit."""
    for i in range(n):
        parameters = {f"p{j}": value for j, value in enumerate(MANY)}
        action = replace(
            function(f"a{i}"), updated_ms=i, parameters=parameters, annotations={"x/y": i, "many": MANY[0]}
        )
        Records(client).put_action(action, last=None)
        entities = Entities(client, 64 * MIB)
        entities.swap(Change(None, Package(GUEST, f"p{i}", parameters=parameters, updated_ms=i)))


def test_lists_of_actions_with_much_in_their_parameters_cost_no_more_than_one_of_them(
    start: Start, valkey_url: str
) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        put_many(client, 20)
    gateway = start()
    with memory_bounded(gateway, 120):
        listed = gateway.call("GET", f"{ACTIONS}?limit=2&skip=1").json()
        assert [(a["name"], a["annotations"]) for a in listed] == [
            (f"a{i}", [{"key": "x/y", "value": i}]) for i in (18, 17)
        ]
        assert gateway.call("GET", f"{ACTIONS}?count=true").json() == {"actions": 20}
        packages = gateway.call("GET", f"{NAMESPACES}/_/packages?limit=0").json()
        assert [p["name"] for p in packages] == [f"p{i}" for i in reversed(range(20))]
        assert gateway.chat(model="none").status_code == 404
        assert gateway.call("GET", "/v1/models").json()["data"] == []


def test_actions_with_much_in_their_parameters_are_remembered_in_bounded_memory(start: Start, valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        put_many(client, 20)
    gateway = start()
    with memory_bounded(gateway, 200):
        for i in range(20):
            assert gateway.call("GET", f"{NAMESPACES}/_/scaling/a{i}").status_code == 200


def test_a_scheduler_reads_such_actions_one_at_a_time(start: Start, valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        put_many(client, 8)
        tracemalloc.start()
        try:
            facts = [facts_of(action) for action in Records(client).all_actions()]
            assert tracemalloc.get_traced_memory()[1] < 64 * MIB
        finally:
            tracemalloc.stop()
    assert {one.name for one in facts} == {f"guest/a{i}" for i in range(8)}


def test_parameters_of_very_many_objects_are_refused(start: Start) -> None:
    gateway = start()
    for what in ("parameters", "annotations"):
        body = {"exec": {"kind": "python:3.11", "code": CODE}, what: [{"key": "p", "value": [{}] * 4_100}]}
        for path in (f"{ACTIONS}/f", f"{NAMESPACES}/_/packages/p", f"{NAMESPACES}/_/triggers/t"):
            reply = gateway.call("PUT", path, json=body)
            assert reply.status_code == 413
            assert f"{what} with more than 4096 lists and objects" in reply.json()["error"]
    put_code(gateway, CODE, "f", parameters=[{"key": "p", "value": [{}] * 4_000}])


def test_the_namespace_with_most_makes_room_in_what_a_gateway_remembers() -> None:
    cache = BoundedCache[str, str](100_000)
    cache.keep(Namespace("small"), "s", "x" * 1_000, cache.changes)
    for i in range(20):
        cache.keep(GUEST, f"k{i}", "x" * 10_000, cache.changes)
        assert cache.get(GUEST, "k0") is not None, "it is in use"
    assert cache.n_bytes <= 100_000
    assert cache.get(Namespace("small"), "s") is not None
    assert [i for i in range(20) if cache.get(GUEST, f"k{i}")] == [0, *range(12, 20)]
    cache.keep(GUEST, "long", "x" * 200_000, cache.changes)
    assert cache.get(GUEST, "long") is None
    before = cache.changes
    cache.forget(GUEST, "k19")
    cache.keep(GUEST, "k19", "old", before)
    assert cache.get(GUEST, "k19") is None, "it has changed while it was read"
    cache.clear()
    assert cache.n_bytes == 0
    assert memory_of({"a": [{}] * 2}) > 3 * 64


def test_choices_carry_nothing_without_an_effect_and_are_bounded_together(
    start: Start, invoker: FakeInvoker, bounded: Callable[[GatewayProcess], Any]
) -> None:
    gateway = start()
    gateway.put_llm()
    invoker.ready("guest/chat", slots=64)
    gateway.wait_for_routes()
    body = {"model": "chat", "prompt": ["a", "b", "c", "d"], "n": 16, "max_tokens": 1, "user": "u" * 7_800_000}
    with bounded(gateway):
        reply = gateway.call("POST", "/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["choices"]) == 64
    assert not any("user" in run["value"]["body"] for run in invoker.runs)
    long = {**body, "user": "u", "prompt": "x" * 5 * MIB, "n": 16}
    refused = gateway.call("POST", "/v1/completions", json=long)
    assert refused.status_code == 413
    assert f"> {CHOICES_BYTES // 2} bytes" in refused.json()["error"]["message"]
    assert gateway.call("POST", "/v1/completions", json={**long, "prompt": "x" * MIB, "n": 2}).status_code == 200


@pytest.fixture
def bounded() -> Callable[[GatewayProcess], Any]:
    return lambda gateway: memory_bounded(gateway, 120)


def test_the_bytes_of_choices_are_those_of_their_texts() -> None:
    assert several({"prompt": "x" * 100}).n_bytes == 0
    made = several({"prompt": ["x" * 100, "y" * 50], "stop": "z" * 10, "n": 3})
    assert made.n_bytes == 3 * (2 * len('{"stop": "zzzzzzzzzz"}') + 102 + 52)
    assert several({"prompt": "x" * 1_000, "n": 16}).n_bytes < SHORT_BYTES


def test_no_key_of_this_attack_is_missing_on_the_page(own_valkey: ValkeyServer) -> None:
    """tests/relay/test_state_bounds.py attacks through the clients, and this through the API."""
    from tests.relay.test_state_bounds import of_operators, row_of

    with redis.Redis.from_url(own_valkey.url) as client:
        add_key(own_valkey.url, KEY, "guest")
        gateway, fake = GatewayProcess(own_valkey.url), FakeInvoker(own_valkey.url)
        try:
            for name in ("f", "g"):
                put_code(gateway, "#" * MIB, name)
            fake.ready("guest/f")
            gateway.wait_for_routes()
            gateway.call("PUT", f"{NAMESPACES}/_/packages/p", json={})
            gateway.call("PUT", f"{NAMESPACES}/_/triggers/t", json={})
            gateway.call("PUT", f"{NAMESPACES}/_/rules/r", json={"trigger": "/_/t", "action": "/_/f"})
            gateway.call("POST", f"{NAMESPACES}/_/triggers/t", json={})
            for how in ("?blocking=true", ""):
                gateway.record(gateway.call("POST", f"{ACTIONS}/f{how}", json={}).json()["activationId"])
            gateway.call("DELETE", f"{ACTIONS}/g")
            found = [key.decode() for key in client.scan_iter(count=1_000)]
            assert len(found) > 20
            assert keys.EVENTS in found
            for key in found:
                if not of_operators(key):
                    row = row_of(key)
                    n_bytes: Any = client.memory_usage(key, samples=0)  # type: ignore[no-untyped-call]
                    assert row.most_bytes is None or n_bytes <= row.most_bytes, key
        finally:
            gateway.end()
            fake.stop()
