"""How a namespace's models stand, for whoever shows it elsewhere, and updates that only say how many may run."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from relay.protocol.messages import StartFailed
from relay.state import bus
from tests.gateway.conftest import LLM_CONFIG, GatewayProcess
from tests.gateway.fake_invoker import FakeInvoker
from tests.scheduler.world import report
from thaw.errors import ModelNotFound, WorkerLost
from thaw.ids import ActionName, GroupId
from thaw.instance import InstanceState

ACTION = "/api/v1/namespaces/_/actions/chat"


def standings(gateway: GatewayProcess, known: str = "", wait_s: float = 0) -> dict[str, Any]:
    reply = gateway.call("GET", "/api/v1/namespaces/_/standings", params={"known": known, "wait_s": wait_s})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def chat(gateway: GatewayProcess, wanted: dict[str, Any] | None = None) -> dict[str, Any]:
    """How the model stands, as soon as that includes what is ``wanted``."""
    found = standings(gateway)
    while not (wanted or {}).items() <= found["actions"][0].items():
        before = found
        found = standings(gateway, found["token"], 20)
        assert found != before, f"still {before}"
    return dict(found["actions"][0])


def rescale(gateway: GatewayProcess, **scaling: Any) -> Any:
    return gateway.call("PUT", ACTION, params={"overwrite": "true"}, json={"scaling": scaling})


def test_a_model_stands_by_what_is_ready_and_what_starts(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    gateway.put_python()
    assert standings(gateway)["actions"] == []
    gateway.put_llm()
    found = chat(gateway)
    assert (found["name"], found["ready"], found["starting"], found["trouble"]) == ("chat", 0, 0, None)
    assert found["config"]["model"]["uri"] == "s3://models/tiny"
    record = invoker.ready("guest/chat")
    invoker.ready("guest/chat", instance="i1", group="b" * 32, n_stages=2)
    invoker.ready("guest/chat", instance="i2", group="b" * 32, n_stages=2, stage=1)
    chat(gateway, {"ready": 2, "starting": 0})
    invoker.registry.put_instance(replace(record, instance_id="i3", state=InstanceState.STARTING))  # type: ignore[arg-type]
    chat(gateway, {"ready": 2, "starting": 1})
    invoker.gone(record)
    chat(gateway, {"ready": 1, "starting": 1})


def test_whoever_waits_hears_of_a_change_and_of_no_other_namespace(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    gateway.put_llm()
    token = standings(gateway)["token"]
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(standings, gateway, token, 30)
        invoker.ready("other/chat", instance="i7")
        threading.Event().wait(0.1)  # no event can announce that nothing happens
        assert not waits.done()
        invoker.ready("guest/chat")
        assert waits.result(20)["actions"][0]["ready"] == 1


def test_a_failed_start_is_told_until_one_succeeds_or_the_action_changes(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    gateway.put_llm()
    starting = replace(invoker.ready("guest/chat"), state=InstanceState.STARTING, instance_id="i9")  # type: ignore[arg-type]
    error = ModelNotFound("s3://models/tiny is not there", hint="push it")
    error.printed = "a traceback"
    told = {"code": "ModelNotFound", "message": "s3://models/tiny is not there", "hint": "push it", "printed": ""}
    invoker.registry.put_instance(starting)
    invoker.gone(starting, error)
    chat(gateway, {"trouble": told})
    record = invoker.ready("guest/chat", instance="i1")
    chat(gateway, {"trouble": None, "ready": 2})
    invoker.gone(record, WorkerLost("it served, and was killed"))  # its requests went elsewhere
    assert chat(gateway, {"ready": 1})["trouble"] is None
    bus.publish(invoker.client, StartFailed(ActionName("guest/chat"), (), error.info(), GroupId("")))
    chat(gateway, {"trouble": told})
    gateway.call("PUT", ACTION, params={"overwrite": "true"}, json={"config": LLM_CONFIG})
    chat(gateway, {"trouble": None, "version": "0.0.2"})


def test_a_minimum_without_room_says_what_is_missing(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    gateway.put_llm(scaling={"min_instances": 1}, resources={"gpu_memory_mb": 1 << 20})
    assert "no host" in chat(gateway)["trouble"]["message"]
    invoker.registry.report_host(report("h0"))
    trouble = chat(gateway)["trouble"]
    assert trouble["code"] == "Unavailable"
    assert "needs 1048576 MiB" in trouble["message"]


def test_the_answer_to_a_cold_request_is_told_with_its_time_to_the_first_token(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    gateway.put_llm()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(gateway.chat)
        invoker.wait_for_demand()
        invoker.ready("guest/chat")
        assert answer.result(20).status_code == 200
    found = standings(gateway)
    while (told := found["actions"][0]["cold_start"]) is None:
        found = standings(gateway, found["token"], 20)
    assert told["start_mode"] == "cold"
    assert 0 <= told["ttft_ms"] < 60_000
    gateway.chat()  # a warm one says nothing
    assert chat(gateway)["cold_start"] == told


def test_how_many_may_run_changes_no_version_so_what_runs_goes_on(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    gateway.put_llm()
    invoker.ready("guest/chat")
    reply = rescale(gateway, min_instances=3)
    assert reply.status_code == 200, reply.text
    assert reply.json()["version"] == "0.0.1"
    entity = gateway.call("GET", ACTION).json()
    assert entity["config"]["scaling"]["min_instances"] == 3
    assert entity["config"]["model"] == LLM_CONFIG["model"]
    assert '"min_instances": 3' in entity["exec"]["code"]
    chat(gateway, {"ready": 1, "version": "0.0.1"})
    assert gateway.chat().status_code == 200  # on the instance that was there


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"scaling": {}}, "scaling takes"),
        ({"scaling": {"stages": 2}}, "scaling takes"),
        ({"scaling": {"min_instances": 1}, "config": LLM_CONFIG}, "put the rest into config"),
        ({"scaling": {"min_instances": -1}}, "$.scaling.min_instances"),
        ({"scaling": []}, "scaling takes"),
    ],
)
def test_a_scaling_that_says_more_is_refused(gateway: GatewayProcess, body: dict[str, Any], named: str) -> None:
    gateway.put_llm()
    reply = gateway.call("PUT", ACTION, params={"overwrite": "true"}, json=body)
    assert reply.status_code == 400
    assert named in reply.json()["error"]


def test_functions_with_code_have_no_scaling(gateway: GatewayProcess) -> None:
    gateway.put_python("chat")
    reply = rescale(gateway, min_instances=1)
    assert reply.status_code == 400
    assert "scaling is for models" in reply.json()["error"]
