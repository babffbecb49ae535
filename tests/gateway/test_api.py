"""/api/v1: keys, error bodies, actions, limits."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import redis
import requests

from relay.state.records import Records
from tests.conftest import ValkeyServer
from tests.gateway.conftest import (
    CODE,
    HERE,
    KEY,
    LLM_CONFIG,
    OPERATOR_KEY,
    OTHER_KEY,
    GatewayProcess,
    Start,
    notes,
    pairs,
)
from tests.gateway.waits import until
from tests.relay.samples import record

ACTIONS = "/api/v1/namespaces/_/actions"


def test_the_host_root_and_the_api_root_need_no_key(shared_gateway: GatewayProcess) -> None:
    root = requests.get(shared_gateway.url + "/", timeout=10).json()
    assert root["api_paths"] == ["/api/v1", "/v1"]
    assert root["limits"]["max_action_duration"] == 300_000
    assert root["runtimes"]["python"][0]["kind"] == "python:3.11"
    api = requests.get(shared_gateway.url + "/api/v1", timeout=10).json()
    assert api["api_version"] == "1.0.0"
    assert isinstance(api["build"], str)


def test_a_key_works_as_basic_and_as_bearer_and_no_other_does(shared_gateway: GatewayProcess) -> None:
    url = shared_gateway.url + "/api/v1/namespaces"
    assert requests.get(url, auth=tuple(KEY.split(":")), timeout=10).json() == ["guest"]  # type: ignore[arg-type]
    assert requests.get(url, headers={"Authorization": f"Bearer {KEY}"}, timeout=10).json() == ["guest"]
    for headers in ({}, {"Authorization": "Basic %%%"}, {"Authorization": "Bearer 23bc:no"}, {"Authorization": "x"}):
        reply = requests.get(url, headers={**headers, "X-Request-ID": "tid-1"}, timeout=10)
        assert (reply.status_code, reply.headers["WWW-Authenticate"]) == (401, "Basic")
        assert reply.headers["X-Request-ID"] == reply.json()["code"] == "tid-1"
    error = "The resource requires authentication, which was not supplied with the request."
    assert requests.get(url, headers={"X-Request-ID": "t"}, timeout=10).text == f'{{"error": "{error}", "code": "t"}}'


def test_every_answer_carries_cors_and_a_transaction_id(shared_gateway: GatewayProcess) -> None:
    reply = shared_gateway.call("GET", ACTIONS)
    assert reply.headers["Access-Control-Allow-Origin"] == "*"
    assert reply.headers["Access-Control-Allow-Methods"] == "GET, DELETE, POST, PUT, HEAD"
    assert len(reply.headers["X-Request-ID"]) == 32
    assert shared_gateway.call("OPTIONS", ACTIONS).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", ACTIONS])
def test_an_sdk_in_a_browser_may_send_its_headers_and_read_ours(shared_gateway: GatewayProcess, path: str) -> None:
    asked = "authorization,content-type,x-stainless-lang,x-stainless-retry-count"
    sent = {"Origin": "https://app.example", "Access-Control-Request-Headers": asked}
    preflight = requests.options(f"{shared_gateway.url}{path}", headers=sent, timeout=10)
    assert (preflight.status_code, preflight.headers["Access-Control-Allow-Headers"]) == (200, asked)
    exposed = shared_gateway.call("GET", ACTIONS).headers["Access-Control-Expose-Headers"].split(", ")
    assert {"X-Request-ID", "X-Openwhisk-Activation-Id", "X-Thaw-Start", "Retry-After"} <= set(exposed)


def test_a_tenant_sees_its_own_namespace_only(shared_gateway: GatewayProcess) -> None:
    reply = shared_gateway.call("GET", "/api/v1/namespaces/guest/actions", key=OTHER_KEY)
    assert reply.status_code == 403
    assert reply.json()["error"] == "The supplied authentication is not authorized to access 'guest'."
    assert shared_gateway.read("actions", key=OTHER_KEY) == []


def test_a_tenant_cannot_read_anothers_record_by_its_id(gateway: GatewayProcess, valkey_url: str) -> None:
    """The answer is the same as for a record that does not exist, so it does not reveal that there is a record."""
    with redis.Redis.from_url(valkey_url) as client:
        Records(client).end(record("a" * 32))
    for part in ("", "/result", "/logs", "/trace"):
        gateway.read(f"activations/{'a' * 32}{part}")
        refused, missing = (
            gateway.call("GET", f"{HERE}/activations/{i * 32}{part}", key=OTHER_KEY, headers={"X-Request-ID": "t"})
            for i in "ab"
        )
        assert (refused.status_code, refused.text) == (404, missing.text)


def test_an_action_is_created_read_updated_listed_and_deleted(gateway: GatewayProcess) -> None:
    code = {"kind": "python:default", "code": CODE["code"]}
    body = {"exec": code, "parameters": pairs(a=1), "annotations": pairs(note="x")}
    created = gateway.put("actions/hello", **body)
    assert created["exec"] == {"kind": "python:3.11", "binary": False, "code": CODE["code"]}
    assert created["version"] == "0.0.1"
    assert created["limits"] == {"timeout": 60_000, "memory": 256, "logs": 10, "concurrency": 1}
    assert notes(created) == {"note": "x", "provide-api-key": False, "exec": "python:3.11"}
    assert gateway.put("actions/hello", 409, **body)["error"] == "resource already exists"
    change = {"limits": {"timeout": 5000}, "annotations": pairs(more=2), "delAnnotations": ["note"]}
    updated = gateway.put("actions/hello?overwrite=true", **change)
    assert updated["version"] == "0.0.2"
    assert updated["exec"]["code"] == CODE["code"]
    assert updated["parameters"] == pairs(a=1)
    assert updated["limits"]["timeout"] == 5000
    assert notes(updated) == {"more": 2, "provide-api-key": False, "exec": "python:3.11"}
    (summary,) = gateway.read("actions")
    assert summary["exec"] == {"binary": False}
    assert "parameters" not in summary
    assert gateway.read("actions?count=true") == {"actions": 1}
    assert "code" not in gateway.read("actions/hello?code=false")["exec"]
    assert gateway.delete("actions/hello").json()["name"] == "hello"
    missing = gateway.call("GET", f"{ACTIONS}/hello")
    assert (missing.status_code, missing.json()["error"]) == (404, "The requested resource does not exist.")


def test_an_action_that_is_created_after_a_deletion_is_a_later_version(gateway: GatewayProcess) -> None:
    gateway.put_python()
    gateway.put("actions/hello?overwrite=true", exec=CODE)
    assert gateway.delete("actions/hello").json()["version"] == "0.0.2"
    assert gateway.put("actions/hello", exec=CODE)["version"] == "0.0.3"


def test_an_llm_is_created_from_a_config_object_or_from_its_text(gateway: GatewayProcess) -> None:
    by_object = gateway.put("actions/a", config=LLM_CONFIG)
    by_text = gateway.put("actions/b", exec={"kind": "llm:default", "code": json.dumps(LLM_CONFIG)})
    assert by_object["config"] == by_text["config"]
    assert (by_object["exec"]["kind"], by_object["limits"]["timeout"]) == ("llm:vllm", 300_000)
    assert json.loads(by_object["exec"]["code"]) == LLM_CONFIG


def of_image(name: str) -> dict[str, Any]:
    return {"exec": {"kind": "blackbox", "image": name}}


MALFORMED = "The request content was malformed:\n"
NO_RUNTIME = (
    "The specified runtime 'ruby:3' is not supported by this platform. Valid values are: 'python:3.11', 'llm:vllm', "
    "'python:default', 'python:3', 'llm:default'."
)
TOO_SHORT = f"{MALFORMED}limits.timeout: 1 milliseconds is not within 100 to 300000"
TOO_MANY = "$.scaling.min_instances: more than max_instances, which is 8"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"exec": {"kind": "ruby:3", "code": "x"}}, 400, NO_RUNTIME),
        (of_image("no image"), 400, "'no image' is no name of an image"),
        (of_image("elsewhere.example/x"), 403, "The image elsewhere.example/x may not be run here."),
        ({}, 400, f"{MALFORMED}exec undefined"),
        ({"exec": CODE, "limits": {"timeout": 1}}, 400, TOO_SHORT),
        ({"config": {**LLM_CONFIG, "scaling": {"min_instances": 9}}}, 400, TOO_MANY),
        ({"config": {"kind": "llm:vllm", "model": {"uri": "nope"}}}, 400, "$.model.uri: "),
        ({"config": {**LLM_CONFIG, "scalling": {}}}, 400, "$.scalling: unknown key (got {}): known keys: "),
    ],
)
def test_a_wrong_action_is_refused_with_the_reason(
    shared_gateway: GatewayProcess, body: dict[str, Any], status: int, message: str
) -> None:
    reply = shared_gateway.call("PUT", f"{ACTIONS}/x", json=body, headers={"X-Request-ID": "t"})
    assert reply.status_code == status
    assert reply.json()["error"].startswith(message)
    assert reply.json()["code"] == "t"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "hint"),
    [
        ("GET", f"{ACTIONS}/none", None, 404, "list actions: thaw action list"),
        ("GET", f"{ACTIONS}/a/b/c", None, 404, "an action is named NAME or PACKAGE/NAME"),
        ("PUT", f"{ACTIONS}/p/x", {"exec": CODE}, 404, "create its package first: thaw package create p"),
        ("PUT", f"{ACTIONS}/x", of_image("no image"), 400, "REGISTRY/NAME:TAG or REGISTRY/NAME@sha256:…"),
        ("PUT", f"{ACTIONS}/x", of_image("me/x"), 503, "deploy it again in a while"),
        ("PUT", f"{ACTIONS}/x", {"exec": {"kind": "ruby:3"}}, 400, None),
    ],
)
def test_an_error_that_says_what_to_do_next_says_it_in_its_hint(
    shared_gateway: GatewayProcess, method: str, path: str, body: Any, status: int, hint: str | None
) -> None:
    reply = shared_gateway.call(method, path, json=body)
    assert (reply.status_code, reply.json().get("hint")) == (status, hint)
    assert set(reply.json()) - {"hint"} == {"error", "code"}


def test_bodies_that_are_not_objects_and_queries_that_are_not_numbers_are_400(shared_gateway: GatewayProcess) -> None:
    assert (
        shared_gateway.call("PUT", f"{ACTIONS}/x", data=b"[1]")
        .json()["error"]
        .endswith("the body must be a JSON object.")
    )
    assert shared_gateway.call("PUT", f"{ACTIONS}/x", data=b"{").status_code == 400
    for query in ("limit=201", "limit=-1", "limit=x"):
        assert shared_gateway.call("GET", f"{ACTIONS}?{query}").status_code == 400
    assert shared_gateway.call("PUT", f"{ACTIONS}/%0Ax", json={"exec": CODE}).status_code == 400


def test_a_payload_beyond_the_limit_is_413_with_both_numbers(shared_gateway: GatewayProcess) -> None:
    data = json.dumps({"x": "y" * 1_100_000}).encode()
    reply = shared_gateway.call("POST", f"{ACTIONS}/hello?blocking=true", data=data)
    assert reply.status_code == 413
    assert reply.json()["error"] == f"Request larger than allowed: {len(data)} > 1048576 bytes."


def test_a_zip_is_told_from_source(gateway: GatewayProcess) -> None:
    code = base64.b64encode(b"PK\x03\x04zip").decode()
    made = gateway.put("actions/z", exec={"kind": "python:3.11", "code": code, "main": "go"})
    assert made["exec"] == {"kind": "python:3.11", "binary": True, "code": code, "main": "go"}


def test_a_host_is_drained_and_taken_back_and_one_that_never_reported_is_not_found(gateway: GatewayProcess) -> None:
    hosts = "/api/v1/thaw/hosts"
    assert requests.put(f"{gateway.url}{hosts}/h0/drain", timeout=10).status_code == 401
    for method in ("PUT", "GET"):
        assert gateway.call(method, f"{hosts}/h0/drain", key=OPERATOR_KEY).status_code == 404
    gateway.invoker.report()
    for method, draining in (("PUT", True), ("PUT", True), ("DELETE", False)):
        drained = gateway.call(method, f"{hosts}/h0/drain", key=OPERATOR_KEY).json()
        assert drained == {"host": "h0", "draining": draining}
        listed = gateway.call("GET", hosts, key=OPERATOR_KEY).json()["hosts"]
        assert [h["draining"] for h in listed] == [draining]


def test_health_is_not_ok_while_the_state_server_reads_and_takes_no_writes(
    start_gateway: Start, own_valkey: ValkeyServer
) -> None:
    """A state server behaves like this when its disk is full and it does not sync every write."""
    gateway = start_gateway(own_valkey.url, THAW_GATEWAY_HEARTBEAT_S="0.2")
    gateway.put_python()
    with redis.Redis.from_url(own_valkey.url) as client:
        client.config_set("min-replicas-to-write", 1)
        gateway.wait_for_event("heartbeat_missed")
        failing = gateway.call("GET", "/health")
        assert gateway.call("GET", "/live").status_code == 200  # another process would not do better
        refused = gateway.call("POST", "/api/v1/namespaces/_/actions/hello", json={})
        client.config_set("min-replicas-to-write", 0)
    until(lambda: gateway.call("GET", "/health").status_code == 200, most_s=30)
    assert (failing.status_code, failing.json()["status"]) == (503, "failing")
    assert "NOREPLICAS" in failing.json()["problems"][0]
    assert refused.status_code in (500, 503)


def test_health_metrics_limits_and_hosts_answer(shared_gateway: GatewayProcess) -> None:
    assert requests.get(shared_gateway.url + "/health", timeout=10).json()["status"] == "ok"
    assert "thaw_gateway_waiting_requests 0.0" in requests.get(shared_gateway.url + "/metrics", timeout=10).text
    assert requests.get(shared_gateway.url + "/api/v1/thaw/hosts", timeout=10).status_code == 401
    assert shared_gateway.read("limits")["maxPayloadSize"] == 1_048_576
