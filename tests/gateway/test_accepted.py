"""202s: each ends in exactly one record, whichever process dies."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import redis

from relay.state import keys
from tests.conftest import ValkeyServer
from tests.gateway.conftest import GatewayProcess, Start, pairs
from thaw.errors import InitFailed
from thaw.ids import GatewayId

HELLO = "/api/v1/namespaces/_/actions/hello"


def pending(gateway: GatewayProcess) -> int:
    return int(gateway.invoker.client.xlen(keys.PENDING))


def accept(gateway: GatewayProcess, name: str = "hello", **body: Any) -> str:
    return str(gateway.invoke(name, "", **body).json()["activationId"])


def test_a_202_ends_in_its_record(gateway: GatewayProcess) -> None:
    gateway.put_python()
    reply = gateway.call("POST", HELLO, json={"n": 1})
    assert reply.status_code == 202
    activation_id = reply.json()["activationId"]
    assert reply.json() == {"activationId": reply.headers["X-Openwhisk-Activation-Id"]}
    assert gateway.call("GET", f"/api/v1/namespaces/_/activations/{activation_id}").status_code == 404
    gateway.invoker.wait_for_demand()
    gateway.invoker.ready("guest/hello")
    record = gateway.ended(activation_id)
    assert record.result == {"n": 1}
    assert record.start_mode == "cold"


def test_a_blocking_call_that_waits_too_long_becomes_a_202_and_still_ends(gateway: GatewayProcess) -> None:
    gateway.put_python()
    reply = gateway.call("POST", f"{HELLO}?blocking=true&timeout=200", json={"n": 1})
    assert reply.status_code == 202
    assert pending(gateway) == 1
    gateway.invoker.ready("guest/hello")
    assert gateway.ended(reply.json()["activationId"]).result == {"n": 1}
    assert len(gateway.invoker.runs) == 1


@pytest.mark.parametrize("kind", ["python", "llm"])
def test_a_202_of_a_killed_gateway_ends_in_exactly_one_record(start_gateway: Start, kind: str) -> None:
    """If the gateway is killed before anything ran, another gateway runs the request.

    If the gateway is killed during a run, an LLM is run again, but user code is not.
    """
    first = start_gateway()
    invoker = first.invoker
    first.put_llm() if kind == "llm" else first.put_python()
    name, body = ("chat", {"prompt": "x", "max_tokens": 2}) if kind == "llm" else ("hello", {"n": 1})
    running = accept(first, name, **body)
    invoker.wait_for_demand()
    invoker.pace = threading.Semaphore(0)
    invoker.ready(f"guest/{name}", slots=1)
    assert invoker.entered.acquire(timeout=60)
    waiting = accept(first, name, **body)
    invoker.wait_for_demand()
    first.kill()
    invoker.pace = None
    second = start_gateway(THAW_GATEWAY_HEARTBEAT_S="0.5")
    ended = {i: second.ended(i) for i in (running, waiting)}
    assert ended[waiting].status.value == 0
    assert ended[running].status.value == (0 if kind == "llm" else 3)
    assert sum(r["activation_id"] == running for r in invoker.runs) == (2 if kind == "llm" else 1)
    assert sorted(r["activationId"] for r in second.read("activations")) == sorted(ended)


def test_what_was_claimed_of_a_gateway_that_lives_goes_back_to_it(start_gateway: Start, valkey_url: str) -> None:
    """A gateway's lease may end because the state server is away, for example.

    The function that the gateway runs is then neither run twice nor given up.
    """
    first = start_gateway(THAW_GATEWAY_HEARTBEAT_S="1000")  # so the other gateway is the one that claims
    invoker = first.invoker
    invoker.pace = threading.Semaphore(0)
    first.put_python()
    first.serve("hello", slots=2)
    activation_id = accept(first, n=1)
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
    assert first.ended(activation_id).result == {"n": 1}
    assert len(invoker.runs) == 1


def test_a_202_outlives_a_state_server_killed_right_after_it(start_gateway: Start, own_valkey: ValkeyServer) -> None:
    gateway = start_gateway(own_valkey.url)
    gateway.put_python()
    activation_id = accept(gateway, n=1)
    own_valkey.kill()
    own_valkey.start()
    gateway.invoker.ready("guest/hello")
    assert gateway.ended(activation_id).result == {"n": 1}
    assert len(gateway.invoker.runs) == 1


def test_a_function_marked_idempotent_is_run_again_when_its_worker_dies(gateway: GatewayProcess) -> None:
    gateway.serve_python(annotations=pairs(idempotent=True))
    gateway.invoker.cut_after.append(0)
    activation_id = accept(gateway, n=1)
    gateway.invoker.wait_for_demand()
    gateway.invoker.ready("guest/hello", instance="i1")
    assert gateway.ended(activation_id).result == {"n": 1}
    assert len(gateway.invoker.runs) == 2


@pytest.mark.parametrize("idempotent", [True, False])
def test_a_function_whose_process_was_killed_is_run_again_if_it_is_idempotent_and_else_says_what_killed_it(
    gateway: GatewayProcess, idempotent: bool
) -> None:
    said = "The function's process was killed by SIGKILL while it ran."
    killed = {"error": said, "info": {"code": "WorkerLost", "message": said, "hint": "it used more memory"}}
    answers = iter([(500, killed), (200, {"n": 1})])
    gateway.serve_python(annotations=pairs(idempotent=idempotent))
    gateway.invoker.function = lambda value: next(answers)
    activation_id = accept(gateway, n=1)
    if idempotent:
        gateway.invoker.wait_for_demand()
        gateway.invoker.ready("guest/hello", instance="i1")
    record = gateway.ended(activation_id)
    assert len(gateway.invoker.runs) == 1 + idempotent
    assert record.result == ({"n": 1} if idempotent else {"error": said, "hint": "it used more memory"})
    assert record.status.text == ("success" if idempotent else "whisk internal error")


def test_a_202_of_an_action_deleted_meanwhile_ends_and_says_so(gateway: GatewayProcess) -> None:
    gateway.put_python()
    activation_id = accept(gateway)
    gateway.invoker.wait_for_demand()
    gateway.call("DELETE", HELLO)
    record = gateway.ended(activation_id)
    assert record.status.value != 0
    assert "was deleted" in str(record.result)


def test_more_202s_than_runners_announce_their_demand_and_all_end(start_gateway: Start) -> None:
    gateway = start_gateway(THAW_GATEWAY_ASYNC_THREADS="2")
    gateway.put_python()
    ids = [accept(gateway, n=n) for n in range(8)]
    gateway.invoker.wait_for_demand(8)
    gateway.invoker.ready("guest/hello", slots=1)
    assert [gateway.ended(i).result for i in ids] == [{"n": n} for n in range(8)]
    assert len(gateway.invoker.runs) == 8
    assert pending(gateway) == 0
    gateway.invoker.wait_for_demand(0)


def test_202s_that_waited_for_a_runner_end_with_the_error_of_their_start(start_gateway: Start) -> None:
    """A failed start ended the requests' demand before they waited, so they announce it again."""
    gateway = start_gateway(THAW_GATEWAY_ASYNC_THREADS="2")
    gateway.put_python()
    ids = [accept(gateway, n=n) for n in range(4)]
    for waiting in (4, 2):
        found = gateway.invoker.wait_for_demand(waiting)
        for demand in found:  # the scheduler does this
            gateway.invoker.registry.drop_demand(demand.activation_id, demand.action, demand.gateway)
        gateway.invoker.start_failed(InitFailed("no main"), *found)
    assert [gateway.ended(i).result for i in ids] == [{"error": "no main"}] * 4
