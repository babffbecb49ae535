"""Several gateways, and a state server that goes away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tests.conftest import ValkeyServer
from tests.gateway.conftest import KEY, GatewayProcess, add_key
from tests.gateway.fake_invoker import FakeInvoker
from thaw.errors import InstanceBusy


def test_two_gateways_share_an_instances_slots_and_every_request_is_answered(
    start_gateway: Callable[..., GatewayProcess], invoker: FakeInvoker
) -> None:
    gateways = [start_gateway(), start_gateway()]
    gateways[0].put_llm()
    invoker.ready("guest/chat", slots=2)
    invoker.refusals.extend([InstanceBusy("full")] * 5)
    with ThreadPoolExecutor(16) as pool:
        replies = [pool.submit(gateways[n % 2].chat, max_tokens=2) for n in range(16)]
        assert {r.result().status_code for r in replies} == {200}


def test_an_action_changed_at_one_gateway_is_changed_at_the_other(
    start_gateway: Callable[..., GatewayProcess], invoker: FakeInvoker
) -> None:
    first, second = start_gateway(), start_gateway()
    first.put_llm()
    invoker.ready("guest/chat")
    assert second.chat(max_tokens=1).status_code == 200
    path = "/api/v1/namespaces/_/actions/chat"
    assert first.call("PUT", f"{path}?overwrite=true", json={"limits": {"timeout": 9000}}).status_code == 200
    until_s = time.monotonic() + 60
    while second.call("GET", path).json()["version"] != "0.0.2":  # the event takes a moment to arrive
        assert time.monotonic() < until_s
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.chat, max_tokens=1)
        invoker.wait_for_demand()
        invoker.ready("guest/chat", instance="i1", version="0.0.2")
        assert waiting.result().status_code == 200
    assert "i1" in invoker.runs[-1]["path"]


def test_a_deleted_action_is_a_404_and_ends_who_waited_for_it(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    gateway.put_llm()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gateway.chat)
        invoker.wait_for_demand()
        gateway.call("DELETE", "/api/v1/namespaces/_/actions/chat")
        assert waiting.result().status_code == 404
    assert gateway.chat().json()["error"]["code"] == "model_not_found"


def test_a_warm_request_needs_no_state_server_and_its_record_is_written_when_it_is_back(
    own_valkey: ValkeyServer,
) -> None:
    add_key(own_valkey.url, KEY, "guest")
    gateway, invoker = GatewayProcess(own_valkey.url), FakeInvoker(own_valkey.url)
    try:
        gateway.put_llm()
        invoker.ready("guest/chat")
        gateway.wait_for_routes()  # events come in order, so the gateway has the earlier event of the new action too
        assert gateway.chat(max_tokens=1).status_code == 200
        own_valkey.kill()
        reply = gateway.chat(max_tokens=2)
        assert reply.json()["choices"][0]["message"]["content"] == "w0 w1 "
        cold = gateway.chat(model="nope")
        assert cold.status_code == 503
        own_valkey.start()
        gateway.wait_for_event("recorded_late")
        assert gateway.record(reply.headers["X-Openwhisk-Activation-Id"])["statusCode"] == 0
    finally:
        invoker.stop()
        gateway.stop()


def test_a_request_that_waited_over_a_restart_of_the_state_server_is_still_served(own_valkey: ValkeyServer) -> None:
    add_key(own_valkey.url, KEY, "guest")
    gateway, invoker = GatewayProcess(own_valkey.url), FakeInvoker(own_valkey.url)
    try:
        gateway.put_llm()
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(gateway.chat, max_tokens=2)
            invoker.wait_for_demand()
            own_valkey.kill()
            own_valkey.start()
            invoker.ready("guest/chat")
            assert reply.result().status_code == 200
        invoker.wait_for_demand(0)
    finally:
        invoker.stop()
        gateway.stop()


def test_a_gateway_that_is_back_says_that_it_lives_before_it_says_who_waits(own_valkey: ValkeyServer) -> None:
    add_key(own_valkey.url, KEY, "guest")
    gateway = GatewayProcess(own_valkey.url, THAW_GATEWAY_HEARTBEAT_S="1000")
    invoker = FakeInvoker(own_valkey.url)
    try:
        gateway.put_llm()
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(gateway.chat, max_tokens=2)
            (demand,) = invoker.wait_for_demand()
            invoker.registry.drop_demand(demand.activation_id, demand.action, demand.gateway)
            invoker.registry.forget_gateway(demand.gateway)
            own_valkey.kill()
            own_valkey.start()
            invoker.wait_for_demand()
            assert invoker.registry.is_gateway_alive(demand.gateway)
            invoker.ready("guest/chat")
            assert reply.result().status_code == 200
    finally:
        invoker.stop()
        gateway.stop()


def test_a_stopping_gateway_finishes_its_streams(
    start_gateway: Callable[..., GatewayProcess], invoker: FakeInvoker
) -> None:
    gateway = start_gateway()
    gateway.put_llm()
    invoker.ready("guest/chat")
    gateway.wait_for_routes()
    invoker.pace = threading.Semaphore(1)
    with gateway.chat(stream=True, max_tokens=3) as reply:
        lines = reply.iter_lines()
        assert b"role" in next(lines)
        gateway.process.terminate()
        invoker.pace.release(2)
        assert b"data: [DONE]" in list(lines)
    gateway.stop()
    assert gateway.process.returncode == 0
