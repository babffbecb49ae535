"""Functions with adapters at the gateway: they wait for their pool's instances, and name the adapter to the host."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from relay.protocol.messages import RunPrompt
from relay.state.records import Records
from tests.gateway.conftest import OPERATOR_KEY, GatewayProcess, Start
from tests.gateway.event_client import Client
from tests.gateway.test_last_output import output
from tests.gateway.test_reconnect import goes_on, left, noted, reads
from thaw.action import Action
from thaw.ids import Namespace
from thaw.pools import is_pool


def adapted(adapter: str) -> dict[str, Any]:
    return {"base": "s3://models/base", "adapter": f"s3://models/{adapter}"}


def pools(gateway: GatewayProcess) -> list[Action]:
    return [a for a in Records(gateway.invoker.client).actions(Namespace("guest")) if is_pool(a)]


def pool_of(gateway: GatewayProcess) -> Action:
    (pool,) = pools(gateway)
    return pool


def deploy(gateway: GatewayProcess, *names: str, is_ready: bool = False) -> Action:
    """Deploy functions of one base, and return their pool."""
    for name in names:
        gateway.put_llm(name, model=adapted(name))
    pool = pool_of(gateway)
    if is_ready:
        gateway.invoker.ready(pool.name)
    return pool


def test_functions_of_one_base_are_answered_by_one_instance_and_each_names_its_adapter(gateway: GatewayProcess) -> None:
    deploy(gateway, "a", "b", is_ready=True)
    for name in ("a", "b"):
        reply = gateway.chat(model=name)
        assert reply.status_code == 200, reply.text
        assert gateway.record(reply)["name"] == name
    assert [run["adapter"] for run in gateway.invoker.runs] == ["s3://models/a", "s3://models/b"]


def update(gateway: GatewayProcess, name: str, **config: Any) -> None:
    gateway.put(f"actions/{name}?overwrite=true", config={"kind": "llm:vllm", **config})


@pytest.mark.parametrize(
    ("model", "changes", "moves"),
    [
        (adapted("a"), {"scaling": {"max_batch": 2}}, True),
        ({"uri": "s3://models/plain"}, {}, True),
        (adapted("a"), {}, False),
    ],
    ids=["other settings", "no adapter before", "only the adapter"],
)
def test_a_request_that_waits_goes_with_its_function_to_another_pool_and_adapter(
    gateway: GatewayProcess, model: dict[str, Any], changes: dict[str, Any], moves: bool
) -> None:
    gateway.put_llm("a", model=model)
    with gateway.chat(model="a", stream=True) as reply:
        (before,) = gateway.invoker.wait_for_demand()
        assert before.adapter == model.get("adapter", "")
        update(gateway, "a", model=adapted("new"), **changes)
        pool = pool_of(gateway)
        assert (pool.name != before.action) == moves
        gateway.invoker.ready(pool.name)
        assert b"[DONE]" in reply.content
    gateway.invoker.wait_for_demand(0)
    assert [run["adapter"] for run in gateway.invoker.runs] == ["s3://models/new"]


def test_a_request_that_waits_moves_with_its_function_out_of_a_pool(gateway: GatewayProcess) -> None:
    deploy(gateway, "a", "b")
    with gateway.chat(model="a", stream=True) as reply:
        gateway.invoker.wait_for_demand()
        update(gateway, "a", model={"uri": "s3://models/plain"})
        gateway.invoker.ready("guest/a", version="0.0.2")
        assert b"[DONE]" in reply.content
    assert [run["adapter"] for run in gateway.invoker.runs] == [None]


def test_a_request_whose_function_is_deleted_ends_though_its_pool_stays(gateway: GatewayProcess) -> None:
    deploy(gateway, "a", "b")
    with gateway.chat(model="a", stream=True) as of_a, gateway.chat(model="b", stream=True) as of_b:
        gateway.invoker.wait_for_demand(2)
        gateway.delete("actions/a")
        assert b"The action was deleted while the request waited for it." in of_a.content
        gateway.invoker.ready(pool_of(gateway).name)
        assert b"[DONE]" in of_b.content
    assert [run["adapter"] for run in gateway.invoker.runs] == ["s3://models/b"]


def test_the_queue_of_a_pool_has_the_cap_of_an_action(start_gateway: Start) -> None:
    gateway = start_gateway(THAW_QUEUE_PER_ACTION="1")
    deploy(gateway, "a", "b")
    with gateway.chat(model="a", stream=True) as waiting:
        (demand,) = gateway.invoker.wait_for_demand()
        refused = gateway.chat(model="b")
        assert refused.status_code == 429
        message = refused.json()["error"]["message"]
        assert message.startswith("Too many requests wait for guest/b and what shares its instances (count: 1,")
        gateway.invoker.ready(demand.action)
        assert b"[DONE]" in waiting.content


def test_a_pool_is_no_model_listed_nowhere_and_goes_with_its_last_function(gateway: GatewayProcess) -> None:
    pool = deploy(gateway, "a", "b")
    assert gateway.chat(model=pool.name.partition("/")[2]).status_code == 404
    listed = gateway.read("actions")
    models = gateway.call("GET", "/v1/models").json()["data"]
    assert sorted(a["name"] for a in listed) == sorted(m["id"] for m in models) == ["a", "b"]
    uses = gateway.call("GET", "/api/v1/thaw/models", key=OPERATOR_KEY).json()["actions"]
    assert {(u["action"], u["uri"]) for u in uses} == {
        (f"guest/{name}", f"s3://models/{part}") for name in ("a", "b") for part in ("base", name)
    }
    gateway.delete("actions/a")
    assert pools(gateway) == [pool]
    update(gateway, "b", model=adapted("b"), scaling={"max_batch": 2})
    assert pool_of(gateway).name != pool.name
    gateway.delete("actions/b")
    assert pools(gateway) == []


def test_the_adapter_must_be_allowed_too(gateway: GatewayProcess) -> None:
    model = {"base": "s3://models/base", "adapter": "https://elsewhere.example/a"}
    refused = gateway.put("actions/a", 403, config={"kind": "llm:vllm", "model": model})
    assert "https://elsewhere.example/a" in refused["error"]


def test_an_answer_goes_on_with_the_version_of_the_adapter_that_began_it(gateway: GatewayProcess) -> None:
    gateway.invoker.adapter = "s3://models/a#1"
    gateway.invoker.cut_after.append(2)
    pool = deploy(gateway, "a", is_ready=True)
    gateway.invoker.ready(pool.name, instance="i1", group="b" * 32)
    assert gateway.chat(model="a").status_code == 200
    _, second = gateway.invoker.runs
    assert second["value"]["resume"]["adapter"] == "s3://models/a#1"


def test_the_scaling_of_functions_that_share_instances_is_that_of_their_config(gateway: GatewayProcess) -> None:
    gateway.put_llm("a", model=adapted("a"), scaling={"max_instances": 3})
    assert gateway.read("scaling/a")["max_instances"] == 3
    assert "shares its instances" in gateway.put("scaling/a", 400, max_instances=2)["error"]


def test_the_instances_that_they_keep_count_once(start_gateway: Start) -> None:
    gateway = start_gateway(THAW_QUOTA_KEPT="2")
    for name in ("a", "b"):
        gateway.put_llm(name, model=adapted(name), scaling={"min_instances": 2})
    config = {"kind": "llm:vllm", "model": {"uri": "s3://models/x"}, "scaling": {"min_instances": 1}}
    assert "too many instances" in gateway.put("actions/c", 403, config=config)["error"]


def test_whoever_looks_sees_which_functions_share_an_instance(gateway: GatewayProcess) -> None:
    pool = deploy(gateway, "b", "a")
    gateway.invoker.ready(pool.name, model_version="aa" * 32)
    work = gateway.read("work")
    assert [w["action"] for w in work["workers"]] == [pool.name]
    assert work["shared"] == [{"action": pool.name, "functions": ["guest/a", "guest/b"]}]
    running = gateway.call("GET", "/api/v1/thaw/models", key=OPERATOR_KEY).json()["running"]
    assert [one["action"] for one in running] == ["guest/a", "guest/b"]
    gateway.invoker.outputs = [output("i1", "h0", 10) | {"action": pool.name}]
    gateway.invoker.report()
    for name in ("a", "b"):
        (found,) = gateway.read(f"logs/{name}")["outputs"]
        assert (found["action"], found["stderr"]) == (f"guest/{name}", "of i1")


def test_a_pool_that_is_made_anew_goes_on_with_its_instances(gateway: GatewayProcess) -> None:
    pool = deploy(gateway, "a", is_ready=True)
    gateway.wait_for_routes()
    gateway.delete("actions/a")
    assert pools(gateway) == []
    gateway.put_llm("b", model=adapted("b"))
    assert pools(gateway)[0].name == pool.name
    assert gateway.chat(model="b").status_code == 200


def test_a_warming_goes_with_its_function_to_another_pool(gateway: GatewayProcess) -> None:
    gateway.put_llm("a", model=adapted("a"))
    warmed = gateway.soon(gateway.call, "POST", "/api/v1/namespaces/_/warm/a?wait_s=30", timeout=60)
    (before,) = gateway.invoker.wait_for_demand()
    update(gateway, "a", model=adapted("a"), scaling={"max_batch": 2})
    pool = pool_of(gateway)
    assert pool.name != before.action
    gateway.invoker.ready(pool.name)
    told = warmed.result(60).json()
    assert (told["action"], told["state"]) == ("guest/a", "ready")
    gateway.invoker.wait_for_demand(0)


def test_a_client_goes_on_with_a_stream_that_went_to_another_pool_while_it_waited(gateway: GatewayProcess) -> None:
    gateway.put_llm("a", model=adapted("a"))
    gateway.invoker.pace = threading.Semaphore(2)
    client = Client(model="a")
    asking = client.ask_soon(gateway)
    gateway.invoker.wait_for_demand()
    update(gateway, "a", model=adapted("a"), scaling={"max_batch": 2})
    gateway.invoker.ready(pool_of(gateway).name)
    asking.join(20)
    client.read(2)
    client.hang_up()
    goes_on(client, gateway)
    assert len(gateway.invoker.runs) == 1


def test_a_stream_goes_on_at_another_gateway_with_the_adapter_that_began_it(start_gateway: Start) -> None:
    first, second = start_gateway(), start_gateway()
    first.invoker.adapter = "s3://models/a#1"
    deploy(first, "a", is_ready=True)
    for gateway in (first, second):
        gateway.wait_for_routes()
    client = left(first, 3, n_tokens=3, model="a")
    noted(first.state_url, client)
    goes_on(client, second)
    _, resumed = first.invoker.runs
    assert resumed["value"]["resume"]["adapter"] == "s3://models/a#1"


def test_the_tokens_of_a_text_are_told_without_the_adapter(gateway: GatewayProcess) -> None:
    gateway.put_llm("a", model=adapted("a"))
    gateway.invoker.prompt = RunPrompt((7, 8), "hi")
    asked = gateway.soon(gateway.call, "POST", "/tokenize", json={"model": "a", "prompt": "hi"})
    (demand,) = gateway.invoker.wait_for_demand()
    gateway.invoker.ready(demand.action)
    assert asked.result(30).json()["tokens"] == [7, 8]
    (run,) = gateway.invoker.runs
    assert (demand.adapter, run["adapter"], run["value"]["adapter"]) == ("", None, "")


def test_an_answer_whose_pool_is_gone_ends_with_the_name_of_its_function(gateway: GatewayProcess) -> None:
    pool = deploy(gateway, "a")
    record = gateway.invoker.ready(pool.name)
    client = reads(gateway, 2, model="a")
    gateway.delete("actions/a")
    gateway.invoker.drop_runs()
    gateway.invoker.gone(record)
    client.read_all()
    assert client.error["message"].startswith("guest/a was deleted, or has other settings than when it began")
