"""CloudEvents over real sockets: invocations, web actions and triggers take them, and answer with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from tests.conftest import ValkeyServer
from tests.gateway.conftest import HERE, GatewayProcess, pairs
from tests.security.slow import module_gateway

INVOKE = f"{HERE}/actions/web?blocking=true&result=true"
ATTRIBUTES = {"specversion": "1.0", "id": "7", "source": "/tests", "type": "order.made"}
BINARY = {f"ce-{name}": value for name, value in ATTRIBUTES.items()}
STRUCTURED = {"Content-Type": "application/cloudevents+json; charset=utf-8"}


@pytest.fixture(scope="module")
def gateway(_shared_valkey: ValkeyServer) -> Iterator[GatewayProcess]:
    with module_gateway(_shared_valkey.url) as process:
        for name, raw in (("web", False), ("raw", True)):
            process.put_python(name, annotations=pairs(**{"web-export": True, "raw-http": raw}))
        process.serve("web", "raw")
        yield process


def send(
    gateway: GatewayProcess, path: str, body: bytes, headers: dict[str, str], returns: Any = None
) -> requests.Response:
    """``returns``: the function's result instead of its arguments."""
    gateway.invoker.function = lambda value: (200, value if returns is None else returns)
    return gateway.call("POST", path, data=body, headers=headers)


def event_body(**fields: Any) -> bytes:
    return json.dumps({**ATTRIBUTES, **fields}).encode()


def test_a_function_gets_the_same_of_an_event_in_both_modes(gateway: GatewayProcess) -> None:
    kind = {"datacontenttype": "application/json"}
    binary = send(gateway, INVOKE, b'{"n": 1}', {**BINARY, "Content-Type": "application/json"})
    structured = send(gateway, INVOKE, event_body(data={"n": 1}, **kind), STRUCTURED)
    named = gateway.invoker.runs[-1]["value"]
    assert named == {"n": 1, "__ce": {**ATTRIBUTES, **kind}}
    assert (binary.status_code, binary.json()) == (200, {"n": 1})  # its result is an event: here is its data
    assert (structured.status_code, structured.json()) == (200, {**ATTRIBUTES, **kind, "data": {"n": 1}})
    assert {k: v for k, v in binary.headers.items() if k.startswith("ce-")} == BINARY


def test_a_function_that_answers_with_fields_alone_answers_as_ever(gateway: GatewayProcess) -> None:
    reply = send(gateway, INVOKE, b"", BINARY, returns={"n": 2})
    assert (reply.json(), reply.headers["Content-Type"]) == ({"n": 2}, "application/json")
    whole = send(gateway, INVOKE.partition("&")[0], b"", BINARY)
    assert whole.json()["response"]["result"] == {"__ce": ATTRIBUTES}
    plain = send(gateway, INVOKE, b'{"__ce": {"type": "t"}}', {"Content-Type": "application/json"})
    assert plain.json() == {"__ce": {"type": "t"}}  # a client that sent no event gets the result


def test_an_event_that_is_only_accepted_reaches_the_record(gateway: GatewayProcess) -> None:
    accepted = send(gateway, f"{HERE}/actions/web", event_body(data=[1]), STRUCTURED)
    assert accepted.status_code == 202
    record = gateway.ended(accepted.json()["activationId"])
    assert record.result == {"__ce": {**ATTRIBUTES, "data": [1]}}


def test_a_web_action_answers_an_event_with_an_event(gateway: GatewayProcess) -> None:
    path = "/api/v1/web/guest/default/web"
    returns = {"n": 2, "__ce": {"type": "order.paid", "subject": "grün %"}}
    reply = send(gateway, f"{path}?x=1", b'{"n": 1}', {**BINARY, "Content-Type": "application/json"}, returns)
    got = gateway.invoker.runs[-1]["value"]
    assert (got["n"], got["x"], got["__ce"]["type"], got["__ow_method"]) == (1, "1", "order.made", "post")
    assert (reply.status_code, reply.json()) == (200, {"n": 2})
    assert reply.headers["ce-subject"] == "gr%C3%BCn%20%25"
    assert (reply.headers["ce-source"], reply.headers["ce-type"]) == ("/guest/web", "order.paid")
    assert reply.headers["ce-id"] == reply.headers["X-Openwhisk-Activation-Id"]
    whole = send(gateway, path, event_body(), STRUCTURED, returns).json()
    assert (whole["type"], whole["subject"], whole["data"]) == ("order.paid", "grün %", {"n": 2})
    assert send(gateway, f"{path}.json", event_body(), STRUCTURED, returns).json() == returns
    nothing = send(gateway, path, event_body(), STRUCTURED, {})
    assert (nothing.status_code, nothing.content) == (204, b"")


def test_a_raw_web_action_gets_an_event_as_it_was_sent(gateway: GatewayProcess) -> None:
    got = send(gateway, "/api/v1/web/guest/default/raw.json", event_body(), STRUCTURED).json()
    assert json.loads(got["__ow_body"]) == ATTRIBUTES


@pytest.mark.parametrize("path", [INVOKE, "/api/v1/web/guest/default/web", f"{HERE}/triggers/t"])
def test_what_is_no_event_runs_nothing(gateway: GatewayProcess, path: str) -> None:
    gateway.put("triggers/t?overwrite=true")
    gateway.invoker.runs.clear()
    batch = {"Content-Type": "application/cloudevents-batch+json"}
    for body, headers, status, why in (
        (b"[]", batch, 415, "send one event"),
        (b"{}", STRUCTURED, 400, "needs the attribute id"),
        (b"{}", {**BINARY, "ce-specversion": "2.0"}, 400, "specversion must be 1.0"),
        (b"{", {**BINARY, "Content-Type": "application/json"}, 400, "malformed"),
    ):
        reply = send(gateway, path, body, headers)
        assert (reply.status_code, why in reply.json()["error"]) == (status, True), reply.text
    assert gateway.invoker.runs == []


def test_an_answer_that_is_no_event_says_so(gateway: GatewayProcess) -> None:
    for path, status in ((INVOKE, 502), ("/api/v1/web/guest/default/web", 400)):
        reply = send(gateway, path, b"", BINARY, returns={"__ce": {"subject": "x"}})
        assert (reply.status_code, "needs the attribute type" in reply.json()["error"]) == (status, True)
        assert len(reply.headers["X-Openwhisk-Activation-Id"]) == 32


def test_a_trigger_passes_an_event_on_to_its_rules(gateway: GatewayProcess) -> None:
    gateway.put("triggers/fed?overwrite=true", parameters=pairs(own=1))
    gateway.put("rules/r?overwrite=true", trigger="/_/fed", action="/_/web")
    fired = send(gateway, f"{HERE}/triggers/fed", event_body(data={"n": 1}), STRUCTURED)
    assert fired.status_code == 202
    record = gateway.ended(fired.json()["activationId"])
    assert record.result == {"own": 1, "n": 1, "__ce": ATTRIBUTES}
    called = json.loads(record.logs[0])["activationId"]
    assert gateway.ended(called).result == record.result
