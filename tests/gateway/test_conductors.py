"""Conductors over a real socket: the actions that they start, their arguments, and the end of a composition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gateway.conftest import GatewayProcess, Start, notes, pairs
from tests.gateway.test_sequences import sequence

Conduct = Callable[[Callable[[dict[str, Any]], Any]], dict[str, Any]]


@pytest.fixture
def conduct(gateway: GatewayProcess) -> Conduct:
    """Run a conductor that says what the function returns for its arguments.  Other actions add one to ``n``."""
    gateway.put_python("lead", annotations=pairs(conductor=True, final=True), parameters=pairs(bound=1))
    gateway.put_python("add")
    gateway.serve("lead", "add")

    def run(says: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        def function(value: dict[str, Any]) -> tuple[int, Any]:
            if gateway.invoker.runs[-1]["action_name"] == "/guest/lead":
                return 200, says(value)
            return 200, {"n": value["n"] + 1} if "n" in value else {"error": "no n"}

        gateway.invoker.function = function
        return dict(gateway.invoke("lead", n=1).json())

    return run


def test_a_conductor_runs_what_it_names_until_it_names_nothing(conduct: Conduct, gateway: GatewayProcess) -> None:
    def says(value: dict[str, Any]) -> dict[str, Any]:
        step = value.get("step", 0)
        if step == 2:
            return {"params": {"total": value["n"], "bound": value["bound"]}}
        return {"action": "add", "params": {"n": value["n"]}, "state": {"step": step + 1}}

    record = conduct(says)
    assert record["response"]["result"] == {"total": 3, "bound": 1}
    assert [run["action_name"][7:] for run in gateway.invoker.runs] == ["lead", "add", "lead", "add", "lead"]
    parts = [gateway.record(one) for one in record["logs"]]
    assert [p["name"] for p in parts] == ["lead", "add", "lead", "add", "lead"]
    assert {p["cause"] for p in parts} == {record["activationId"]}
    assert {notes(p)["causedBy"] for p in parts} == {"sequence"}
    assert gateway.invoker.runs[1]["value"] == {"n": 1}, "the state is the conductor's own"


def test_a_conductor_hears_of_a_components_failure_and_of_names_that_mean_nothing(conduct: Conduct) -> None:
    heard: list[Any] = []

    def says(value: dict[str, Any]) -> dict[str, Any]:
        heard.append(value.get("error"))
        wanted = ["add", "nothing", "/other/act", 5, "a/b/c/d", None][len(heard) - 1]
        return {"action": wanted, "params": {}} if wanted else {"done": True}

    assert conduct(says)["response"]["result"] == {"done": True}
    assert heard == [
        None,
        "no n",
        "Failed to resolve action with name 'nothing' during composition.",
        "Failed entitlement check for action with name '/other/act' during composition.",
        "Failed to parse action name from json value 5 during composition.",
        "The request content was malformed:\n'a/b/c/d' is not the name of an action.",
    ]


def test_the_conductors_own_failure_ends_a_composition(conduct: Conduct, gateway: GatewayProcess) -> None:
    record = conduct(lambda value: {"error": "enough", "params": {"error": "more"}})
    assert (record["response"]["status"], record["response"]["result"]) == ("application error", {"error": "more"})
    assert len(gateway.invoker.runs) == 1


def test_an_endless_composition_ends_at_its_limit(start_gateway: Start) -> None:
    """After the last action that it may run a conductor is told so, and after twice as many runs it is not asked."""
    gateway = start_gateway(THAW_SEQUENCE_LENGTH="2")
    gateway.put_python("lead", annotations=pairs(conductor=True))
    gateway.put_python("add")
    gateway.serve("lead", "add")
    gateway.invoker.function = lambda value: (200, {"action": "add"})
    record = gateway.invoke("lead").json()
    assert record["response"]["result"] == {"error": "Too many actions in the composition."}
    assert [run["action_name"][7:] for run in gateway.invoker.runs] == [
        "lead",
        "add",
        "lead",
        "add",
        "lead",
        "lead",
        "lead",
    ]


def test_a_composition_is_a_component_of_a_sequence(conduct: Conduct, gateway: GatewayProcess) -> None:
    conduct(lambda value: {"params": {"n": value["n"] * 10}})
    gateway.put("actions/seq", **sequence("add", "lead", "add"))
    assert gateway.invoke("seq", n=1).json()["response"]["result"] == {"n": 21}


def test_every_run_of_a_conductor_that_nobody_waits_for_has_its_packages_parameters(gateway: GatewayProcess) -> None:
    gateway.put("packages/p", parameters=pairs(of_package=1))
    gateway.put("packages/b", binding={"namespace": "_", "name": "p"}, parameters=pairs(of_binding=2))
    gateway.put_python("p/lead", annotations=pairs(conductor=True), parameters=pairs(own=3))
    gateway.put_python("add")
    gateway.serve("p/lead", "add")

    def function(value: dict[str, Any]) -> tuple[int, Any]:
        is_first = gateway.invoker.runs[-1]["action_name"].endswith("lead") and "step" not in value
        return 200, {"action": "add", "state": {"step": 1}} if is_first else {}

    gateway.invoker.function = function
    for query in ("blocking=true", "blocking=false"):
        gateway.invoker.runs.clear()
        gateway.ended(gateway.invoke("b/lead", query).json()["activationId"])
        first, _, second = (run["value"] for run in gateway.invoker.runs)
        assert first == {"of_package": 1, "of_binding": 2, "own": 3}, query
        assert second == {**first, "step": 1}, query
