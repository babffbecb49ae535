"""Functions with adapters at the gateway: they wait for their pool's instances, and name the adapter to the host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from relay.protocol.messages import RunPrompt
from relay.state.records import Records
from tests.gateway.conftest import OPERATOR_KEY, GatewayProcess
from tests.gateway.event_client import Client
from tests.gateway.fake_invoker import FakeInvoker
from tests.gateway.test_last_output import output
from tests.gateway.test_reconnect import noted
from thaw.action import Action
from thaw.ids import Namespace
from thaw.pools import is_pool


def adapted(adapter: str) -> dict[str, Any]:
    return {"base": "s3://models/base", "adapter": f"s3://models/{adapter}"}


def pools(invoker: FakeInvoker) -> list[Action]:
    return [a for a in Records(invoker.client).actions(Namespace("guest")) if is_pool(a)]


def test_functions_of_one_base_are_answered_by_one_instance_and_each_names_its_adapter(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    for name in ("a", "b"):
        gateway.put_llm(name, model=adapted(name))
    (pool,) = pools(invoker)
    invoker.ready(pool.name)
    for name in ("a", "b"):
        reply = gateway.chat(model=name)
        assert reply.status_code == 200, reply.text
        assert gateway.record(reply.headers["X-Openwhisk-Activation-Id"])["name"] == name
    assert [run["adapter"] for run in invoker.runs] == ["s3://models/a", "s3://models/b"]


def test_a_request_that_waits_is_demand_of_the_pool(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    gateway.put_llm("a", model=adapted("a"))
    (pool,) = pools(invoker)
    with gateway.chat(model="a", stream=True) as reply:
        (demand,) = invoker.wait_for_demand()
        assert (demand.action, demand.adapter) == (pool.name, "s3://models/a")
        invoker.ready(pool.name)
        assert b"[DONE]" in reply.content


def update(gateway: GatewayProcess, name: str, **config: Any) -> None:
    body = {"config": {"kind": "llm:vllm", **config}}
    reply = gateway.call("PUT", f"/api/v1/namespaces/_/actions/{name}?overwrite=true", json=body)
    assert reply.status_code == 200, reply.text


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
    gateway: GatewayProcess, invoker: FakeInvoker, model: dict[str, Any], changes: dict[str, Any], moves: bool
) -> None:
    gateway.put_llm("a", model=model)
    with gateway.chat(model="a", stream=True) as reply:
        (before,) = invoker.wait_for_demand()
        update(gateway, "a", model=adapted("new"), **changes)
        (pool,) = pools(invoker)
        assert (pool.name != before.action) == moves
        invoker.ready(pool.name)
        assert b"[DONE]" in reply.content
    invoker.wait_for_demand(0)
    assert [run["adapter"] for run in invoker.runs] == ["s3://models/new"]


def test_a_request_that_waits_moves_with_its_function_out_of_a_pool(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    for name in ("a", "b"):
        gateway.put_llm(name, model=adapted(name))
    with gateway.chat(model="a", stream=True) as reply:
        invoker.wait_for_demand()
        update(gateway, "a", model={"uri": "s3://models/plain"})
        invoker.ready("guest/a", version="0.0.2")
        assert b"[DONE]" in reply.content
    assert [run["adapter"] for run in invoker.runs] == [None]


def test_a_request_whose_function_is_deleted_ends_though_its_pool_stays(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    for name in ("a", "b"):
        gateway.put_llm(name, model=adapted(name))
    with gateway.chat(model="a", stream=True) as of_a, gateway.chat(model="b", stream=True) as of_b:
        invoker.wait_for_demand(2)
        gateway.call("DELETE", "/api/v1/namespaces/_/actions/a")
        assert b"The action was deleted while the request waited for it." in of_a.content
        (pool,) = pools(invoker)
        invoker.ready(pool.name)
        assert b"[DONE]" in of_b.content
    assert [run["adapter"] for run in invoker.runs] == ["s3://models/b"]


def test_the_queue_of_a_pool_has_the_cap_of_an_action(
    start_gateway: Callable[..., GatewayProcess], invoker: FakeInvoker
) -> None:
    gateway = start_gateway(THAW_QUEUE_PER_ACTION="1")
    for name in ("a", "b"):
        gateway.put_llm(name, model=adapted(name))
    with gateway.chat(model="a", stream=True) as waiting:
        (demand,) = invoker.wait_for_demand()
        refused = gateway.chat(model="b")
        assert refused.status_code == 429
        message = refused.json()["error"]["message"]
        assert message.startswith("Too many requests wait for guest/b and what shares its instances (count: 1,")
        invoker.ready(demand.action)
        assert b"[DONE]" in waiting.content


def test_a_pool_is_no_model(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    gateway.put_llm("a", model=adapted("a"))
    (pool,) = pools(invoker)
    assert gateway.chat(model=pool.name.partition("/")[2]).status_code == 404


def test_a_pool_is_listed_nowhere_and_goes_with_its_last_function(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    for name in ("a", "b"):
        gateway.put_llm(name, model=adapted(name))
    (pool,) = pools(invoker)
    listed = gateway.call("GET", "/api/v1/namespaces/_/actions").json()
    models = gateway.call("GET", "/v1/models").json()["data"]
    assert sorted(a["name"] for a in listed) == sorted(m["id"] for m in models) == ["a", "b"]
    bearer = {"Authorization": f"Bearer {OPERATOR_KEY}"}
    gateway.session.auth, auth = None, gateway.session.auth
    uses = gateway.call("GET", "/api/v1/thaw/models", headers=bearer).json()["actions"]
    gateway.session.auth = auth
    assert {(u["action"], u["uri"]) for u in uses} == {
        (f"guest/{name}", f"s3://models/{part}") for name in ("a", "b") for part in ("base", name)
    }
    gateway.call("DELETE", "/api/v1/namespaces/_/actions/a")
    assert pools(invoker) == [pool]
    reply = gateway.call(
        "PUT",
        "/api/v1/namespaces/_/actions/b?overwrite=true",
        json={"config": {"kind": "llm:vllm", "model": adapted("b"), "scaling": {"max_batch": 2}}},
    )
    assert reply.status_code == 200, reply.text
    (other,) = pools(invoker)
    assert other.name != pool.name
    gateway.call("DELETE", "/api/v1/namespaces/_/actions/b")
    assert pools(invoker) == []


def test_the_adapter_must_be_allowed_too(gateway: GatewayProcess) -> None:
    model = {"base": "s3://models/base", "adapter": "https://elsewhere.example/a"}
    reply = gateway.call("PUT", "/api/v1/namespaces/_/actions/a", json={"config": {"kind": "llm:vllm", "model": model}})
    assert reply.status_code == 403, reply.text
    assert "https://elsewhere.example/a" in reply.json()["error"]


def test_an_answer_goes_on_with_the_version_of_the_adapter_that_began_it(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    gateway.put_llm("a", model=adapted("a"))
    (pool,) = pools(invoker)
    invoker.adapter = "s3://models/a#1"
    invoker.cut_after.append(2)
    invoker.ready(pool.name)
    invoker.ready(pool.name, instance="i1", group="b" * 32)
    assert gateway.chat(model="a").status_code == 200
    _, second = invoker.runs
    assert second["value"]["resume"]["adapter"] == "s3://models/a#1"


def test_the_scaling_of_functions_that_share_instances_is_that_of_their_config(gateway: GatewayProcess) -> None:
    gateway.put_llm("a", model=adapted("a"), scaling={"max_instances": 3})
    path = "/api/v1/namespaces/_/scaling/a"
    assert gateway.call("GET", path).json()["max_instances"] == 3
    reply = gateway.call("PUT", path, json={"max_instances": 2})
    assert (reply.status_code, "shares its instances" in reply.text) == (400, True)


def test_warming_one_of_them_starts_their_pools_instance(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    gateway.put_llm("a", model=adapted("a"))
    (pool,) = pools(invoker)
    invoker.ready(pool.name)
    reply = gateway.call("POST", "/api/v1/namespaces/_/warm/a?wait_s=30", timeout=60)
    assert (reply.json()["action"], reply.json()["state"]) == ("guest/a", "ready")


def test_the_instances_that_they_keep_count_once(start_gateway: Callable[..., GatewayProcess]) -> None:
    gateway = start_gateway(THAW_QUOTA_KEPT="2")
    for name in ("a", "b"):
        gateway.put_llm(name, model=adapted(name), scaling={"min_instances": 2})
    body = {"config": {"kind": "llm:vllm", "model": {"uri": "s3://models/x"}, "scaling": {"min_instances": 1}}}
    refused = gateway.call("PUT", "/api/v1/namespaces/_/actions/c", json=body)
    assert (refused.status_code, "too many instances" in refused.text) == (403, True)


def test_whoever_looks_at_the_work_sees_which_functions_share_an_instance(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    for name in ("b", "a"):
        gateway.put_llm(name, model=adapted(name))
    (pool,) = pools(invoker)
    invoker.ready(pool.name)
    work = gateway.call("GET", "/api/v1/namespaces/_/work").json()
    assert [w["action"] for w in work["workers"]] == [pool.name]
    assert work["shared"] == [{"action": pool.name, "functions": ["guest/a", "guest/b"]}]


def test_a_pool_that_is_made_anew_goes_on_with_its_instances(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    gateway.put_llm("a", model=adapted("a"))
    (pool,) = pools(invoker)
    invoker.ready(pool.name)
    gateway.wait_for_routes()
    gateway.call("DELETE", "/api/v1/namespaces/_/actions/a")
    assert pools(invoker) == []
    gateway.put_llm("b", model=adapted("b"))
    assert pools(invoker)[0].name == pool.name
    assert gateway.call("POST", "/v1/chat/completions", json=chat("b"), timeout=10).status_code == 200


def chat(model: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}]}


def test_a_warming_goes_with_its_function_to_another_pool(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    gateway.put_llm("a", model=adapted("a"))
    with ThreadPoolExecutor(1) as clients:
        warmed = clients.submit(gateway.call, "POST", "/api/v1/namespaces/_/warm/a?wait_s=30", timeout=60)
        (before,) = invoker.wait_for_demand()
        update(gateway, "a", model=adapted("a"), scaling={"max_batch": 2})
        (pool,) = pools(invoker)
        assert pool.name != before.action
        invoker.ready(pool.name)
        assert warmed.result(60).json()["state"] == "ready"
    invoker.wait_for_demand(0)


def test_a_client_goes_on_with_a_stream_that_went_to_another_pool_while_it_waited(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    gateway.put_llm("a", model=adapted("a"))
    invoker.pace = threading.Semaphore(2)
    client = Client(model="a")
    asking = client.ask_soon(gateway)
    invoker.wait_for_demand()
    update(gateway, "a", model=adapted("a"), scaling={"max_batch": 2})
    (pool,) = pools(invoker)
    invoker.ready(pool.name)
    asking.join(20)
    client.read(2)
    client.hang_up()
    invoker.pace.release(10)
    assert client.ask(gateway).status_code == 200, client.reply.text
    client.read_all()
    assert client.has_whole_answer(6)
    assert len(invoker.runs) == 1


def test_a_stream_goes_on_at_another_gateway_with_the_adapter_that_began_it(
    start_gateway: Callable[..., GatewayProcess], invoker: FakeInvoker, valkey_url: str
) -> None:
    first, second = start_gateway(), start_gateway()
    first.put_llm("a", model=adapted("a"))
    (pool,) = pools(invoker)
    invoker.adapter = "s3://models/a#1"
    invoker.pace = threading.Semaphore(3)
    invoker.ready(pool.name)
    for gateway in (first, second):
        gateway.wait_for_routes()
    client = Client(model="a")
    client.ask(first)
    client.read(3)
    client.hang_up()
    noted(valkey_url, client)
    client.ask(second)
    invoker.pace.release(10)
    client.read_all()
    assert client.has_whole_answer(6)
    _, resumed = invoker.runs
    assert resumed["value"]["resume"]["adapter"] == "s3://models/a#1"


def test_the_tokens_of_a_text_are_told_without_the_adapter(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    gateway.put_llm("a", model=adapted("a"))
    invoker.prompt = RunPrompt((7, 8), "hi")
    with ThreadPoolExecutor(1) as clients:
        asked = clients.submit(gateway.call, "POST", "/tokenize", json={"model": "a", "prompt": "hi"})
        (demand,) = invoker.wait_for_demand()
        invoker.ready(demand.action)
        assert asked.result(30).json()["tokens"] == [7, 8]
    (run,) = invoker.runs
    assert (demand.adapter, run["adapter"], run["value"]["adapter"]) == ("", None, "")


def test_what_shared_instances_wrote_last_is_told_of_each_function(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    for name in ("a", "b"):
        gateway.put_llm(name, model=adapted(name))
    (pool,) = pools(invoker)
    invoker.outputs = [output("i1", "h0", 10) | {"action": pool.name}]
    invoker.report()
    for name in ("a", "b"):
        (found,) = gateway.call("GET", f"/api/v1/namespaces/_/logs/{name}").json()["outputs"]
        assert (found["action"], found["stderr"]) == (f"guest/{name}", "of i1")


def test_who_runs_a_version_is_told_by_the_functions_that_share_the_instance(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    for name in ("a", "b"):
        gateway.put_llm(name, model=adapted(name))
    (pool,) = pools(invoker)
    invoker.ready(pool.name, model_version="aa" * 32)
    gateway.session.auth = None
    found = gateway.call("GET", "/api/v1/thaw/models", headers={"Authorization": f"Bearer {OPERATOR_KEY}"}).json()
    assert [one["action"] for one in found["running"]] == ["guest/a", "guest/b"]


def test_an_answer_whose_pool_is_gone_ends_with_the_name_of_its_function(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    gateway.put_llm("a", model=adapted("a"))
    (pool,) = pools(invoker)
    invoker.pace = threading.Semaphore(2)
    record = invoker.ready(pool.name)
    client = Client(model="a")
    client.ask(gateway)
    client.read(2)
    gateway.call("DELETE", "/api/v1/namespaces/_/actions/a")
    invoker.drop_runs()
    invoker.gone(record)
    client.read_all()
    assert client.error["message"].startswith("guest/a was deleted, or has other settings than when it began")
