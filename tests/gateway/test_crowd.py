"""Several gateways, and a state server that goes away."""

from __future__ import annotations

import threading

from tests.conftest import ValkeyServer
from tests.gateway.conftest import GatewayProcess, Start
from tests.gateway.waits import until
from thaw.errors import InstanceBusy


def test_two_gateways_share_an_instances_slots_and_every_request_is_answered(start_gateway: Start) -> None:
    gateways = [start_gateway(), start_gateway()]
    gateways[0].serve_llm(slots=2)
    gateways[0].invoker.refusals.extend([InstanceBusy("full")] * 5)
    replies = [gateways[n % 2].soon(gateways[n % 2].chat, max_tokens=2) for n in range(16)]
    assert {r.result().status_code for r in replies} == {200}


def test_an_action_changed_at_one_gateway_is_changed_at_the_other(start_gateway: Start) -> None:
    first, second = start_gateway(), start_gateway()
    first.serve_llm()
    assert second.chat(max_tokens=1).status_code == 200
    first.put("actions/chat?overwrite=true", limits={"timeout": 9000})
    until(lambda: second.read("actions/chat")["version"] == "0.0.2", most_s=60)  # the event takes a moment to arrive
    waiting = second.soon(second.chat, max_tokens=1)
    first.invoker.wait_for_demand()
    first.invoker.ready("guest/chat", instance="i1", version="0.0.2")
    assert waiting.result().status_code == 200
    assert "i1" in first.invoker.runs[-1]["path"]


def test_a_deleted_action_is_a_404_and_ends_who_waited_for_it(gateway: GatewayProcess) -> None:
    gateway.put_llm()
    waiting = gateway.soon(gateway.chat)
    gateway.invoker.wait_for_demand()
    gateway.delete("actions/chat")
    assert waiting.result().status_code == 404
    assert gateway.chat().json()["error"]["code"] == "model_not_found"


def test_a_warm_request_needs_no_state_server_and_its_record_is_written_when_it_is_back(
    start_gateway: Start, own_valkey: ValkeyServer
) -> None:
    gateway = start_gateway(own_valkey.url)
    gateway.serve_llm()  # events come in order, so the gateway has the event of the new action, too
    assert gateway.chat(max_tokens=1).status_code == 200
    own_valkey.kill()
    reply = gateway.chat(max_tokens=2)
    assert reply.json()["choices"][0]["message"]["content"] == "w0 w1 "
    cold = gateway.chat(model="nope")
    assert cold.status_code == 503
    own_valkey.start()
    gateway.wait_for_event("recorded_late")
    assert gateway.record(reply)["statusCode"] == 0


def test_a_request_that_waited_over_a_restart_of_the_state_server_is_still_served(
    start_gateway: Start, own_valkey: ValkeyServer
) -> None:
    gateway = start_gateway(own_valkey.url)
    gateway.put_llm()
    reply = gateway.soon(gateway.chat, max_tokens=2)
    gateway.invoker.wait_for_demand()
    own_valkey.kill()
    own_valkey.start()
    gateway.invoker.ready("guest/chat")
    assert reply.result().status_code == 200
    gateway.invoker.wait_for_demand(0)


def test_a_gateway_that_is_back_says_that_it_lives_before_it_says_who_waits(
    start_gateway: Start, own_valkey: ValkeyServer
) -> None:
    gateway = start_gateway(own_valkey.url, THAW_GATEWAY_HEARTBEAT_S="1000")
    gateway.put_llm()
    reply = gateway.soon(gateway.chat, max_tokens=2)
    (demand,) = gateway.invoker.wait_for_demand()
    gateway.invoker.registry.drop_demand(demand.activation_id, demand.action, demand.gateway)
    gateway.invoker.registry.forget_gateway(demand.gateway)
    own_valkey.kill()
    own_valkey.start()
    gateway.invoker.wait_for_demand()
    assert gateway.invoker.registry.is_gateway_alive(demand.gateway)
    gateway.invoker.ready("guest/chat")
    assert reply.result().status_code == 200


def test_a_stopping_gateway_finishes_its_streams(start_gateway: Start) -> None:
    gateway = start_gateway()
    gateway.serve_llm()
    gateway.invoker.pace = threading.Semaphore(1)
    with gateway.chat(stream=True, max_tokens=3) as reply:
        lines = reply.iter_lines()
        assert b"role" in next(lines)
        gateway.process.terminate()
        gateway.invoker.pace.release(2)
        assert b"data: [DONE]" in list(lines)
    gateway.stop()
    assert gateway.process.returncode == 0
