"""/api/v1: keys, error bodies, actions, limits."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import pytest
import redis
import requests

from relay.state.records import Records
from relay.state.registry import Registry
from tests.conftest import ValkeyServer
from tests.gateway.conftest import KEY, LLM_CONFIG, OPERATOR_KEY, OTHER_KEY, GatewayProcess, add_key
from tests.gateway.fake_invoker import FakeInvoker
from thaw.activation import Activation, ActivationStatus
from thaw.host import Device, HostReport
from thaw.ids import ActionName, ActivationId, HostId, Namespace

ACTIONS = "/api/v1/namespaces/_/actions"
CODE = "def main(args):\n    return args\n"
PYTHON = {"kind": "python:3.11", "code": CODE}


def pairs(entity: dict[str, Any]) -> dict[str, Any]:
    return {p["key"]: p["value"] for p in entity["annotations"]}


def test_the_host_root_and_the_api_root_need_no_key(gateway: GatewayProcess) -> None:
    root = requests.get(gateway.url + "/", timeout=10).json()
    assert root["api_paths"] == ["/api/v1", "/v1"]
    assert root["limits"]["max_action_duration"] == 300_000
    assert root["runtimes"]["python"][0]["kind"] == "python:3.11"
    api = requests.get(gateway.url + "/api/v1", timeout=10).json()
    assert api["api_version"] == "1.0.0"
    assert isinstance(api["build"], str)


def test_a_key_works_as_basic_and_as_bearer_and_no_other_does(gateway: GatewayProcess) -> None:
    url = gateway.url + "/api/v1/namespaces"
    assert requests.get(url, auth=tuple(KEY.split(":")), timeout=10).json() == ["guest"]  # type: ignore[arg-type]
    assert requests.get(url, headers={"Authorization": f"Bearer {KEY}"}, timeout=10).json() == ["guest"]
    for headers in ({}, {"Authorization": "Basic %%%"}, {"Authorization": "Bearer 23bc:no"}, {"Authorization": "x"}):
        reply = requests.get(url, headers={**headers, "X-Request-ID": "tid-1"}, timeout=10)
        assert reply.status_code == 401
        assert reply.headers["WWW-Authenticate"] == "Basic"
        assert reply.headers["X-Request-ID"] == "tid-1"
        assert reply.json()["code"] == "tid-1"
    text = requests.get(url, headers={"X-Request-ID": "t"}, timeout=10).text
    assert (
        text
        == '{"error": "The resource requires authentication, which was not supplied with the request.", "code": "t"}'
    )


def test_every_answer_carries_cors_and_a_transaction_id(gateway: GatewayProcess) -> None:
    reply = gateway.call("GET", ACTIONS)
    assert reply.headers["Access-Control-Allow-Origin"] == "*"
    assert reply.headers["Access-Control-Allow-Methods"] == "GET, DELETE, POST, PUT, HEAD"
    assert len(reply.headers["X-Request-ID"]) == 32
    assert gateway.call("OPTIONS", ACTIONS).status_code == 200


def test_a_tenant_sees_its_own_namespace_only(gateway: GatewayProcess) -> None:
    gateway.put_python()
    auth: Any = tuple(OTHER_KEY.split(":"))
    reply = requests.get(gateway.url + "/api/v1/namespaces/guest/actions", auth=auth, timeout=10)
    assert reply.status_code == 403
    assert reply.json()["error"] == "The supplied authentication is not authorized to access 'guest'."
    assert requests.get(gateway.url + ACTIONS, auth=auth, timeout=10).json() == []


def test_a_tenant_cannot_read_anothers_record_by_its_id(gateway: GatewayProcess, valkey_url: str) -> None:
    """The answer is the same as for a record that does not exist, so it does not reveal that there is a record."""
    record = Activation(
        ActivationId("a" * 32),
        Namespace("guest"),
        ActionName("guest/hello"),
        "0.0.1",
        "guest-user",
        "python:3.11",
        1,
        2,
        ActivationStatus.SUCCESS,
        {"secret": 1},
        logs=("secret",),
    )
    with redis.Redis.from_url(valkey_url) as client:
        Records(client).end(record)
    theirs: Any = tuple(OTHER_KEY.split(":"))
    for part in ("", "/result", "/logs", "/trace"):
        path = f"/api/v1/namespaces/_/activations/{record.activation_id}{part}"
        assert gateway.call("GET", path).status_code == 200
        refused = requests.get(gateway.url + path, auth=theirs, headers={"X-Request-ID": "t"}, timeout=10)
        unknown = path.replace("a" * 32, "b" * 32)
        missing = requests.get(gateway.url + unknown, auth=theirs, headers={"X-Request-ID": "t"}, timeout=10)
        assert (refused.status_code, refused.text) == (404, missing.text)


def test_an_action_is_created_read_updated_listed_and_deleted(gateway: GatewayProcess) -> None:
    body = {
        "exec": {"kind": "python:default", "code": CODE},
        "parameters": [{"key": "a", "value": 1}],
        "annotations": [{"key": "note", "value": "x"}],
    }
    created = gateway.call("PUT", f"{ACTIONS}/hello", json=body).json()
    assert created["exec"] == {"kind": "python:3.11", "binary": False, "code": CODE}
    assert created["version"] == "0.0.1"
    assert created["limits"] == {"timeout": 60_000, "memory": 256, "logs": 10, "concurrency": 1}
    assert pairs(created) == {"note": "x", "provide-api-key": False, "exec": "python:3.11"}
    again = gateway.call("PUT", f"{ACTIONS}/hello", json=body)
    assert (again.status_code, again.json()["error"]) == (409, "resource already exists")
    change = {"limits": {"timeout": 5000}, "annotations": [{"key": "more", "value": 2}], "delAnnotations": ["note"]}
    updated = gateway.call("PUT", f"{ACTIONS}/hello?overwrite=true", json=change).json()
    assert updated["version"] == "0.0.2"
    assert updated["exec"]["code"] == CODE
    assert updated["parameters"] == [{"key": "a", "value": 1}]
    assert updated["limits"]["timeout"] == 5000
    assert pairs(updated) == {"more": 2, "provide-api-key": False, "exec": "python:3.11"}
    (summary,) = gateway.call("GET", ACTIONS).json()
    assert summary["exec"] == {"binary": False}
    assert "parameters" not in summary
    assert gateway.call("GET", f"{ACTIONS}?count=true").json() == {"actions": 1}
    assert "code" not in gateway.call("GET", f"{ACTIONS}/hello?code=false").json()["exec"]
    assert gateway.call("DELETE", f"{ACTIONS}/hello").json()["name"] == "hello"
    missing = gateway.call("GET", f"{ACTIONS}/hello")
    assert (missing.status_code, missing.json()["error"]) == (404, "The requested resource does not exist.")


def test_an_action_that_is_created_after_a_deletion_is_a_later_version(gateway: GatewayProcess) -> None:
    path = f"{ACTIONS}/again"
    gateway.call("PUT", path, json={"exec": PYTHON})
    gateway.call("PUT", f"{path}?overwrite=true", json={"exec": PYTHON})
    assert gateway.call("DELETE", path).json()["version"] == "0.0.2"
    assert gateway.call("PUT", path, json={"exec": PYTHON}).json()["version"] == "0.0.3"


def test_an_llm_is_created_from_a_config_object_or_from_its_text(gateway: GatewayProcess) -> None:
    by_object = gateway.call("PUT", f"{ACTIONS}/a", json={"config": LLM_CONFIG}).json()
    by_text = gateway.call(
        "PUT", f"{ACTIONS}/b", json={"exec": {"kind": "llm:default", "code": json.dumps(LLM_CONFIG)}}
    )
    assert by_object["config"] == by_text.json()["config"]
    assert by_object["exec"]["kind"] == "llm:vllm"
    assert by_object["limits"]["timeout"] == 300_000
    assert json.loads(by_object["exec"]["code"]) == LLM_CONFIG


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (
            {"exec": {"kind": "ruby:3", "code": "x"}},
            400,
            "The specified runtime 'ruby:3' is not supported by this platform. Valid values are: 'python:3.11', "
            "'llm:vllm', 'python:default', 'python:3', 'llm:default'.",
        ),
        (
            {"exec": {"kind": "blackbox", "image": "no image"}},
            400,
            "'no image' is no name of an image",
        ),
        (
            {"exec": {"kind": "blackbox", "image": "elsewhere.example/x"}},
            403,
            "The image elsewhere.example/x may not be run here.",
        ),
        ({}, 400, "The request content was malformed:\nexec undefined"),
        (
            {"exec": PYTHON, "limits": {"timeout": 1}},
            400,
            "The request content was malformed:\nlimits.timeout: 1 milliseconds is not within 100 to 300000",
        ),
        ({"config": {"kind": "llm:vllm", "model": {"uri": "nope"}}}, 400, "$.model.uri: "),
        ({"config": {**LLM_CONFIG, "scalling": {}}}, 400, "$.scalling: unknown key (got {}): known keys: "),
    ],
)
def test_a_wrong_action_is_refused_with_the_reason(
    gateway: GatewayProcess, body: dict[str, Any], status: int, message: str
) -> None:
    reply = gateway.call("PUT", f"{ACTIONS}/x", json=body, headers={"X-Request-ID": "t"})
    assert reply.status_code == status
    assert reply.json()["error"].startswith(message)
    assert reply.json()["code"] == "t"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "hint"),
    [
        ("GET", f"{ACTIONS}/none", None, 404, "list actions: thaw action list"),
        ("GET", f"{ACTIONS}/a/b/c", None, 404, "an action is named NAME or PACKAGE/NAME"),
        ("PUT", f"{ACTIONS}/p/x", {"exec": PYTHON}, 404, "create its package first: thaw package create p"),
        (
            "PUT",
            f"{ACTIONS}/x",
            {"exec": {"kind": "blackbox", "image": "no image"}},
            400,
            "REGISTRY/NAME:TAG or REGISTRY/NAME@sha256:…",
        ),
        ("PUT", f"{ACTIONS}/x", {"exec": {"kind": "blackbox", "image": "me/x"}}, 503, "deploy it again in a while"),
        ("PUT", f"{ACTIONS}/x", {"exec": {"kind": "ruby:3"}}, 400, None),
    ],
)
def test_an_error_that_says_what_to_do_next_says_it_in_its_hint(
    gateway: GatewayProcess, method: str, path: str, body: Any, status: int, hint: str | None
) -> None:
    reply = gateway.call(method, path, json=body)
    assert (reply.status_code, reply.json().get("hint")) == (status, hint)
    assert set(reply.json()) - {"hint"} == {"error", "code"}


def test_bodies_that_are_not_objects_and_queries_that_are_not_numbers_are_400(gateway: GatewayProcess) -> None:
    assert gateway.call("PUT", f"{ACTIONS}/x", data=b"[1]").json()["error"].endswith("the body must be a JSON object.")
    assert gateway.call("PUT", f"{ACTIONS}/x", data=b"{").status_code == 400
    for query in ("limit=201", "limit=-1", "limit=x"):
        assert gateway.call("GET", f"{ACTIONS}?{query}").status_code == 400
    assert gateway.call("PUT", f"{ACTIONS}/%0Ax", json={"exec": PYTHON}).status_code == 400


def test_a_payload_beyond_the_limit_is_413_with_both_numbers(gateway: GatewayProcess) -> None:
    gateway.put_python()
    data = json.dumps({"x": "y" * 1_100_000}).encode()
    reply = gateway.call("POST", f"{ACTIONS}/hello?blocking=true", data=data)
    assert reply.status_code == 413
    assert reply.json()["error"] == f"Request larger than allowed: {len(data)} > 1048576 bytes."


def test_a_zip_is_told_from_source(gateway: GatewayProcess) -> None:
    code = base64.b64encode(b"PK\x03\x04zip").decode()
    reply = gateway.call("PUT", f"{ACTIONS}/z", json={"exec": {"kind": "python:3.11", "code": code, "main": "go"}})
    assert reply.json()["exec"] == {"kind": "python:3.11", "binary": True, "code": code, "main": "go"}


def test_a_host_is_drained_and_taken_back_and_one_that_never_reported_is_not_found(
    gateway: GatewayProcess, valkey_url: str
) -> None:
    drain, device = "/api/v1/thaw/hosts/h0/drain", Device("cpu", "cpu", 1, 1)
    assert requests.put(gateway.url + drain, timeout=10).status_code == 401
    gateway.session.auth = tuple(OPERATOR_KEY.split(":"))  # type: ignore[assignment]
    assert gateway.call("PUT", drain).status_code == 404
    with redis.Redis.from_url(valkey_url) as client:
        Registry(client).report_host(HostReport(HostId("h0"), "b", "a:1", (device,), 1, 1.0, "none", "process", 0, 0))
    for method, draining in (("PUT", True), ("PUT", True), ("DELETE", False)):
        assert gateway.call(method, drain).json() == {"host": "h0", "draining": draining}
        assert [h["draining"] for h in gateway.call("GET", "/api/v1/thaw/hosts").json()["hosts"]] == [draining]


def test_health_is_not_ok_while_the_state_server_reads_and_takes_no_writes(own_valkey: ValkeyServer) -> None:
    """A state server behaves like this when its disk is full and it does not sync every write."""
    add_key(own_valkey.url, KEY, "guest")
    gateway = GatewayProcess(own_valkey.url, THAW_GATEWAY_HEARTBEAT_S="0.2")
    try:
        gateway.put_python()
        with redis.Redis.from_url(own_valkey.url) as client:
            client.config_set("min-replicas-to-write", 1)
            gateway.wait_for_event("heartbeat_missed")
            failing = gateway.call("GET", "/health")
            assert gateway.call("GET", "/live").status_code == 200  # another process would not do better
            refused = gateway.call("POST", "/api/v1/namespaces/_/actions/hello", json={})
            client.config_set("min-replicas-to-write", 0)
        deadline = time.monotonic() + 30
        while gateway.call("GET", "/health").status_code != 200:
            assert time.monotonic() < deadline
    finally:
        gateway.stop()
    assert (failing.status_code, failing.json()["status"]) == (503, "failing")
    assert "NOREPLICAS" in failing.json()["problems"][0]
    assert refused.status_code in (500, 503)


def test_health_metrics_limits_and_hosts_answer(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    assert requests.get(gateway.url + "/health", timeout=10).json()["status"] == "ok"
    assert "thaw_gateway_waiting_requests 0.0" in requests.get(gateway.url + "/metrics", timeout=10).text
    assert requests.get(gateway.url + "/api/v1/thaw/hosts", timeout=10).status_code == 401
    assert gateway.call("GET", "/api/v1/namespaces/_/limits").json()["maxPayloadSize"] == 1_048_576
