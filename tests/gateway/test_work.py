"""The work that runs, starts and waits: a namespace's part, an operator's whole, and requests held for a change."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from tests.gateway.conftest import OPERATOR_KEY, OTHER_KEY, GatewayProcess
from tests.relay.samples import PLAN
from thaw.ids import ActionName, GroupId

PATH = "/api/v1/namespaces/_/work"
GROUP = "c" * 32


def work(gateway: GatewayProcess, key: str = "", path: str = PATH, **params: Any) -> dict[str, Any]:
    reply = gateway.call("GET", path, key=key, params=params, timeout=60)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_a_namespace_sees_its_own_work_and_an_operator_all_of_it(gateway: GatewayProcess) -> None:
    gateway.put_llm()
    gateway.invoker.ready("guest/chat", instance="i0")
    gateway.invoker.starting("other/slow", instance="i1", group=GROUP)
    plan = replace(PLAN, group_id=GroupId(GROUP), action=ActionName("other/slow"), created_wall_ns=5_000_000_000)
    gateway.invoker.registry.put_plan(replace(plan, predicted_ttft_s=2.5))
    (own,) = work(gateway)["workers"]
    assert own.items() >= {"action": "guest/chat", "host": "h0", "state": "ready", "due_ms": None}.items()
    others = work(gateway, OTHER_KEY)["workers"]
    assert [(w["action"], w["state"], w["due_ms"]) for w in others] == [("other/slow", "starting", 7_500)]
    everything = work(gateway, OPERATOR_KEY, "/api/v1/thaw/work")["workers"]
    assert [w["action"] for w in everything] == ["guest/chat", "other/slow"]


def test_whoever_knows_the_last_answer_is_answered_when_it_is_out_of_date(gateway: GatewayProcess) -> None:
    gateway.put_llm()
    first = work(gateway)
    assert (first["workers"], first["waiting"]) == ([], [])
    assert work(gateway, known=first["mark"], wait_s=0.05)["mark"] == first["mark"], "the time is over"
    asked = gateway.soon(work, gateway, OPERATOR_KEY, PATH.replace("_", "admin"), wait_s=0)
    assert asked.result(20)["workers"] == []
    asked = gateway.soon(work, gateway, "", PATH, known=first["mark"], wait_s=30)
    threading.Event().wait(0.1)  # no event can announce that nothing happens
    assert not asked.done()
    answer = gateway.soon(gateway.chat)
    waits = asked.result(20)
    assert [(w["action"], w["n_requests"]) for w in waits["waiting"]] == [("guest/chat", 1)]
    gateway.invoker.ready("guest/chat")
    assert answer.result(20).status_code == 200
    now = work(gateway, known=waits["mark"], wait_s=30)
    assert now["mark"] != waits["mark"]
