"""202s: each ends in exactly one record, whichever process dies."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import redis

from relay.protocol.messages import StartFailed
from relay.state import bus, keys
from tests.conftest import ValkeyServer
from tests.gateway.conftest import KEY, GatewayProcess, add_key, wait_for_record
from tests.gateway.fake_invoker import FakeInvoker
from thaw.errors import InitFailed
from thaw.ids import ActionName, GatewayId, GroupId

HELLO = "/api/v1/namespaces/_/actions/hello"


def pending(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        return int(client.xlen(keys.PENDING))


def test_a_202_ends_in_its_record(gateway: GatewayProcess, invoker: FakeInvoker, valkey_url: str) -> None:
    gateway.put_python()
    reply = gateway.call("POST", HELLO, json={"n": 1})
    assert reply.status_code == 202
    activation_id = reply.json()["activationId"]
    assert reply.json() == {"activationId": reply.headers["X-Openwhisk-Activation-Id"]}
    assert gateway.call("GET", f"/api/v1/namespaces/_/activations/{activation_id}").status_code == 404
    invoker.wait_for_demand()
    invoker.ready("guest/hello")
    record = wait_for_record(valkey_url, activation_id)
    assert record.result == {"n": 1}
    assert record.start_mode == "cold"


def test_a_blocking_call_that_waits_too_long_becomes_a_202_and_still_ends(
    gateway: GatewayProcess, invoker: FakeInvoker, valkey_url: str
) -> None:
    gateway.put_python()
    reply = gateway.call("POST", f"{HELLO}?blocking=true&timeout=200", json={"n": 1})
    assert reply.status_code == 202
    assert pending(valkey_url) == 1
    invoker.ready("guest/hello")
    assert wait_for_record(valkey_url, reply.json()["activationId"]).result == {"n": 1}
    assert len(invoker.runs) == 1


@pytest.mark.parametrize("kind", ["python", "llm"])
def test_a_202_of_a_killed_gateway_ends_in_exactly_one_record(
    start_gateway: Callable[..., GatewayProcess], invoker: FakeInvoker, valkey_url: str, kind: str
) -> None:
    """If the gateway is killed before anything ran, another gateway runs the request.

    If the gateway is killed during a run, an LLM is run again, but user code is not.
    """
    first = start_gateway()
    first.put_llm() if kind == "llm" else first.put_python()
    name, body = ("chat", {"prompt": "x", "max_tokens": 2}) if kind == "llm" else ("hello", {"n": 1})
    path = f"/api/v1/namespaces/_/actions/{name}"
    running = first.call("POST", path, json=body).json()["activationId"]
    invoker.wait_for_demand()
    invoker.pace = threading.Semaphore(0)
    invoker.ready(f"guest/{name}", slots=1)
    assert invoker.entered.acquire(timeout=60)
    waiting = first.call("POST", path, json=body).json()["activationId"]
    invoker.wait_for_demand()
    first.kill()
    invoker.pace = None
    second = start_gateway(THAW_GATEWAY_HEARTBEAT_S="0.5")
    ended = {i: wait_for_record(valkey_url, i) for i in (running, waiting)}
    assert ended[waiting].status.value == 0
    assert ended[running].status.value == (0 if kind == "llm" else 3)
    assert sum(r["activation_id"] == running for r in invoker.runs) == (2 if kind == "llm" else 1)
    listed = second.call("GET", "/api/v1/namespaces/_/activations").json()
    assert sorted(r["activationId"] for r in listed) == sorted(ended)


def test_what_was_claimed_of_a_gateway_that_lives_goes_back_to_it(
    start_gateway: Callable[..., GatewayProcess], invoker: FakeInvoker, valkey_url: str
) -> None:
    """A gateway's lease may end because the state server is away, for example.

    The function that the gateway runs is then neither run twice nor given up.
    """
    first = start_gateway(THAW_GATEWAY_HEARTBEAT_S="1000")  # so the other gateway is the one that claims
    first.put_python()
    invoker.pace = threading.Semaphore(0)
    invoker.ready("guest/hello", slots=2)
    activation_id = first.call("POST", HELLO, json={"n": 1}).json()["activationId"]
    assert invoker.entered.acquire(timeout=60)
    with redis.Redis.from_url(valkey_url) as client:
        ((entry, _),) = client.xrange(keys.PENDING)
        (lease,) = client.keys(keys.gateway_lease(GatewayId("*")))
        owner = lease.removeprefix(keys.gateway_lease(GatewayId("")).encode())
        client.persist(lease)
        client.xclaim(keys.PENDING, keys.PENDING_GROUP, "a dead gateway", 0, [entry])
        start_gateway(THAW_GATEWAY_HEARTBEAT_S="0.5").wait_for_event("entry_handed_back")
        (held,) = client.xpending_range(keys.PENDING, keys.PENDING_GROUP, "-", "+", 10)
        assert held["consumer"] == owner
    invoker.pace = None
    assert wait_for_record(valkey_url, activation_id).result == {"n": 1}
    assert len(invoker.runs) == 1


def test_a_202_outlives_a_state_server_killed_right_after_it(own_valkey: ValkeyServer) -> None:
    add_key(own_valkey.url, KEY, "guest")
    gateway, invoker = GatewayProcess(own_valkey.url), FakeInvoker(own_valkey.url)
    try:
        gateway.put_python()
        activation_id = gateway.call("POST", HELLO, json={"n": 1}).json()["activationId"]
        own_valkey.kill()
        own_valkey.start()
        invoker.ready("guest/hello")
        assert wait_for_record(own_valkey.url, activation_id).result == {"n": 1}
        assert len(invoker.runs) == 1
    finally:
        invoker.stop()
        gateway.stop()


def test_a_function_marked_idempotent_is_run_again_when_its_worker_dies(
    gateway: GatewayProcess, invoker: FakeInvoker, valkey_url: str
) -> None:
    gateway.put_python(annotations=[{"key": "idempotent", "value": True}])
    invoker.ready("guest/hello", instance="i0")
    invoker.cut_after.append(0)
    activation_id = gateway.call("POST", HELLO, json={"n": 1}).json()["activationId"]
    invoker.wait_for_demand()
    invoker.ready("guest/hello", instance="i1")
    assert wait_for_record(valkey_url, activation_id).result == {"n": 1}
    assert len(invoker.runs) == 2


@pytest.mark.parametrize("idempotent", [True, False])
def test_a_function_whose_process_was_killed_is_run_again_if_it_is_idempotent_and_else_says_what_killed_it(
    gateway: GatewayProcess, invoker: FakeInvoker, valkey_url: str, idempotent: bool
) -> None:
    said = "The function's process was killed by SIGKILL while it ran."
    killed = {"error": said, "info": {"code": "WorkerLost", "message": said, "hint": "it used more memory"}}
    answers = iter([(500, killed), (200, {"n": 1})])
    gateway.put_python(annotations=[{"key": "idempotent", "value": idempotent}])
    invoker.function = lambda value: next(answers)
    invoker.ready("guest/hello", instance="i0")
    activation_id = gateway.call("POST", HELLO, json={"n": 1}).json()["activationId"]
    if idempotent:
        invoker.wait_for_demand()
        invoker.ready("guest/hello", instance="i1")
    record = wait_for_record(valkey_url, activation_id)
    assert len(invoker.runs) == 1 + idempotent
    assert record.result == ({"n": 1} if idempotent else {"error": said, "hint": "it used more memory"})
    assert record.status.text == ("success" if idempotent else "whisk internal error")


def test_a_202_of_an_action_deleted_meanwhile_ends_and_says_so(
    gateway: GatewayProcess, invoker: FakeInvoker, valkey_url: str
) -> None:
    gateway.put_python()
    activation_id = gateway.call("POST", HELLO, json={}).json()["activationId"]
    invoker.wait_for_demand()
    gateway.call("DELETE", HELLO)
    record = wait_for_record(valkey_url, activation_id)
    assert record.status.value != 0
    assert "was deleted" in str(record.result)


def test_more_202s_than_runners_announce_their_demand_and_all_end(
    start_gateway: Callable[..., GatewayProcess], invoker: FakeInvoker, valkey_url: str
) -> None:
    gateway = start_gateway(THAW_GATEWAY_ASYNC_THREADS="2")
    gateway.put_python()
    ids = [gateway.call("POST", HELLO, json={"n": n}).json()["activationId"] for n in range(8)]
    invoker.wait_for_demand(8)
    invoker.ready("guest/hello", slots=1)
    assert [wait_for_record(valkey_url, i).result for i in ids] == [{"n": n} for n in range(8)]
    assert len(invoker.runs) == 8
    assert pending(valkey_url) == 0
    invoker.wait_for_demand(0)


def test_202s_that_waited_for_a_runner_end_with_the_error_of_their_start(
    start_gateway: Callable[..., GatewayProcess], invoker: FakeInvoker, valkey_url: str
) -> None:
    """A failed start ended the requests' demand before they waited, so they announce it again."""
    gateway = start_gateway(THAW_GATEWAY_ASYNC_THREADS="2")
    gateway.put_python()
    ids = [gateway.call("POST", HELLO, json={"n": n}).json()["activationId"] for n in range(4)]
    for waiting in (4, 2):
        found = invoker.wait_for_demand(waiting)
        for demand in found:  # the scheduler does this
            invoker.registry.drop_demand(demand.activation_id, demand.action, demand.gateway)
        named = tuple(demand.activation_id for demand in found)
        error = InitFailed("no main").info()
        bus.publish(invoker.client, StartFailed(ActionName("guest/hello"), named, error, GroupId("b" * 32)))
    assert [wait_for_record(valkey_url, i).result for i in ids] == [{"error": "no main"}] * 4
