"""Pipeline groups as the gateway sees them: one route to the first stage, and the effects of a lost stage."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import requests

from tests.gateway.conftest import GatewayProcess
from tests.gateway.fake_invoker import FakeInvoker
from thaw.errors import WorkerLost
from thaw.instance import InstanceRecord


def group(
    invoker: FakeInvoker, name: str, *, slots: int = 8, model_version: str = ""
) -> tuple[InstanceRecord, InstanceRecord]:
    """Make both stages READY.  The follower is first, because the first stage need not be ready first."""
    both: dict[str, Any] = {"group": name * 32, "n_stages": 2, "model_version": model_version}
    follower = invoker.ready("guest/chat", instance=f"{name}1", stage=1, slots=0, **both)
    return invoker.ready("guest/chat", instance=f"{name}0", slots=slots, **both), follower


def model_version(gateway: GatewayProcess, reply: requests.Response) -> object:
    record = gateway.record(reply.headers["X-Openwhisk-Activation-Id"])
    return {a["key"]: a["value"] for a in record["annotations"]}.get("modelVersion")


def asked(invoker: FakeInvoker) -> list[str]:
    return [f"{run['path'].split('/')[2]}: {run['value']['body']['messages'][0]['content']}" for run in invoker.runs]


def test_requests_go_to_the_first_stage(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    gateway.put_llm()
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(gateway.chat, max_tokens=2)
        invoker.wait_for_demand()
        invoker.ready("guest/chat", instance="a1", group="a" * 32, stage=1, slots=0, n_stages=2)
        invoker.ready("guest/chat", instance="a0", group="a" * 32, n_stages=2)
        assert reply.result().status_code == 200
    assert asked(invoker) == ["a0: hi"]


def test_an_action_is_shown_with_what_serves_it_and_with_what_that_becomes(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    gateway.put_llm()

    def shown() -> list[dict[str, object]]:
        gateway.wait_for_routes()
        found: list[dict[str, object]] = gateway.call("GET", "/api/v1/namespaces/_/actions/chat").json()["instances"]
        return found

    assert gateway.call("GET", "/api/v1/namespaces/_/actions/chat").json()["instances"] == []
    first, later = group(invoker, "a", slots=16, model_version="v1")
    where = {"host": first.host_id, "groupId": "a" * 32, "modelVersion": "v1"}
    assert shown() == [{"stages": 2, "slots": 16, **where}]
    for record, expected in (
        (replace(first, is_consolidating=True), {"stages": 2, "becoming": 1, "slots": 16}),
        (replace(later, is_consolidating=True), {"stages": 2, "becoming": 2, "slots": 16}),
        (later, {"stages": 2, "becoming": 1, "slots": 16}),
        (replace(first, n_stages=1, slots=8), {"stages": 1, "slots": 8}),
    ):
        invoker.registry.put_instance(record)
        until_s = time.monotonic() + 20
        while shown() != [{**expected, **where}]:
            assert time.monotonic() < until_s


def test_a_request_whose_group_is_lost_before_its_first_token_goes_before_those_that_came_later(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    gateway.put_llm()
    group(invoker, "a", slots=1, model_version="v1")
    invoker.pace = threading.Semaphore(0)

    def ask(content: str) -> requests.Response:
        return gateway.chat(max_tokens=1, messages=[{"role": "user", "content": content}])

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, "first")
        assert invoker.entered.acquire(timeout=60)
        later = pool.submit(ask, "later")
        (waiting,) = invoker.wait_for_demand()
        invoker.drop_runs()
        again, other = sorted(invoker.wait_for_demand(2), key=lambda d: d.queued_wall_ms)
        assert other == waiting
        assert again.queued_wall_ms < other.queued_wall_ms  # the request kept its age
        assert again.waited_ms > other.waited_ms
        invoker.pace = None
        group(invoker, "b", slots=1, model_version="v2")
        answers = [first.result(), later.result()]
    assert [(reply.status_code, model_version(gateway, reply)) for reply in answers] == [(200, "v2")] * 2
    assert asked(invoker) == ["a0: first", "b0: first", "b0: later"]
    assert [run["value"]["resume"] for run in invoker.runs] == [None, None, None]


def test_an_answer_whose_group_is_lost_goes_on_from_its_tokens_on_another(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    gateway.put_llm()
    first, follower = group(invoker, "a", model_version="v1")
    invoker.pace = threading.Semaphore(3)
    with gateway.chat(stream=True, max_tokens=6) as reply:
        lines = (line for line in reply.iter_lines() if line.startswith(b"data: {"))
        received = [next(lines) for _ in range(4)]  # the role and three tokens
        lost = WorkerLost("the container was killed")
        invoker.gone(follower, lost)
        invoker.gone(first, lost)
        invoker.drop_runs()
        invoker.wait_for_demand()
        invoker.pace = None
        group(invoker, "b", model_version="v1")
        received += list(lines)
    assert model_version(gateway, reply) == "v1"
    deltas = [json.loads(line.removeprefix(b"data: "))["choices"][0]["delta"] for line in received]
    assert "".join(d.get("content") or "" for d in deltas) == "w0 w1 w2 w3 w4 w5 "
    resumed = invoker.runs[1]["value"]["resume"]["output_token_ids"]
    assert resumed == list(range(100, 100 + len(resumed)))
    assert len(resumed) == 3


def test_an_answer_that_an_older_model_began_ends_when_only_a_newer_one_serves(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    gateway.put_llm()
    first, follower = group(invoker, "a", model_version="v1")
    invoker.pace = threading.Semaphore(3)
    with gateway.chat(stream=True, max_tokens=6) as reply:
        lines = (line for line in reply.iter_lines() if line.startswith(b"data: {"))
        received = [next(lines) for _ in range(3)]
        invoker.gone(follower)
        invoker.gone(first)
        invoker.drop_runs()
        invoker.wait_for_demand()
        invoker.pace = None
        group(invoker, "b", model_version="v2")
        received += list(lines)
    assert "version v1 of the model began it" in json.loads(received[-1].removeprefix(b"data: "))["error"]["message"]
    assert (len(invoker.runs), model_version(gateway, reply)) == (1, "v1")
    assert gateway.chat(max_tokens=1).status_code == 200, "another request runs there"
