"""The work that is left on a host that is being emptied: the API's answer, and a request that waits for it."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import pytest

from tests.gateway.conftest import OPERATOR_KEY, GatewayProcess
from tests.scheduler.world import report
from thaw.instance import InstanceRecord, InstanceState

PATH = "/api/v1/thaw/hosts/h0/drain"


@pytest.fixture
def drained(gateway: GatewayProcess) -> GatewayProcess:
    gateway.invoker.registry.report_host(report("h0"))
    gateway.put_llm()
    gateway.put_python()
    assert gateway.call("PUT", PATH, key=OPERATOR_KEY).json() == {"host": "h0", "draining": True}
    return gateway


def drains(gateway: GatewayProcess, record: InstanceRecord, inflight: int) -> None:
    draining = replace(record, state=InstanceState.DRAINING, drained=True, inflight=inflight)
    gateway.invoker.registry.put_instance(draining)


def left(gateway: GatewayProcess, known: Any = None, wait_s: float = 0) -> dict[str, Any]:
    params = {"wait_s": str(wait_s)} | ({} if known is None else {"known": json.dumps(known)})
    reply = gateway.call("GET", PATH, params=params, key=OPERATOR_KEY)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_requests_of_models_move_and_functions_run_and_a_pipelines_first_stage_counts_for_all(
    drained: GatewayProcess,
) -> None:
    empty = {"host": "h0", "draining": True, "moving": 0, "running": 0, "instances": 0}
    assert left(drained) == empty
    drains(drained, drained.invoker.ready("guest/chat", instance="i0", group="a" * 32), 3)
    drains(drained, drained.invoker.ready("guest/hello", instance="i1", group="b" * 32), 1)
    drains(drained, drained.invoker.ready("guest/deleted", instance="i2", group="c" * 32), 1)
    elsewhere = drained.invoker.ready("guest/chat", instance="i3", group="d" * 32, n_stages=2)
    drains(drained, replace(elsewhere, host_id="h1"), 4)  # type: ignore[arg-type]
    drained.invoker.ready("guest/chat", instance="i4", group="d" * 32, stage=1, slots=0, n_stages=2)
    assert left(drained) == empty | {"moving": 3 + 4, "running": 2, "instances": 4}


def test_whoever_waits_is_answered_when_something_has_changed(drained: GatewayProcess) -> None:
    record = drained.invoker.ready("guest/chat")
    drains(drained, record, 2)
    known = left(drained)
    assert left(drained, known, wait_s=0.05) == known  # the time is over
    waits = drained.soon(left, drained, known, 30)
    threading.Event().wait(0.1)  # no event can announce that nothing happens
    assert not waits.done()
    drains(drained, record, 1)
    assert waits.result(20) == known | {"moving": 1}
    waits = drained.soon(left, drained, known | {"moving": 1}, 30)
    drained.invoker.gone(record)
    assert waits.result(20) == known | {"moving": 0, "instances": 0}


def test_a_wait_that_cannot_be_is_refused(drained: GatewayProcess) -> None:
    for params in ({"wait_s": "31"}, {"wait_s": "-1"}, {"wait_s": "nan"}, {"wait_s": "x"}, {"known": "["}):
        assert drained.call("GET", PATH, params=params, key=OPERATOR_KEY).status_code == 400, params
