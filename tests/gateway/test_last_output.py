"""The last output of containers is requested from every host, and only for the caller's own namespace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from gateway.serving.dispatch import MAX_LOSSES
from tests.conftest import free_port
from tests.gateway.conftest import OTHER_KEY, GatewayProcess
from tests.gateway.fake_invoker import FakeInvoker
from tests.scheduler.world import report

PATH = "/api/v1/namespaces/_/logs/chat"


def output(instance_id: str, host: str, ended_wall_ms: int) -> dict[str, Any]:
    plain = {"action": "guest/chat", "stage": 0, "n_stages": 1, "reason": "", "stderr": f"of {instance_id}"}
    return {**plain, "instance_id": instance_id, "host_id": host, "ended_wall_ms": ended_wall_ms}


@pytest.fixture
def second(valkey_url: str) -> Iterator[FakeInvoker]:
    fake = FakeInvoker(valkey_url, "h1")
    yield fake
    fake.stop()


def test_the_hosts_answers_are_put_in_order_and_a_silent_host_is_named(
    gateway: GatewayProcess, invoker: FakeInvoker, second: FakeInvoker
) -> None:
    invoker.outputs = [output("i1", "h0", 10), output("i3", "h0", 30)]
    second.outputs = [output("i2", "h1", 20)]
    for fake in (invoker, second):
        invoker.registry.report_host(replace(report(fake.host), address=fake.address))
    found = gateway.call("GET", PATH).json()
    assert [o["stderr"] for o in found["outputs"]] == ["of i1", "of i2", "of i3"]
    assert found["unanswered"] == []
    invoker.registry.report_host(replace(report("h1"), address=f"127.0.0.1:{free_port()}"))
    found = gateway.call("GET", PATH).json()
    assert ([o["stderr"] for o in found["outputs"]], found["unanswered"]) == (["of i1", "of i3"], ["h1"])


def test_another_tenant_reads_none_of_it(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    invoker.outputs = [output("i1", "h0", 10)]
    invoker.registry.report_host(replace(report("h0"), address=invoker.address))
    headers = {"Authorization": f"Bearer {OTHER_KEY}"}
    gateway.session.auth = None
    assert gateway.call("GET", PATH, headers=headers).json()["outputs"] == []
    assert gateway.call("GET", PATH.replace("_", "guest"), headers=headers).status_code == 403


def test_an_answer_whose_last_worker_was_lost_has_its_last_words_in_its_logs(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    gateway.put_llm()
    n_workers = MAX_LOSSES + 1
    for k in range(n_workers):
        invoker.ready("guest/chat", instance=f"i{k}", group=f"{k:032x}")
    gateway.wait_for_routes(n_workers)
    invoker.cut_after.extend([0] * n_workers)
    invoker.log_lines = ["2026-01-01T00:00:00.0Z stderr: its last words"]
    reply = gateway.chat()
    assert reply.json()["error"]["code"] == "WorkerLost"
    assert gateway.record(reply.headers["X-Openwhisk-Activation-Id"])["logs"] == invoker.log_lines
