"""The work that runs, starts and waits: a namespace's part, an operator's whole, and requests held for a change."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import requests

from tests.gateway.conftest import KEY, OPERATOR_KEY, OTHER_KEY, GatewayProcess
from tests.gateway.fake_invoker import FakeInvoker
from tests.relay.samples import PLAN
from thaw.ids import ActionName, GroupId

PATH = "/api/v1/namespaces/_/work"
GROUP = "c" * 32


def work(gateway: GatewayProcess, key: str | None = None, path: str = PATH, **params: Any) -> dict[str, Any]:
    if key is None:
        reply = gateway.call("GET", path, params=params, timeout=60)
    else:
        headers = {"Authorization": f"Bearer {key}"}
        reply = requests.get(gateway.url + path, headers=headers, params=params, timeout=60)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_a_namespace_sees_its_own_work_and_an_operator_all_of_it(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    gateway.put_llm()
    invoker.ready("guest/chat", instance="i0")
    invoker.starting("other/slow", instance="i1", group=GROUP)
    invoker.registry.put_plan(
        replace(
            PLAN,
            group_id=GroupId(GROUP),
            action=ActionName("other/slow"),
            created_wall_ns=5_000_000_000,
            predicted_ttft_s=2.5,
        )
    )
    own = work(gateway)
    assert [(w["action"], w["host"], w["state"], w["due_ms"]) for w in own["workers"]] == [
        ("guest/chat", "h0", "ready", None)
    ]
    others = work(gateway, OTHER_KEY)["workers"]
    assert [(w["action"], w["state"], w["due_ms"]) for w in others] == [("other/slow", "starting", 7_500)]
    everything = work(gateway, OPERATOR_KEY, "/api/v1/thaw/work")["workers"]
    assert [w["action"] for w in everything] == ["guest/chat", "other/slow"]


def test_whoever_knows_the_last_answer_is_answered_when_it_is_out_of_date(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    gateway.put_llm()
    first = work(gateway)
    assert (first["workers"], first["waiting"]) == ([], [])
    assert work(gateway, known=first["mark"], wait_s=0.05)["mark"] == first["mark"], "the time is over"
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(work, gateway, OPERATOR_KEY, PATH.replace("_", "admin"), wait_s=0)
        assert asked.result(20)["workers"] == []
        asked = pool.submit(work, gateway, None, PATH, known=first["mark"], wait_s=30)
        threading.Event().wait(0.1)  # no event can announce that nothing happens
        assert not asked.done()
        answer = pool.submit(
            requests.post,
            f"{gateway.url}/v1/chat/completions",
            headers={"Authorization": f"Bearer {KEY}"},
            json={"model": "chat", "messages": [{"role": "user", "content": "hi"}]},
            timeout=60,
        )
        waits = asked.result(20)
        assert [(w["action"], w["n_requests"]) for w in waits["waiting"]] == [("guest/chat", 1)]
        invoker.ready("guest/chat")
        assert answer.result(20).status_code == 200
    now = work(gateway, known=waits["mark"], wait_s=30)
    assert now["mark"] != waits["mark"]
