"""A stream whose host is emptied, from a client's side: a real gateway process, the registry, the record's trace."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from tests.gateway.conftest import GatewayProcess, Patched, Start, events_of, text_of
from tests.gateway.fake_invoker import FakeInvoker
from thaw.instance import InstanceState

PATIENT = "from gateway.serving.moving import move_rules; move_rules.SLOW_ROUND_S = move_rules.PATIENCE_S = 60.0"


@pytest.fixture
def gateway(start_gateway: Start, patched: Patched) -> GatewayProcess:
    """It moves a request on a busy machine, too, where its client would wait for longer than it should."""
    return start_gateway(**patched(PATIENT))


@pytest.mark.parametrize("resumable", [False, True])
def test_a_stream_moves_when_its_host_is_emptied_and_its_trace_says_how(
    gateway: GatewayProcess, elsewhere: FakeInvoker, resumable: bool
) -> None:
    record = gateway.serve_llm()
    gateway.invoker.pace = threading.Semaphore(2)
    headers = {"X-Thaw-Resumable": "1" if resumable else "0"}
    body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 500}
    with gateway.call("POST", "/v1/chat/completions", json=body, stream=True, headers=headers) as reply:
        activation_id = reply.headers["x-openwhisk-activation-id"]
        events = events_of(reply.iter_lines())
        received = [next(events), next(events)]
        gateway.invoker.registry.put_instance(replace(record, state=InstanceState.DRAINING, drained=True, inflight=1))
        gateway.wait_for_routes(0)
        gateway.invoker.pace.release()
        received.append(next(events))
        gateway.invoker.pace.release()
        (asked,) = gateway.invoker.wait_for_demand()
        assert (asked.activation_id, asked.action) == (activation_id, "guest/chat")
        elsewhere.ready("guest/chat", instance="i1", group="b" * 32)
        gateway.invoker.wait_for_demand(0)
        tick = threading.Event()
        while not any(not run["value"]["prefill_only"] for run in elsewhere.runs):
            tick.wait(0.01)
            if not elsewhere.running:  # between rounds, a token is needed for the switch
                assert len(received) < 500, "it ended where it was"
                gateway.invoker.pace.release()
                received.append(next(events))
        received += list(events)
    assert text_of(received) == "".join(f"w{i} " for i in range(500))

    assert gateway.ended(activation_id).host == "h1"
    trace = gateway.read(f"activations/{activation_id}/trace")["events"]
    begin, end = (next(e for e in trace if e["name"] == f"move.{edge}") for edge in ("begin", "end"))
    assert begin["attrs"] == {"from": "h0"}
    assert end["attrs"]["to"] == "h1"
    assert end["attrs"]["rounds"] >= 1
    assert end["attrs"]["pause_s"] > 0
    assert 'thaw_gateway_moves_total{way="moved"} 1.0' in gateway.call("GET", "/metrics").text
