"""The last output of containers is requested from every host, and only for the caller's own namespace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gateway.serving.dispatch import MAX_LOSSES
from tests.conftest import free_port
from tests.gateway.conftest import OTHER_KEY, GatewayProcess
from tests.gateway.fake_invoker import FakeInvoker
from tests.scheduler.world import report


def output(instance_id: str, host: str, ended_wall_ms: int) -> dict[str, Any]:
    plain = {"action": "guest/chat", "stage": 0, "n_stages": 1, "reason": "", "stderr": f"of {instance_id}"}
    return {**plain, "instance_id": instance_id, "host_id": host, "ended_wall_ms": ended_wall_ms}


def test_the_hosts_answers_are_put_in_order_and_a_silent_host_is_named(
    gateway: GatewayProcess, elsewhere: FakeInvoker
) -> None:
    gateway.invoker.outputs = [output("i1", "h0", 10), output("i3", "h0", 30)]
    elsewhere.outputs = [output("i2", "h1", 20)]
    for fake in (gateway.invoker, elsewhere):
        fake.report()
    found = gateway.read("logs/chat")
    assert [o["stderr"] for o in found["outputs"]] == ["of i1", "of i2", "of i3"]
    assert found["unanswered"] == []
    gateway.invoker.registry.report_host(replace(report("h1"), address=f"127.0.0.1:{free_port()}"))
    found = gateway.read("logs/chat")
    assert ([o["stderr"] for o in found["outputs"]], found["unanswered"]) == (["of i1", "of i3"], ["h1"])


def test_another_tenant_reads_none_of_it(gateway: GatewayProcess) -> None:
    gateway.invoker.outputs = [output("i1", "h0", 10)]
    gateway.invoker.report()
    assert gateway.read("logs/chat", key=OTHER_KEY)["outputs"] == []
    assert gateway.call("GET", "/api/v1/namespaces/guest/logs/chat", key=OTHER_KEY).status_code == 403


def test_an_answer_is_given_up_after_its_fourth_lost_worker_whose_last_words_are_in_its_logs(
    gateway: GatewayProcess,
) -> None:
    gateway.put_llm()
    n_workers = MAX_LOSSES + 1
    for k in range(n_workers + 1):
        gateway.invoker.ready("guest/chat", instance=f"i{k}", group=f"{k:032x}")
    gateway.wait_for_routes(n_workers + 1)
    gateway.invoker.cut_after.extend([1] * n_workers)
    gateway.invoker.log_lines = ["2026-01-01T00:00:00.0Z stderr: its last words"]
    reply = gateway.chat(max_tokens=9)
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "WorkerLost")
    assert len(gateway.invoker.runs) == n_workers, "it is given up though another worker is there"
    assert gateway.record(reply)["logs"] == gateway.invoker.log_lines
