"""Blocking invocations through /api/v1, their records, and throttles."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.gateway.conftest import CODE, HERE, GatewayProcess, Start, notes, pairs
from thaw.activation import ActivationStatus
from thaw.errors import InitFailed, ModelNotFound

HELLO = "/api/v1/namespaces/_/actions/hello"


def test_a_blocking_call_answers_with_the_record_and_result_alone_with_the_result(gateway: GatewayProcess) -> None:
    gateway.serve_python(parameters=pairs(a=1))
    gateway.invoker.log_lines.append("2026-01-01T00:00:00.0Z stdout: hi")
    reply = gateway.invoke(b=2)
    assert reply.status_code == 200
    body = reply.json()
    assert body["response"] == {"status": "success", "statusCode": 0, "success": True, "result": {"a": 1, "b": 2}}
    assert reply.headers["X-Openwhisk-Activation-Id"] == body["activationId"]
    assert body["duration"] == body["end"] - body["start"]
    (run,) = gateway.invoker.runs
    assert (run["path"], run["action_name"]) == ("/instances/i0/run", "/guest/hello")
    assert run["activation_id"] == run["header"] == body["activationId"]
    record = gateway.record(body["activationId"])
    assert {**record, "logs": [], "end": 0, "duration": 0} == {**body, "end": 0, "duration": 0}
    assert record["logs"] == ["2026-01-01T00:00:00.0Z stdout: hi"]
    assert record["subject"] == "guest-user"
    told = notes(record)
    assert (told["path"], told["kind"], "initTime" in told) == ("guest/hello", "python:3.11", False)
    assert gateway.invoke("hello", "blocking=true&result=true", b=3).json() == {"a": 1, "b": 3}
    path = f"activations/{body['activationId']}"
    assert gateway.read(f"{path}/result") == {"result": {"a": 1, "b": 2}, "status": "success", "success": True}
    assert gateway.read(f"{path}/logs") == {"logs": record["logs"]}


def test_a_functions_ending_decides_status_and_record(gateway: GatewayProcess) -> None:
    gateway.serve_python()
    no_dictionary = {"error": "The action did not return a dictionary or array."}
    for answer, status, text, result in (
        ((200, {"error": "mine"}), 502, "application error", {"error": "mine"}),
        ((200, 3), 502, "action developer error", no_dictionary),
        ((502, {"error": "broken"}), 502, "action developer error", {"error": "broken"}),
        ((200, [1]), 200, "success", [1]),
    ):
        gateway.invoker.function = lambda _, answer=answer: answer
        reply = gateway.invoke()
        assert (reply.status_code, "code" in reply.json()) == (status, False)
        assert (reply.json()["response"]["status"], reply.json()["response"]["result"]) == (text, result)


def test_a_result_longer_than_allowed_is_a_developer_error_in_openwhisks_words(start_gateway: Start) -> None:
    gateway = start_gateway(THAW_RESULT_BYTES="100")
    gateway.put_python()
    gateway.invoker.ready("guest/hello", slots=1)
    gateway.invoker.log_lines = ["x" * 200]
    for n_bytes in (100, 101, 100):
        gateway.invoker.function = lambda _, n=n_bytes: (200, {"x": "y" * (n - len('{"x": ""}'))})
        reply = gateway.invoke()
        record = gateway.record(reply)
        assert record["logs"] == gateway.invoker.log_lines
        if n_bytes > 100:
            error = "The action produced a response that exceeded the allowed length: 101 > 100 bytes."
            assert (reply.status_code, record["response"]["status"]) == (502, "action developer error")
            assert record["response"]["result"] == {"error": error}
        else:
            assert reply.status_code == 200


def test_a_result_that_is_hard_to_write_costs_no_other_activation_its_record(gateway: GatewayProcess) -> None:
    """Half a surrogate pair is kept as it is, and a result that is nested too deeply is replaced by an error.

    This holds for blocking calls and for 202s.
    """
    nested: Any = []
    for _ in range(600):
        nested = [nested]
    results = [{"x": "\ud800"}, nested, {"y": 1}]
    answers = [(200, result) for result in results for _ in range(2)]
    gateway.serve_python()
    gateway.invoker.function = lambda _: answers.pop(0)
    records = []
    for _ in results:
        reply = gateway.invoke()
        assert reply.status_code == 200
        held = reply.headers["X-Openwhisk-Activation-Id"]
        accepted = gateway.call("POST", HELLO).json()["activationId"]
        records.append([gateway.ended(activation_id) for activation_id in (held, accepted)])
    (half, half_later), (deep, deep_later), (plain, plain_later) = records
    assert half.result == half_later.result == {"x": "\ud800"}
    assert gateway.record(half.activation_id)["response"]["result"] == {"x": "\ud800"}
    assert "nested too deep" in str(deep.result)
    assert deep.status is deep_later.status is ActivationStatus.DEVELOPER_ERROR
    assert plain.result == plain_later.result == {"y": 1}


def test_a_function_whose_worker_died_ends_in_one_internal_error_and_is_not_run_again(gateway: GatewayProcess) -> None:
    gateway.serve_python()
    gateway.invoker.cut_after.append(0)
    reply = gateway.invoke()
    assert reply.status_code == 500
    assert reply.json()["response"]["status"] == "whisk internal error"
    assert len(gateway.invoker.runs) == 1
    assert gateway.record(reply.json()["activationId"])["statusCode"] == 3


def test_a_function_over_its_time_limit_is_a_developer_error(gateway: GatewayProcess) -> None:
    gateway.put_python(limits={"timeout": 200})
    gateway.invoker.ready("guest/hello")
    gateway.invoker.pace = threading.Semaphore(0)
    reply = gateway.invoke()
    assert reply.status_code == 502
    assert reply.json()["response"]["result"] == {"error": "The action exceeded its time limits of 200 milliseconds."}
    assert {"key": "timeout", "value": True} in reply.json()["annotations"]
    assert gateway.invoker.closed.acquire(timeout=20)


def test_an_llm_can_be_invoked_as_an_action(gateway: GatewayProcess) -> None:
    gateway.serve_llm()
    path = "/api/v1/namespaces/_/actions/chat?blocking=true&result=true"
    chat = gateway.call("POST", path, json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}).json()
    assert chat["choices"][0]["message"]["content"] == "w0 w1 "
    assert gateway.call("POST", path, json={"prompt": "x", "max_tokens": 1}).json()["choices"][0]["text"] == "w0 "
    assert gateway.call("POST", path, json={"x": 1}).status_code == 400


def test_a_failed_start_ends_those_who_waited_for_it_with_its_reason(gateway: GatewayProcess) -> None:
    gateway.put_llm()
    gateway.put_python()
    chat = gateway.soon(gateway.chat)
    hello = gateway.soon(gateway.call, "POST", f"{HELLO}?blocking=true")
    for demand in gateway.invoker.wait_for_demand(2):
        llm = demand.action == "guest/chat"
        error = ModelNotFound("no bucket 'models'", hint="make it") if llm else InitFailed("no main", hint="add it")
        gateway.invoker.start_failed(error, demand)
    assert chat.result().status_code == 502
    error = chat.result().json()["error"]
    assert (error["message"], error["code"], error["hint"]) == ("no bucket 'models'", "ModelNotFound", "make it")
    record = hello.result().json()
    assert record["response"]["result"] == {"error": "no main", "hint": "add it"}
    assert {"key": "startMode", "value": "cold"} in record["annotations"]
    gateway.invoker.wait_for_demand(0)


def test_throttles_answer_429_in_openwhisks_words(start_gateway: Start) -> None:
    gateway = start_gateway(THAW_INVOCATIONS_PER_MINUTE="2", THAW_INVOCATIONS_CONCURRENT="1")
    gateway.serve_python()
    gateway.invoker.pace = threading.Semaphore(0)
    first = gateway.soon(gateway.call, "POST", f"{HELLO}?blocking=true")
    assert gateway.invoker.entered.acquire(timeout=60)
    second = gateway.invoke()
    assert second.status_code == 429
    assert second.json()["error"] == "Too many concurrent requests in flight (count: 2, allowed: 1)."
    gateway.invoker.pace = None
    assert first.result().status_code == 200
    replies = [gateway.invoke() for _ in range(5)]  # a minute may end in between
    refused = [r for r in replies if r.status_code == 429]
    assert len(refused) >= 2
    assert refused[-1].json()["error"] == "Too many requests in the last minute (count: 3, allowed: 2)."
    assert 1 <= int(refused[-1].headers["Retry-After"]) <= 60


def test_a_blocking_call_that_became_a_202_is_in_flight_until_its_run_ends(start_gateway: Start) -> None:
    gateway = start_gateway(THAW_INVOCATIONS_CONCURRENT="1")
    gateway.serve_python()
    gateway.invoker.pace = threading.Semaphore(0)
    accepted = gateway.call("POST", f"{HELLO}?blocking=true&timeout=1")
    assert accepted.status_code == 202
    refused = gateway.invoke()
    assert (refused.status_code, "concurrent" in refused.json()["error"]) == (429, True)
    gateway.invoker.pace = None
    gateway.ended(accepted.json()["activationId"])
    assert gateway.invoke().status_code == 200


def test_a_request_that_fails_is_in_flight_no_longer(start_gateway: Start) -> None:
    gateway = start_gateway(THAW_INVOCATIONS_CONCURRENT="1")
    gateway.put_python()
    gateway.put_llm()
    for ask in (lambda: gateway.chat(stream=True), gateway.chat, gateway.invoke):
        asked = gateway.soon(ask)
        (demand,) = gateway.invoker.wait_for_demand()
        gateway.invoker.start_failed(ModelNotFound("gone"), demand)
        failed = asked.result(60)
        assert "gone" in failed.text
        assert failed.status_code in (200, 502), "a request before it still holds the only slot"
        failed.close()
        gateway.invoker.wait_for_demand(0)


def test_records_are_listed_newest_first_and_filtered(gateway: GatewayProcess) -> None:
    gateway.serve_python("hello", "other")
    ids = [gateway.invoke().json()["activationId"] for _ in range(2)]
    last = gateway.invoke("other").json()
    for activation_id in (*ids, last["activationId"]):
        gateway.record(activation_id)
    listed = gateway.read("activations")
    assert {r["activationId"] for r in listed} == {*ids, last["activationId"]}
    assert "response" not in listed[0]
    assert [r["start"] for r in listed] == sorted((r["start"] for r in listed), reverse=True)
    assert gateway.read("activations?count=true") == {"activations": 3}
    for path, status in (("?docs=true&count=true", 400), ("/xyz", 400), (f"/{'0' * 32}", 404)):
        assert gateway.call("GET", f"{HERE}/activations{path}").status_code == status, path
    named = gateway.read("activations?name=other&docs=true")
    assert [r["response"]["success"] for r in named] == [True]
    for name, n in (("other", 1), ("guest/other", 1), ("hello", 2), ("none", 0)):
        assert gateway.read(f"activations?name={name}&count=true") == {"activations": n}
    assert {r["activationId"] for r in gateway.read("activations?name=hello&skip=1")} < set(ids)
    assert gateway.read(f"activations?since={last['end'] + 10_000}") == []


def test_bound_final_parameters_cannot_be_replaced(gateway: GatewayProcess) -> None:
    gateway.put_python(parameters=pairs(a=1), annotations=pairs(final=True))
    reply = gateway.invoke(a=2)
    assert reply.status_code == 400
    assert reply.json()["error"].startswith("Request defines parameters that are not allowed")


def test_a_parameter_with_init_is_kept_for_the_init_and_is_no_argument(shared_gateway: GatewayProcess) -> None:
    ready = shared_gateway
    given = [{"key": "DB_URL", "value": "x", "init": True}, {"key": "a", "value": 1, "init": False}]
    made = ready.put("actions/at-init?overwrite=true", exec=CODE, parameters=given)
    assert made["parameters"] == [{"key": "a", "value": 1}, {"key": "DB_URL", "value": "x", "init": True}]
    assert ready.call("GET", f"{HERE}/actions/at-init").json()["parameters"] == made["parameters"]
    ready.put("actions/at-init?overwrite=true", parameters=[{"key": "a", "value": 2}])
    assert ready.call("GET", f"{HERE}/actions/at-init").json()["parameters"] == [{"key": "a", "value": 2}]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("actions/x", {"exec": CODE, "parameters": [{"key": "a=b", "value": 1, "init": True}]}, "cannot be a variable"),
        ("actions/x", {"exec": CODE, "parameters": [{"key": "__OW_X", "init": True}]}, "cannot be a variable"),
        ("actions/x", {"exec": CODE, "parameters": [{"key": "a", "init": "yes"}]}, "must be true or false"),
        ("packages/p", {"parameters": [{"key": "a", "value": 1, "init": True}]}, "are for actions"),
        ("triggers/t", {"parameters": [{"key": "a", "value": 1, "init": True}]}, "are for actions"),
    ],
)
def test_a_parameter_with_init_that_could_do_nothing_is_refused(
    shared_gateway: GatewayProcess, path: str, body: dict[str, Any], said: str
) -> None:
    reply = shared_gateway.call("PUT", f"{HERE}/{path}", json=body)
    assert (reply.status_code, said in reply.json()["error"]) == (400, True), reply.text
