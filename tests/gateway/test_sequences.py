"""Sequences over a real socket: the order of the actions, their records, and the end of a sequence."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.conftest import GatewayProcess, Start, notes, pairs


def sequence(*names: str) -> dict[str, Any]:
    return {"exec": {"kind": "sequence", "components": list(names)}}


@pytest.fixture
def pair(gateway: GatewayProcess) -> GatewayProcess:
    """Two actions that add their name to their input."""
    for i, name in enumerate(("a", "b")):
        gateway.put_python(name, parameters=pairs(**{f"of_{name}": i}))
    gateway.serve("a", "b")
    runs = gateway.invoker.runs
    gateway.invoker.function = lambda value: (200, {"said": value.get("said", "") + runs[-1]["action_name"][-1]})
    return gateway


def test_components_run_in_their_order_and_each_has_a_record_that_names_the_sequence(pair: GatewayProcess) -> None:
    made = pair.put("actions/seq", **sequence("/_/a", "b", "/guest/a"), parameters=pairs(said="x"))
    components = ["/guest/a", "/guest/b", "/guest/a"]
    assert made["exec"] == {"kind": "sequence", "binary": False, "code": "", "components": components}
    reply = pair.invoke("seq")
    assert reply.status_code == 200
    whole = reply.json()
    assert whole["response"]["result"] == {"said": "xaba"}
    record = pair.record(whole["activationId"])
    assert len(record["logs"]) == 3
    told = notes(record)
    assert (told["kind"], told["topmost"]) == ("sequence", True)
    components = [pair.record(one) for one in record["logs"]]
    assert [c["name"] for c in components] == ["a", "b", "a"]
    assert {c["cause"] for c in components} == {whole["activationId"]}
    assert {notes(c)["causedBy"] for c in components} == {"sequence"}
    assert pair.invoker.runs[1]["value"] == {"of_b": 1, "said": "xa"}


def test_a_component_may_be_a_sequence_or_in_a_package(pair: GatewayProcess) -> None:
    pair.put("packages/tools", parameters=pairs(of_package=1))
    pair.put("actions/tools/c", exec={"kind": "python:3.11", "code": "x"})
    pair.invoker.ready("guest/tools/c", instance="i2")
    pair.wait_for_routes(3)
    pair.put("actions/inner", **sequence("a", "tools/c"))
    pair.put("actions/outer", **sequence("inner", "b"))
    done = pair.invoke("outer").json()
    assert done["response"]["result"] == {"said": "acb"}
    assert pair.invoker.runs[1]["value"]["of_package"] == 1
    inner = pair.record(done["logs"][0])
    assert (inner["name"], len(inner["logs"]), inner["cause"]) == ("inner", 2, done["activationId"])
    assert "topmost" not in notes(inner)


def test_the_first_failure_ends_a_sequence_and_is_its_own(pair: GatewayProcess) -> None:
    pair.put("actions/seq", **sequence("a", "b"))
    for n, (status, text) in enumerate(((200, "application error"), (502, "action developer error")), 1):
        pair.invoker.function = lambda value, status=status: (status, {"error": "no"})
        reply = pair.invoke("seq")
        assert (reply.status_code, reply.json()["response"]["status"]) == (502, text)
        assert reply.json()["response"]["result"] == {"error": "no"}
        assert len(pair.invoker.runs) == n


def test_a_sequence_is_refused_that_is_too_long_or_runs_itself_or_what_is_not_there(start_gateway: Start) -> None:
    gateway = start_gateway(THAW_SEQUENCE_LENGTH="4")
    gateway.put_python("a")
    gateway.put("actions/two", **sequence("a", "a"))
    gateway.put("actions/four", **sequence("two", "two"))
    for components, error in (
        (("two", "two", "a"), "Too many actions in the sequence. It has 5, and 4 are allowed."),
        (("nothing",), "Sequence component does not exist: /guest/nothing."),
        ((), "The request content was malformed:\nA sequence needs at least one component."),
        (("a/b/c/d",), "The request content was malformed:\n'a/b/c/d' is not the name of an action."),
    ):
        assert gateway.put("actions/seq", 400, **sequence(*components))["error"] == error
    for name in ("two", "four"):
        refused = gateway.put("actions/two?overwrite=true", 400, **sequence(name))
        assert refused["error"] == "Sequence may not refer to itself."


def test_a_sequence_that_grew_when_it_was_deployed_already_ends_at_the_limit(start_gateway: Start) -> None:
    gateway = start_gateway(THAW_SEQUENCE_LENGTH="2")
    gateway.serve_python("a")
    gateway.put("actions/inner", **sequence("a"))
    gateway.put("actions/outer", **sequence("inner", "a"))
    gateway.put("actions/inner?overwrite=true", **sequence("a", "a"))
    reply = gateway.invoke("outer")
    assert reply.status_code == 502
    assert reply.json()["response"]["result"]["error"] == "Too many actions in the sequence."
    assert len(gateway.invoker.runs) == 2


def test_sequences_that_call_one_another_through_a_binding_that_changed_end_at_the_limit(
    gateway: GatewayProcess,
) -> None:
    for name in ("good", "bad"):
        gateway.put(f"packages/{name}")
    gateway.put_python("good/x")
    gateway.put("packages/b", binding={"namespace": "_", "name": "good"})
    gateway.put("actions/turn", **sequence("b/x"))
    gateway.put("actions/bad/x", **sequence("turn", "turn"))
    gateway.delete("packages/b")
    gateway.put("packages/b", binding={"namespace": "_", "name": "bad"})
    reply = gateway.invoke("turn").json()
    assert reply["response"]["result"]["error"] == "Too many actions in the sequence."
    gateway.ended(reply["activationId"])  # the last of all
    assert gateway.read("activations?count=true") == {"activations": 51}


def test_a_component_that_was_deleted_ends_its_sequence_with_its_name(pair: GatewayProcess) -> None:
    pair.put("actions/seq", **sequence("a", "b"))
    pair.delete("actions/b")
    reply = pair.invoke("seq").json()
    assert reply["response"]["result"] == {"error": "Sequence component does not exist: /guest/b."}
    assert len(reply["logs"]) == 1


def test_a_model_is_a_component(gateway: GatewayProcess) -> None:
    gateway.put_llm()
    gateway.put_python("ask")
    gateway.serve("chat", "ask")
    gateway.invoker.function = lambda value: (200, {"prompt": "hi", "max_tokens": 3})
    gateway.put("actions/seq", **sequence("ask", "chat"))
    assert gateway.invoke("seq").json()["response"]["result"]["choices"][0]["text"]
