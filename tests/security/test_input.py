"""Input that was answered with a 500, or came back as JSON that is none."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from tests.conftest import ValkeyServer
from tests.gateway.conftest import GatewayProcess
from tests.gateway.fake_invoker import FakeInvoker
from tests.security.slow import module_gateway

ACTIONS = "/api/v1/namespaces/_/actions"
PYTHON = {"exec": {"kind": "python:3.11", "code": "def main(args):\n    return args\n"}}


@pytest.fixture(scope="module")
def gateway(_shared_valkey: ValkeyServer) -> Iterator[GatewayProcess]:
    with module_gateway(_shared_valkey.url) as process:
        yield process


@pytest.fixture
def invoker(_shared_valkey: ValkeyServer) -> Iterator[FakeInvoker]:
    fake = FakeInvoker(_shared_valkey.url)
    yield fake
    fake.stop()


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    "body",
    [
        {**PYTHON, "parameters": [{"key": "a", "value": nested(489)}]},
        {**PYTHON, "annotations": [{"key": "a", "value": nested(200)}]},
        {**PYTHON, "delAnnotations": 5},
        {**PYTHON, "delAnnotations": [["a"]]},
        {**PYTHON, "parameters": [{"key": "a", "value": float("nan")}]},
        {"exec": {"kind": "python:3.11", "code": "x", "main": {}}},
        {"exec": {"kind": "llm:vllm", "code": "[" * 2000}},
        {"exec": {"kind": "llm:vllm", "code": '{"a": NaN}'}},
        {"config": {"kind": "llm:vllm", "model": {"uri": "s3://m/t"}, "engine": {"args": {"seed": float("inf")}}}},
    ],
)
def test_an_action_that_cannot_be_kept_is_a_400(gateway: GatewayProcess, body: dict[str, Any]) -> None:
    reply = gateway.call("PUT", f"{ACTIONS}/a", data=json.dumps(body).encode())
    assert reply.status_code == 400, reply.text


@pytest.mark.parametrize("text", ["9223372036854775808", "9" * 3000, "1e3", "1_0", " 1", "٣", "-1"])
@pytest.mark.parametrize("name", ["skip", "limit"])
def test_a_number_beyond_what_the_state_server_takes_is_a_400(gateway: GatewayProcess, name: str, text: str) -> None:
    for path in (ACTIONS, "/api/v1/namespaces/_/activations"):
        assert gateway.call("GET", path, params={name: text}).status_code == 400


@pytest.mark.parametrize("text", ["9223372036854775808", "-1"])
@pytest.mark.parametrize("name", ["since", "upto"])
def test_a_time_that_is_none_is_a_400(gateway: GatewayProcess, name: str, text: str) -> None:
    assert gateway.call("GET", "/api/v1/namespaces/_/activations", params={name: text}).status_code == 400


@pytest.mark.parametrize(
    "value", [b"Basic \xe4\xf6", b"Bearer \xff", b"Basic " + base64.b64encode(b"\xff\xfe"), b"Basic"]
)
def test_a_key_that_is_no_text_is_a_401(gateway: GatewayProcess, value: bytes) -> None:
    reply = requests.get(f"{gateway.url}{ACTIONS}", headers={"Authorization": value}, timeout=30)
    assert reply.status_code == 401


def test_a_result_that_json_cannot_hold_is_the_function_s_error(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    gateway.put_python("nan")
    invoker.ready("guest/nan")
    gateway.wait_for_routes()
    for number in (float("nan"), float("inf"), -float("inf")):
        invoker.function = lambda value, number=number: (200, {"a": number})
        reply = gateway.call("POST", f"{ACTIONS}/nan?blocking=true")
        assert reply.status_code == 502
        assert "number that JSON cannot hold" in reply.json()["response"]["result"]["error"]
