"""Sequences over a real socket: the order of the actions, their records, and the end of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gateway.conftest import GatewayProcess, wait_for_record
from tests.gateway.fake_invoker import FakeInvoker
from tests.gateway.test_packages import HERE, pairs, put, values


def sequence(*names: str) -> dict[str, Any]:
    return {"exec": {"kind": "sequence", "components": list(names)}}


@pytest.fixture
def pair(gateway: GatewayProcess, invoker: FakeInvoker) -> FakeInvoker:
    """Two actions that add their name to their input."""
    for i, name in enumerate(("a", "b")):
        gateway.put_python(name, parameters=pairs(**{f"of_{name}": i}))
        invoker.ready(f"guest/{name}", instance=f"i{i}")
    gateway.wait_for_routes(2)
    invoker.function = lambda value: (200, {"said": f"{value.get('said', '')}{invoker.runs[-1]['action_name'][-1]}"})
    return invoker


def invoke(gateway: GatewayProcess, name: str, query: str = "blocking=true", **body: Any) -> Any:
    return gateway.call("POST", f"{HERE}/actions/{name}?{query}", json=body)


def test_components_run_in_their_order_and_each_has_a_record_that_names_the_sequence(
    gateway: GatewayProcess, pair: FakeInvoker
) -> None:
    made = put(gateway, "actions/seq", **sequence("/_/a", "b", "/guest/a"), parameters=pairs(said="x"))
    assert made["exec"] == {
        "kind": "sequence",
        "binary": False,
        "code": "",
        "components": ["/guest/a", "/guest/b", "/guest/a"],
    }
    reply = invoke(gateway, "seq")
    assert reply.status_code == 200
    whole = reply.json()
    assert whole["response"]["result"] == {"said": "xaba"}
    record = gateway.record(whole["activationId"])
    assert len(record["logs"]) == 3
    notes = values(record, "annotations")
    assert (notes["kind"], notes["topmost"]) == ("sequence", True)
    components = [gateway.record(one) for one in record["logs"]]
    assert [c["name"] for c in components] == ["a", "b", "a"]
    assert {c["cause"] for c in components} == {whole["activationId"]}
    assert {values(c, "annotations")["causedBy"] for c in components} == {"sequence"}
    assert pair.runs[1]["value"] == {"of_b": 1, "said": "xa"}


def test_a_component_may_be_a_sequence_or_in_a_package(gateway: GatewayProcess, pair: FakeInvoker) -> None:
    put(gateway, "packages/tools", parameters=pairs(of_package=1))
    put(gateway, "actions/tools/c", exec={"kind": "python:3.11", "code": "x"})
    pair.ready("guest/tools/c", instance="i2")
    gateway.wait_for_routes(3)
    put(gateway, "actions/inner", **sequence("a", "tools/c"))
    put(gateway, "actions/outer", **sequence("inner", "b"))
    done = invoke(gateway, "outer").json()
    assert done["response"]["result"] == {"said": "acb"}
    assert pair.runs[1]["value"]["of_package"] == 1
    inner = gateway.record(done["logs"][0])
    assert (inner["name"], len(inner["logs"]), inner["cause"]) == ("inner", 2, done["activationId"])
    assert "topmost" not in values(inner, "annotations")


@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [((200, {"error": "no"}), 502, "application error"), ((502, {"error": "no"}), 502, "action developer error")],
)
def test_the_first_failure_ends_a_sequence_and_is_its_own(
    gateway: GatewayProcess, pair: FakeInvoker, answer: tuple[int, Any], status: int, text: str
) -> None:
    put(gateway, "actions/seq", **sequence("a", "b"))
    pair.function = lambda value: answer
    reply = invoke(gateway, "seq")
    assert (reply.status_code, reply.json()["response"]["status"]) == (status, text)
    assert reply.json()["response"]["result"] == {"error": "no"}
    assert len(pair.runs) == 1


def test_a_sequence_is_refused_that_is_too_long_or_runs_itself_or_what_is_not_there(
    start_gateway: Callable[..., GatewayProcess],
) -> None:
    gateway = start_gateway(THAW_SEQUENCE_LENGTH="4")
    gateway.put_python("a")
    put(gateway, "actions/two", **sequence("a", "a"))
    put(gateway, "actions/four", **sequence("two", "two"))
    for components, error in (
        (("two", "two", "a"), "Too many actions in the sequence. It has 5, and 4 are allowed."),
        (("nothing",), "Sequence component does not exist: /guest/nothing."),
        ((), "The request content was malformed:\nA sequence needs at least one component."),
        (("a/b/c/d",), "The request content was malformed:\n'a/b/c/d' is not the name of an action."),
    ):
        assert put(gateway, "actions/seq", 400, **sequence(*components))["error"] == error
    for name in ("two", "four"):
        assert (
            put(gateway, "actions/two?overwrite=true", 400, **sequence(name))["error"]
            == "Sequence may not refer to itself."
        )


def test_a_sequence_that_grew_when_it_was_deployed_already_ends_at_the_limit(
    start_gateway: Callable[..., GatewayProcess], invoker: FakeInvoker
) -> None:
    gateway = start_gateway(THAW_SEQUENCE_LENGTH="2")
    gateway.put_python("a")
    invoker.ready("guest/a")
    gateway.wait_for_routes()
    put(gateway, "actions/inner", **sequence("a"))
    put(gateway, "actions/outer", **sequence("inner", "a"))
    put(gateway, "actions/inner?overwrite=true", **sequence("a", "a"))
    reply = invoke(gateway, "outer")
    assert reply.status_code == 502
    assert reply.json()["response"]["result"]["error"] == "Too many actions in the sequence."
    assert len(invoker.runs) == 2


def test_sequences_that_call_one_another_through_a_binding_that_changed_end_at_the_limit(
    gateway: GatewayProcess, valkey_url: str
) -> None:
    for name in ("good", "bad"):
        put(gateway, f"packages/{name}")
    gateway.put_python("good/x")
    put(gateway, "packages/b", binding={"namespace": "_", "name": "good"})
    put(gateway, "actions/turn", **sequence("b/x"))
    put(gateway, "actions/bad/x", **sequence("turn", "turn"))
    gateway.call("DELETE", f"{HERE}/packages/b")
    put(gateway, "packages/b", binding={"namespace": "_", "name": "bad"})
    reply = invoke(gateway, "turn").json()
    assert reply["response"]["result"]["error"] == "Too many actions in the sequence."
    wait_for_record(valkey_url, reply["activationId"])  # the last of all
    assert gateway.call("GET", f"{HERE}/activations?count=true").json() == {"activations": 51}


def test_a_component_that_was_deleted_ends_its_sequence_with_its_name(
    gateway: GatewayProcess, pair: FakeInvoker
) -> None:
    put(gateway, "actions/seq", **sequence("a", "b"))
    gateway.call("DELETE", f"{HERE}/actions/b")
    reply = invoke(gateway, "seq").json()
    assert reply["response"]["result"] == {"error": "Sequence component does not exist: /guest/b."}
    assert len(reply["logs"]) == 1


def test_a_model_is_a_component(gateway: GatewayProcess, invoker: FakeInvoker) -> None:
    gateway.put_llm("chat")
    gateway.put_python("ask")
    invoker.ready("guest/chat")
    invoker.ready("guest/ask", instance="i1")
    gateway.wait_for_routes(2)
    invoker.function = lambda value: (200, {"prompt": "hi", "max_tokens": 3})
    put(gateway, "actions/seq", **sequence("ask", "chat"))
    assert invoke(gateway, "seq").json()["response"]["result"]["choices"][0]["text"]
