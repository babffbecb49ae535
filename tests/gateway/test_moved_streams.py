"""A stream whose host is emptied, from a client's side: a real gateway process, the registry, the record's trace."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gateway.conftest import ROOT, GatewayProcess, wait_for_record
from tests.gateway.fake_invoker import FakeInvoker
from thaw.instance import InstanceState

PATIENT = """
from gateway.serving.moving import move_rules
move_rules.SLOW_ROUND_S = move_rules.PATIENCE_S = 60.0
"""


@pytest.fixture
def gateway(start_gateway: Callable[..., GatewayProcess], tmp_path: Path) -> GatewayProcess:
    """It moves a request on a busy machine, too, where its client would wait for longer than it should."""
    (tmp_path / "sitecustomize.py").write_text(PATIENT)
    return start_gateway(PYTHONPATH=f"{tmp_path}:{ROOT}")


@pytest.fixture
def elsewhere(valkey_url: str) -> Iterator[FakeInvoker]:
    fake = FakeInvoker(valkey_url, "h1")
    yield fake
    fake.stop()


@pytest.mark.parametrize("resumable", [False, True])
def test_a_stream_moves_when_its_host_is_emptied_and_its_trace_says_how(
    gateway: GatewayProcess, invoker: FakeInvoker, elsewhere: FakeInvoker, valkey_url: str, resumable: bool
) -> None:
    gateway.put_llm()
    record = invoker.ready("guest/chat")
    gateway.wait_for_routes()
    invoker.pace = threading.Semaphore(2)
    headers = {"X-Thaw-Resumable": "1" if resumable else "0"}
    body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 500}
    with gateway.call("POST", "/v1/chat/completions", json=body, stream=True, headers=headers) as reply:
        activation_id = reply.headers["x-openwhisk-activation-id"]
        lines = (line for line in reply.iter_lines() if line.startswith(b"data: {"))
        received = [next(lines), next(lines)]
        invoker.registry.put_instance(replace(record, state=InstanceState.DRAINING, drained=True, inflight=1))
        gateway.wait_for_routes(0)
        invoker.pace.release()
        received.append(next(lines))
        invoker.pace.release()
        (asked,) = invoker.wait_for_demand()
        assert (asked.activation_id, asked.action) == (activation_id, "guest/chat")
        elsewhere.ready("guest/chat", instance="i1", group="b" * 32)
        invoker.wait_for_demand(0)
        tick = threading.Event()
        while not any(not run["value"]["prefill_only"] for run in elsewhere.runs):
            tick.wait(0.01)
            if not elsewhere.running:  # between rounds, a token is needed for the switch
                assert len(received) < 500, "it ended where it was"
                invoker.pace.release()
                received.append(next(lines))
        received += list(lines)
    deltas = [json.loads(line.removeprefix(b"data: "))["choices"][0]["delta"] for line in received]
    assert "".join(d.get("content") or "" for d in deltas) == "".join(f"w{i} " for i in range(500))

    assert wait_for_record(valkey_url, activation_id).host == "h1"
    trace = gateway.call("GET", f"/api/v1/namespaces/_/activations/{activation_id}/trace").json()["events"]
    begin, end = (next(e for e in trace if e["name"] == f"move.{edge}") for edge in ("begin", "end"))
    assert begin["attrs"] == {"from": "h0"}
    assert end["attrs"]["to"] == "h1"
    assert end["attrs"]["rounds"] >= 1
    assert end["attrs"]["pause_s"] > 0
    assert 'thaw_gateway_moves_total{way="moved"} 1.0' in gateway.call("GET", "/metrics").text
