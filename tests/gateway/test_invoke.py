"""Invocations through /api/v1: blocking, 202s, records, throttles, clients that hang up."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from relay import bus, keys
from relay.messages import StartFailed
from relay.records import Records
from tests.conftest import ValkeyServer
from tests.gateway.conftest import KEY, GatewayProcess, add_key
from tests.gateway.fake_invoker import FakeInvoker
from thaw.activation import Activation
from thaw.errors import InitFailed, ModelNotFound
from thaw.ids import ActionName, ActivationId, GroupId, Namespace

HELLO = "/api/v1/namespaces/_/actions/hello"


def wait_for_record(url: str, activation_id: str, timeout_s: float = 20) -> Activation:
    """Blocks on the pending stream's end, told by keyspace: the record is one key."""
    with redis.Redis.from_url(url) as client:
        client.config_set("notify-keyspace-events", "K$")
        watch = client.pubsub()
        watch.subscribe(f"__keyspace@0__:{keys.activation(activation_id)}")
        records = Records(client)
        watch.get_message(timeout=5)
        record = records.activation(ActivationId(activation_id))
        if record is None:
            assert watch.get_message(timeout=timeout_s) is not None, "no record"
            record = records.activation(ActivationId(activation_id))
        watch.close()
    assert record is not None
    return record


def pending(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        return int(client.xlen(keys.PENDING))


def raw_post(gateway: GatewayProcess, path: str, body: dict[str, Any]) -> socket.socket:
    """A client that can be hung up at will."""
    data = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", gateway.port), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


def test_a_blocking_call_answers_with_the_record_and_result_alone_with_the_result(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    gateway.put_python(parameters=[{"key": "a", "value": 1}])
    invoker.ready("guest/hello")
    invoker.log_lines.append("2026-01-01T00:00:00.0Z stdout: hi")
    reply = gateway.call("POST", f"{HELLO}?blocking=true", json={"b": 2})
    assert reply.status_code == 200
    body = reply.json()
    assert body["response"] == {
        "status": "success", "statusCode": 0, "success": True, "result": {"a": 1, "b": 2}
    }  # fmt: skip
    assert reply.headers["X-Openwhisk-Activation-Id"] == body["activationId"]
    assert body["duration"] == body["end"] - body["start"]
    (run,) = invoker.runs
    assert run["path"] == "/instances/i0/run"
    assert run["action_name"] == "/guest/hello"
    assert run["activation_id"] == body["activationId"]
    record = gateway.record(body["activationId"])
    assert {**record, "logs": [], "end": 0, "duration": 0} == {**body, "end": 0, "duration": 0}
    assert record["logs"] == ["2026-01-01T00:00:00.0Z stdout: hi"]
    annotations = {a["key"]: a["value"] for a in record["annotations"]}
    assert annotations["path"] == "guest/hello"
    assert annotations["kind"] == "python:3.11"
    assert "initTime" not in annotations
    assert gateway.call("POST", f"{HELLO}?blocking=true&result=true", json={"b": 3}).json() == {"a": 1, "b": 3}
    base = f"/api/v1/namespaces/_/activations/{body['activationId']}"
    assert gateway.call("GET", f"{base}/result").json() == {
        "result": {"a": 1, "b": 2}, "status": "success", "success": True
    }  # fmt: skip
    assert gateway.call("GET", f"{base}/logs").json() == {"logs": record["logs"]}


@pytest.mark.parametrize(
    ("answer", "status", "text", "result"),
    [
        ((200, {"error": "mine"}), 502, "application error", {"error": "mine"}),
        ((200, 3), 502, "action developer error", {"error": "The action did not return a dictionary or array."}),
        ((502, {"error": "broken"}), 502, "action developer error", {"error": "broken"}),
        ((200, [1]), 200, "success", [1]),
    ],
)
def test_a_functions_ending_decides_status_and_record(
    gateway: GatewayProcess, invoker: FakeInvoker, answer: Any, status: int, text: str, result: Any
) -> None:
    gateway.put_python()
    invoker.ready("guest/hello")
    invoker.function = lambda _: answer
    reply = gateway.call("POST", f"{HELLO}?blocking=true")
    assert reply.status_code == status
    assert "code" not in reply.json()
    assert (reply.json()["response"]["status"], reply.json()["response"]["result"]) == (text, result)


def test_a_function_whose_worker_died_ends_in_one_internal_error_and_is_not_run_again(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    gateway.put_python()
    invoker.ready("guest/hello")
    invoker.cut_after.append(0)
    reply = gateway.call("POST", f"{HELLO}?blocking=true")
    assert reply.status_code == 500
    assert reply.json()["response"]["status"] == "whisk internal error"
    assert len(invoker.runs) == 1
    assert gateway.record(reply.json()["activationId"])["statusCode"] == 3


def test_a_function_over_its_time_limit_is_a_developer_error(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    gateway.put_python(limits={"timeout": 200})
    invoker.ready("guest/hello")
    invoker.pace = threading.Semaphore(0)
    reply = gateway.call("POST", f"{HELLO}?blocking=true")
    assert reply.status_code == 502
    assert reply.json()["response"]["result"] == {"error": "The action exceeded its time limits of 200 milliseconds."}
    assert {"key": "timeout", "value": True} in reply.json()["annotations"]
    assert invoker.closed.acquire(timeout=2)


def test_an_llm_can_be_invoked_as_an_action(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    gateway.put_llm()
    invoker.ready("guest/chat")
    path = "/api/v1/namespaces/_/actions/chat?blocking=true&result=true"
    chat = gateway.call("POST", path, json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}).json()
    assert chat["choices"][0]["message"]["content"] == "w0 w1 "
    assert gateway.call("POST", path, json={"prompt": "x", "max_tokens": 1}).json()["choices"][0]["text"] == "w0 "
    assert gateway.call("POST", path, json={"x": 1}).status_code == 400


def test_a_failed_start_ends_those_who_waited_for_it_with_its_reason(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    gateway.put_llm()
    gateway.put_python()
    with ThreadPoolExecutor(2) as pool:
        chat = pool.submit(gateway.chat)
        hello = pool.submit(gateway.call, "POST", f"{HELLO}?blocking=true")
        for demand in invoker.wait_for_demand(2):
            llm = demand.action == "guest/chat"
            error = ModelNotFound("no bucket 'models'") if llm else InitFailed("main is missing")
            failed = StartFailed(demand.action, (demand.activation_id,), error.info(), GroupId("b" * 32))
            bus.publish(invoker.client, failed)
        assert chat.result().status_code == 502
        assert chat.result().json()["error"]["message"] == "no bucket 'models'"
        assert chat.result().json()["error"]["code"] == "ModelNotFound"
        assert hello.result().json()["response"]["result"] == {"error": "main is missing"}
    invoker.wait_for_demand(0)


def test_a_202_ends_in_its_record(gateway: GatewayProcess, invoker: FakeInvoker, valkey_url: str) -> None:
    gateway.put_python()
    reply = gateway.call("POST", HELLO, json={"n": 1})
    assert reply.status_code == 202
    activation_id = reply.json()["activationId"]
    assert reply.json() == {"activationId": reply.headers["X-Openwhisk-Activation-Id"]}
    assert gateway.call("GET", f"/api/v1/namespaces/_/activations/{activation_id}").status_code == 404
    invoker.wait_for_demand()
    invoker.ready("guest/hello")
    record = wait_for_record(valkey_url, activation_id)
    assert record.result == {"n": 1}
    assert record.start_mode == "cold"


def test_a_blocking_call_that_waits_too_long_becomes_a_202_and_still_ends(
    gateway: GatewayProcess, invoker: FakeInvoker, valkey_url: str
) -> None:
    gateway.put_python()
    reply = gateway.call("POST", f"{HELLO}?blocking=true&timeout=200", json={"n": 1})
    assert reply.status_code == 202
    assert pending(valkey_url) == 1
    invoker.ready("guest/hello")
    assert wait_for_record(valkey_url, reply.json()["activationId"]).result == {"n": 1}
    assert len(invoker.runs) == 1


@pytest.mark.parametrize("kind", ["python", "llm"])
def test_a_202_of_a_killed_gateway_ends_in_exactly_one_record(
    start_gateway: Callable[..., GatewayProcess], invoker: FakeInvoker, valkey_url: str, kind: str
) -> None:
    """Killed before anything ran: another gateway runs it.  Killed under a run: an LLM is run again, user code is not."""
    first = start_gateway()
    first.put_llm() if kind == "llm" else first.put_python()
    name, body = ("chat", {"prompt": "x", "max_tokens": 2}) if kind == "llm" else ("hello", {"n": 1})
    path = f"/api/v1/namespaces/_/actions/{name}"
    running = first.call("POST", path, json=body).json()["activationId"]
    invoker.wait_for_demand()
    invoker.pace = threading.Semaphore(0)
    invoker.ready(f"guest/{name}", slots=1)
    assert invoker.entered.acquire(timeout=10)
    waiting = first.call("POST", path, json=body).json()["activationId"]
    invoker.wait_for_demand()
    first.kill()
    invoker.pace = None
    second = start_gateway(THAW_GATEWAY_HEARTBEAT_S="0.5")
    ended = {i: wait_for_record(valkey_url, i) for i in (running, waiting)}
    assert ended[waiting].status.value == 0
    assert ended[running].status.value == (0 if kind == "llm" else 3)
    assert sum(r["activation_id"] == running for r in invoker.runs) == (2 if kind == "llm" else 1)
    listed = second.call("GET", "/api/v1/namespaces/_/activations").json()
    assert sorted(r["activationId"] for r in listed) == sorted(ended)


def test_a_202_outlives_a_state_server_killed_right_after_it(own_valkey: ValkeyServer) -> None:
    add_key(own_valkey.url, KEY, "guest")
    gateway, invoker = GatewayProcess(own_valkey.url), FakeInvoker(own_valkey.url)
    try:
        gateway.put_python()
        activation_id = gateway.call("POST", HELLO, json={"n": 1}).json()["activationId"]
        own_valkey.kill()
        own_valkey.start()
        invoker.ready("guest/hello")
        assert wait_for_record(own_valkey.url, activation_id).result == {"n": 1}
        assert len(invoker.runs) == 1
    finally:
        invoker.stop()
        gateway.stop()


def test_a_client_that_hangs_up_before_its_first_token_leaves_nothing_waiting(
    gateway: GatewayProcess, invoker: FakeInvoker, valkey_url: str
) -> None:
    gateway.put_llm()
    for body in ({"stream": True}, {}):
        chat = {"model": "chat", "messages": [{"role": "user", "content": "x"}], **body}
        client = raw_post(gateway, "/v1/chat/completions", chat)
        (demand,) = invoker.wait_for_demand()
        client.close()
        invoker.wait_for_demand(0, timeout_s=2)
        record = wait_for_record(valkey_url, demand.activation_id)
        assert record.status.value == 1


def test_a_client_that_hangs_up_in_mid_stream_frees_its_slot_within_a_second(
    gateway: GatewayProcess, invoker: FakeInvoker, valkey_url: str
) -> None:
    gateway.put_llm()
    invoker.ready("guest/chat", slots=1)
    for body in ({"stream": True}, {}):
        invoker.pace = threading.Semaphore(1)
        chat = {"model": "chat", "messages": [{"role": "user", "content": "x"}], **body}
        client = raw_post(gateway, "/v1/chat/completions", chat)
        assert invoker.entered.acquire(timeout=10)
        if body:
            assert client.recv(1)
        client.close()
        assert invoker.closed.acquire(timeout=1)
        record = wait_for_record(valkey_url, invoker.runs[-1]["activation_id"])
        assert record.status.value == 1
    invoker.pace = None
    assert gateway.chat(max_tokens=1).status_code == 200


def test_throttles_answer_429_in_openwhisks_words(
    start_gateway: Callable[..., GatewayProcess], invoker: FakeInvoker
) -> None:
    gateway = start_gateway(THAW_INVOCATIONS_PER_MINUTE="2", THAW_INVOCATIONS_CONCURRENT="1")
    gateway.put_python()
    invoker.ready("guest/hello")
    invoker.pace = threading.Semaphore(0)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(gateway.call, "POST", f"{HELLO}?blocking=true")
        assert invoker.entered.acquire(timeout=10)
        second = gateway.call("POST", f"{HELLO}?blocking=true")
        assert second.status_code == 429
        assert second.json()["error"] == "Too many concurrent requests in flight (count: 2, allowed: 1)."
        invoker.pace = None
        assert first.result().status_code == 200
    replies = [gateway.call("POST", f"{HELLO}?blocking=true") for _ in range(4)]
    refused = [r for r in replies if r.status_code == 429]
    assert len(refused) >= 2
    assert refused[-1].json()["error"] == "Too many requests in the last minute (count: 3, allowed: 2)."
    assert 1 <= int(refused[-1].headers["Retry-After"]) <= 60


def test_records_are_listed_newest_first_and_filtered(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    gateway.put_python()
    gateway.put_python("other")
    invoker.ready("guest/hello", instance="i0")
    invoker.ready("guest/other", instance="i1")
    ids = [gateway.call("POST", f"{HELLO}?blocking=true").json()["activationId"] for _ in range(2)]
    last = gateway.call("POST", "/api/v1/namespaces/_/actions/other?blocking=true").json()
    base = "/api/v1/namespaces/_/activations"
    listed = gateway.call("GET", base).json()
    assert {r["activationId"] for r in listed} == {*ids, last["activationId"]}
    assert "response" not in listed[0]
    assert [r["start"] for r in listed] == sorted((r["start"] for r in listed), reverse=True)
    assert gateway.call("GET", f"{base}?count=true").json() == {"activations": 3}
    assert gateway.call("GET", f"{base}?docs=true&count=true").status_code == 400
    named = gateway.call("GET", f"{base}?name=other&docs=true").json()
    assert [r["response"]["success"] for r in named] == [True]
    assert gateway.call("GET", f"{base}?since={last['end'] + 10_000}").json() == []
    assert gateway.call("GET", f"{base}/xyz").status_code == 400
    assert gateway.call("GET", f"{base}/{'0' * 32}").status_code == 404


def test_bound_final_parameters_cannot_be_replaced(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    final = [{"key": "final", "value": True}]
    gateway.put_python(parameters=[{"key": "a", "value": 1}], annotations=final)
    reply = gateway.call("POST", f"{HELLO}?blocking=true", json={"a": 2})
    assert reply.status_code == 400
    assert reply.json()["error"].startswith("Request defines parameters that are not allowed")


def test_a_subject_is_written_into_the_record(gateway: GatewayProcess, invoker: FakeInvoker, valkey_url: str) -> None:
    gateway.put_python()
    invoker.ready("guest/hello")
    activation_id = gateway.call("POST", f"{HELLO}?blocking=true").json()["activationId"]
    assert gateway.record(activation_id)["subject"] == "guest-user"
    with redis.Redis.from_url(valkey_url) as client:
        (record,) = Records(client).activations(Namespace("guest"), limit=10)
    assert record.action == ActionName("guest/hello")
