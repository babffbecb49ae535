"""Pipeline groups as the gateway sees them: one route to the first stage, and the effects of a lost stage."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import requests

from tests.gateway.conftest import GatewayProcess, events_of, notes, text_of
from tests.gateway.fake_invoker import FakeInvoker
from tests.gateway.waits import until
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
    return notes(gateway.record(reply)).get("modelVersion")


def asked(invoker: FakeInvoker) -> list[str]:
    return [f"{run['path'].split('/')[2]}: {run['value']['body']['messages'][0]['content']}" for run in invoker.runs]


def test_an_action_is_shown_with_what_serves_it_and_with_what_that_becomes(gateway: GatewayProcess) -> None:
    gateway.put_llm()

    def shown() -> list[dict[str, object]]:
        gateway.wait_for_routes()
        found: list[dict[str, object]] = gateway.read("actions/chat")["instances"]
        return found

    assert gateway.read("actions/chat")["instances"] == []
    first, later = group(gateway.invoker, "a", slots=16, model_version="v1")
    where = {"host": first.host_id, "groupId": "a" * 32, "modelVersion": "v1"}
    assert shown() == [{"stages": 2, "slots": 16, **where}]
    for record, expected in (
        (replace(first, is_consolidating=True), {"stages": 2, "becoming": 1, "slots": 16}),
        (replace(later, is_consolidating=True), {"stages": 2, "becoming": 2, "slots": 16}),
        (later, {"stages": 2, "becoming": 1, "slots": 16}),
        (replace(first, n_stages=1, slots=8), {"stages": 1, "slots": 8}),
    ):
        gateway.invoker.registry.put_instance(record)
        until(lambda expected=expected: shown() == [{**expected, **where}])


def test_a_request_whose_group_is_lost_before_its_first_token_goes_before_those_that_came_later(
    gateway: GatewayProcess,
) -> None:
    gateway.put_llm()
    group(gateway.invoker, "a", slots=1, model_version="v1")
    gateway.invoker.pace = threading.Semaphore(0)

    def ask(content: str) -> requests.Response:
        return gateway.chat(max_tokens=1, messages=[{"role": "user", "content": content}])

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, "first")
        assert gateway.invoker.entered.acquire(timeout=60)
        later = pool.submit(ask, "later")
        (waiting,) = gateway.invoker.wait_for_demand()
        gateway.invoker.drop_runs()
        again, other = sorted(gateway.invoker.wait_for_demand(2), key=lambda d: d.queued_wall_ms)
        assert other == waiting
        assert again.queued_wall_ms < other.queued_wall_ms  # the request kept its age
        assert again.waited_ms > other.waited_ms
        gateway.invoker.pace = None
        group(gateway.invoker, "b", slots=1, model_version="v2")
        answers = [first.result(), later.result()]
    assert [(reply.status_code, model_version(gateway, reply)) for reply in answers] == [(200, "v2")] * 2
    assert asked(gateway.invoker) == ["a0: first", "b0: first", "b0: later"]
    assert [run["value"]["resume"] for run in gateway.invoker.runs] == [None, None, None]


@pytest.mark.parametrize("next_version", ["v1", "v2"])
def test_an_answer_whose_group_is_lost_goes_on_from_its_tokens_on_another_with_its_model_and_else_ends(
    gateway: GatewayProcess, next_version: str
) -> None:
    gateway.put_llm()
    first, follower = group(gateway.invoker, "a", model_version="v1")
    gateway.invoker.pace = threading.Semaphore(3)
    lost = WorkerLost("the container was killed")
    with gateway.chat(stream=True, max_tokens=6) as reply:
        events = events_of(reply.iter_lines())
        received = [next(events) for _ in range(4)]  # the role and three tokens
        gateway.invoker.gone(follower, lost)
        gateway.invoker.gone(first, lost)
        gateway.invoker.drop_runs()
        gateway.invoker.wait_for_demand()
        gateway.invoker.pace = None
        group(gateway.invoker, "b", model_version=next_version)
        received += list(events)
    assert model_version(gateway, reply) == "v1"
    if next_version == "v1":
        assert text_of(received) == "w0 w1 w2 w3 w4 w5 "
        assert gateway.invoker.runs[1]["value"]["resume"]["output_token_ids"] == [100, 101, 102]
    else:
        assert "version v1 of the model began it" in received[-1]["error"]["message"]
        assert len(gateway.invoker.runs) == 1
        assert gateway.chat(max_tokens=1).status_code == 200, "another request runs there"
