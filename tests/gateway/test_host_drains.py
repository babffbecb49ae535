"""The work that is left on a host that is being emptied: the API's answer, and a request that waits for it."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import requests

from tests.gateway.conftest import OPERATOR_KEY, GatewayProcess
from tests.gateway.fake_invoker import FakeInvoker
from tests.scheduler.world import report
from thaw.instance import InstanceRecord, InstanceState

PATH = "/api/v1/thaw/hosts/h0/drain"


def as_operator(gateway: GatewayProcess, method: str, path: str, **more: Any) -> requests.Response:
    headers = {"Authorization": f"Bearer {OPERATOR_KEY}"}
    return requests.request(method, gateway.url + path, headers=headers, timeout=60, **more)


@pytest.fixture
def drained(gateway: GatewayProcess, invoker: FakeInvoker) -> GatewayProcess:
    invoker.registry.report_host(report("h0"))
    gateway.put_llm()
    gateway.put_python()
    assert as_operator(gateway, "PUT", PATH).json() == {"host": "h0", "draining": True}
    return gateway


def drains(invoker: FakeInvoker, record: InstanceRecord, inflight: int) -> None:
    invoker.registry.put_instance(replace(record, state=InstanceState.DRAINING, drained=True, inflight=inflight))


def left(gateway: GatewayProcess, known: Any = None, wait_s: float = 0) -> dict[str, Any]:
    params = {"wait_s": str(wait_s)} | ({} if known is None else {"known": json.dumps(known)})
    reply = as_operator(gateway, "GET", PATH, params=params)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_requests_of_models_move_and_functions_run_and_a_pipelines_first_stage_counts_for_all(
    drained: GatewayProcess, invoker: FakeInvoker
) -> None:
    empty = {"host": "h0", "draining": True, "moving": 0, "running": 0, "instances": 0}
    assert left(drained) == empty
    drains(invoker, invoker.ready("guest/chat", instance="i0", group="a" * 32), 3)
    drains(invoker, invoker.ready("guest/hello", instance="i1", group="b" * 32), 1)
    drains(invoker, invoker.ready("guest/deleted", instance="i2", group="c" * 32), 1)
    elsewhere = invoker.ready("guest/chat", instance="i3", group="d" * 32, n_stages=2)
    drains(invoker, replace(elsewhere, host_id="h1"), 4)  # type: ignore[arg-type]
    invoker.ready("guest/chat", instance="i4", group="d" * 32, stage=1, slots=0, n_stages=2)
    assert left(drained) == empty | {"moving": 3 + 4, "running": 2, "instances": 4}


def test_whoever_waits_is_answered_when_something_has_changed(drained: GatewayProcess, invoker: FakeInvoker) -> None:
    record = invoker.ready("guest/chat")
    drains(invoker, record, 2)
    known = left(drained)
    assert left(drained, known, wait_s=0.05) == known  # the time is over
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(left, drained, known, 30)
        threading.Event().wait(0.1)  # no event can announce that nothing happens
        assert not waits.done()
        drains(invoker, record, 1)
        assert waits.result(20) == known | {"moving": 1}
        waits = pool.submit(left, drained, known | {"moving": 1}, 30)
        invoker.gone(record)
        assert waits.result(20) == known | {"moving": 0, "instances": 0}


@pytest.mark.parametrize(
    "params", [{"wait_s": "31"}, {"wait_s": "-1"}, {"wait_s": "nan"}, {"wait_s": "x"}, {"known": "["}]
)
def test_a_wait_that_cannot_be_is_refused(drained: GatewayProcess, params: dict[str, str]) -> None:
    assert as_operator(drained, "GET", PATH, params=params).status_code == 400


def test_a_host_that_never_reported_is_not_found(gateway: GatewayProcess) -> None:
    assert as_operator(gateway, "GET", "/api/v1/thaw/hosts/nowhere/drain").status_code == 404
