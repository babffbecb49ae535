"""Blocking invocations through /api/v1, their records, and throttles."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from relay.protocol.messages import StartFailed
from relay.state import bus
from relay.state.records import Records
from tests.gateway.conftest import GatewayProcess, wait_for_record
from tests.gateway.fake_invoker import FakeInvoker
from thaw.activation import ActivationStatus
from thaw.errors import InitFailed, ModelNotFound
from thaw.ids import ActionName, GroupId, Namespace

HELLO = "/api/v1/namespaces/_/actions/hello"


def test_a_blocking_call_answers_with_the_record_and_result_alone_with_the_result(
    gateway: GatewayProcess, invoker: FakeInvoker
) -> None:
    gateway.put_python(parameters=[{"key": "a", "value": 1}])
    invoker.ready("guest/hello")
    invoker.log_lines.append("2026-01-01T00:00:00.0Z stdout: hi")
    gateway.wait_for_routes()
    reply = gateway.call("POST", f"{HELLO}?blocking=true", json={"b": 2})
    assert reply.status_code == 200
    body = reply.json()
    assert body["response"] == {"status": "success", "statusCode": 0, "success": True, "result": {"a": 1, "b": 2}}
    assert reply.headers["X-Openwhisk-Activation-Id"] == body["activationId"]
    assert body["duration"] == body["end"] - body["start"]
    (run,) = invoker.runs
    assert run["path"] == "/instances/i0/run"
    assert run["action_name"] == "/guest/hello"
    assert run["activation_id"] == run["header"] == body["activationId"]
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
        "result": {"a": 1, "b": 2},
        "status": "success",
        "success": True,
    }
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


def test_a_result_longer_than_allowed_is_a_developer_error_in_openwhisks_words(
    start_gateway: Callable[..., GatewayProcess], invoker: FakeInvoker
) -> None:
    gateway = start_gateway(THAW_RESULT_BYTES="100")
    gateway.put_python()
    invoker.ready("guest/hello", slots=1)
    invoker.log_lines = ["x" * 200]
    for n_bytes in (100, 101, 100):
        invoker.function = lambda _, n=n_bytes: (200, {"x": "y" * (n - len('{"x": ""}'))})
        reply = gateway.call("POST", f"{HELLO}?blocking=true")
        record = gateway.record(reply.headers["X-Openwhisk-Activation-Id"])
        assert record["logs"] == invoker.log_lines
        if n_bytes > 100:
            error = "The action produced a response that exceeded the allowed length: 101 > 100 bytes."
            assert (reply.status_code, record["response"]["status"]) == (502, "action developer error")
            assert record["response"]["result"] == {"error": error}
        else:
            assert reply.status_code == 200


def test_a_result_that_is_hard_to_write_costs_no_other_activation_its_record(
    gateway: GatewayProcess, invoker: FakeInvoker, valkey_url: str
) -> None:
    """Half a surrogate pair is kept as it is, and a result that is nested too deeply is replaced by an error.

    This holds for blocking calls and for 202s.
    """
    nested: Any = []
    for _ in range(600):
        nested = [nested]
    results = [{"x": "\ud800"}, nested, {"y": 1}]
    answers = [(200, result) for result in results for _ in range(2)]
    gateway.put_python()
    invoker.ready("guest/hello")
    invoker.function = lambda _: answers.pop(0)
    records = []
    for _ in results:
        reply = gateway.call("POST", f"{HELLO}?blocking=true")
        assert reply.status_code == 200
        held = reply.headers["X-Openwhisk-Activation-Id"]
        accepted = gateway.call("POST", HELLO).json()["activationId"]
        records.append([wait_for_record(valkey_url, activation_id) for activation_id in (held, accepted)])
    (half, half_later), (deep, deep_later), (plain, plain_later) = records
    assert half.result == half_later.result == {"x": "\ud800"}
    assert gateway.record(half.activation_id)["response"]["result"] == {"x": "\ud800"}
    assert "nested too deep" in str(deep.result)
    assert deep.status is deep_later.status is ActivationStatus.DEVELOPER_ERROR
    assert plain.result == plain_later.result == {"y": 1}


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
    assert invoker.closed.acquire(timeout=20)


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
            error = ModelNotFound("no bucket 'models'", hint="make it") if llm else InitFailed("no main", hint="add it")
            failed = StartFailed(demand.action, (demand.activation_id,), error.info(), GroupId("b" * 32))
            bus.publish(invoker.client, failed)
        assert chat.result().status_code == 502
        assert chat.result().json()["error"]["message"] == "no bucket 'models'"
        assert chat.result().json()["error"]["code"] == "ModelNotFound"
        assert chat.result().json()["error"]["hint"] == "make it"
        record = hello.result().json()
        assert record["response"]["result"] == {"error": "no main", "hint": "add it"}
        assert {"key": "startMode", "value": "cold"} in record["annotations"]
    invoker.wait_for_demand(0)


def test_throttles_answer_429_in_openwhisks_words(
    start_gateway: Callable[..., GatewayProcess], invoker: FakeInvoker
) -> None:
    gateway = start_gateway(THAW_INVOCATIONS_PER_MINUTE="2", THAW_INVOCATIONS_CONCURRENT="1")
    gateway.put_python()
    invoker.ready("guest/hello")
    invoker.pace = threading.Semaphore(0)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(gateway.call, "POST", f"{HELLO}?blocking=true")
        assert invoker.entered.acquire(timeout=60)
        second = gateway.call("POST", f"{HELLO}?blocking=true")
        assert second.status_code == 429
        assert second.json()["error"] == "Too many concurrent requests in flight (count: 2, allowed: 1)."
        invoker.pace = None
        assert first.result().status_code == 200
    replies = [gateway.call("POST", f"{HELLO}?blocking=true") for _ in range(5)]  # a minute may end in between
    refused = [r for r in replies if r.status_code == 429]
    assert len(refused) >= 2
    assert refused[-1].json()["error"] == "Too many requests in the last minute (count: 3, allowed: 2)."
    assert 1 <= int(refused[-1].headers["Retry-After"]) <= 60


def test_a_blocking_call_that_became_a_202_is_in_flight_until_its_run_ends(
    start_gateway: Callable[..., GatewayProcess], invoker: FakeInvoker, valkey_url: str
) -> None:
    gateway = start_gateway(THAW_INVOCATIONS_CONCURRENT="1")
    gateway.put_python()
    invoker.ready("guest/hello")
    invoker.pace = threading.Semaphore(0)
    accepted = gateway.call("POST", f"{HELLO}?blocking=true&timeout=1")
    assert accepted.status_code == 202
    refused = gateway.call("POST", f"{HELLO}?blocking=true")
    assert (refused.status_code, "concurrent" in refused.json()["error"]) == (429, True)
    invoker.pace = None
    wait_for_record(valkey_url, accepted.json()["activationId"])
    assert gateway.call("POST", f"{HELLO}?blocking=true").status_code == 200


def test_a_request_that_fails_is_in_flight_no_longer(
    start_gateway: Callable[..., GatewayProcess], invoker: FakeInvoker
) -> None:
    gateway = start_gateway(THAW_INVOCATIONS_CONCURRENT="1")
    gateway.put_python()
    gateway.put_llm()
    with ThreadPoolExecutor(1) as pool:
        for ask in (
            lambda: gateway.chat(stream=True),
            lambda: gateway.chat(),
            lambda: gateway.call("POST", f"{HELLO}?blocking=true"),
        ):
            asked = pool.submit(ask)
            (demand,) = invoker.wait_for_demand()
            error = ModelNotFound("gone").info()
            bus.publish(invoker.client, StartFailed(demand.action, (demand.activation_id,), error, GroupId("b" * 32)))
            failed = asked.result(60)
            assert "gone" in failed.text
            assert failed.status_code in (200, 502), "a request before it still holds the only slot"
            failed.close()
            invoker.wait_for_demand(0)


def test_records_are_listed_newest_first_and_filtered(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    gateway.put_python()
    gateway.put_python("other")
    invoker.ready("guest/hello", instance="i0")
    invoker.ready("guest/other", instance="i1")
    ids = [gateway.call("POST", f"{HELLO}?blocking=true").json()["activationId"] for _ in range(2)]
    last = gateway.call("POST", "/api/v1/namespaces/_/actions/other?blocking=true").json()
    for activation_id in (*ids, last["activationId"]):
        gateway.record(activation_id)
    base = "/api/v1/namespaces/_/activations"
    listed = gateway.call("GET", base).json()
    assert {r["activationId"] for r in listed} == {*ids, last["activationId"]}
    assert "response" not in listed[0]
    assert [r["start"] for r in listed] == sorted((r["start"] for r in listed), reverse=True)
    assert gateway.call("GET", f"{base}?count=true").json() == {"activations": 3}
    assert gateway.call("GET", f"{base}?docs=true&count=true").status_code == 400
    named = gateway.call("GET", f"{base}?name=other&docs=true").json()
    assert [r["response"]["success"] for r in named] == [True]
    for name, n in (("other", 1), ("guest/other", 1), ("hello", 2), ("none", 0)):
        assert gateway.call("GET", f"{base}?name={name}&count=true").json() == {"activations": n}
    assert {r["activationId"] for r in gateway.call("GET", f"{base}?name=hello&skip=1").json()} < set(ids)
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
        (record,) = Records(client).activations(Namespace("guest"), limit=10).whole()
    assert record.action == ActionName("guest/hello")
