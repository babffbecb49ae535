"""What the operator does about a resource, and what it says of it, as functions of what is there."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from thaw.config import parse_llm_config
from thaw.errors import ErrorInfo
from thaw.kubernetes.decide import Put, Remove, status, step
from thaw.kubernetes.resource import MARK, ModelFunction, seen
from thaw.standing import ColdStart, Standing

SPEC: dict[str, Any] = {"kind": "llm:vllm", "model": {"uri": "s3://models/tiny"}, "scaling": {"min_instances": 0}}
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def resource(generation: int = 1, uid: str = "u", **scaling: Any) -> ModelFunction:
    return ModelFunction("chat", uid, generation, {**SPEC, "scaling": {**SPEC["scaling"], **scaling}})


def standing(generation: int = 1, uid: str = "u", namespace: str = "thaw", **fields: Any) -> Standing:
    mark = {"namespace": namespace, "uid": uid, "generation": generation}
    return replace(Standing("chat", "0.0.1", parse_llm_config(SPEC), {MARK: mark}), **fields)


def said(of: ModelFunction, is_: Standing | None, **more: Any) -> dict[str, tuple[str, str]]:
    given: dict[str, Any] = {"refusal": None, "away": "", **more}
    found = status(of, is_, "thaw", given["refusal"], given["away"], NOW)
    return {c["type"]: (c["status"], c["reason"]) for c in found["conditions"]}


def test_a_resource_is_deployed_and_marked() -> None:
    found = step(resource(), None, "thaw")
    assert isinstance(found, Put)
    assert found.creates
    assert found.body["config"] == SPEC
    assert found.body["annotations"] == [{"key": MARK, "value": {"namespace": "thaw", "uid": "u", "generation": 1}}]


def test_what_was_carried_out_is_not_repeated_whatever_others_changed() -> None:
    other = parse_llm_config({**SPEC, "slo": {"ttft_ms": 1}})
    assert step(resource(), standing(config=other, version="0.0.7"), "thaw") is None
    assert said(resource(), standing(config=other))["InSync"] == ("False", "ChangedElsewhere")
    assert said(resource(), standing())["InSync"] == ("True", "InSync")


def test_a_change_of_the_resource_is_written_over_what_others_changed() -> None:
    other = parse_llm_config({**SPEC, "slo": {"ttft_ms": 1}})
    found = step(resource(2), standing(config=other), "thaw")
    assert isinstance(found, Put)
    assert not found.creates
    assert found.body["config"] == SPEC


def test_a_change_of_nothing_but_the_number_of_instances_keeps_what_runs() -> None:
    found = step(resource(2, min_instances=3), standing(), "thaw")
    assert isinstance(found, Put)
    assert found.body["scaling"] == {"min_instances": 3, "max_instances": 8}
    assert "config" not in found.body


def test_an_action_whose_resource_is_gone_is_removed_and_no_other() -> None:
    assert step(None, standing(), "thaw") == Remove()
    assert step(replace(resource(), deleting=True), standing(), "thaw") == Remove()
    assert step(None, standing(namespace="elsewhere"), "thaw") is None
    assert step(None, standing(annotations={}), "thaw") is None
    assert step(None, standing(annotations={MARK: "x"}), "thaw") is None
    assert step(replace(resource(), deleting=True), None, "thaw") is None


def test_a_resource_that_was_made_anew_takes_over_the_action_of_the_one_before() -> None:
    found = step(resource(1, uid="new"), standing(uid="old"), "thaw")
    assert isinstance(found, Put)


@pytest.mark.parametrize("others", [standing(annotations={}), standing(namespace="elsewhere")])
def test_an_action_of_others_is_left_alone(others: Standing) -> None:
    assert step(resource(), others, "thaw") is None
    assert said(resource(), others) == {"Deployed": ("False", "NameTaken"), "Ready": ("False", "NotDeployed")}


MISSING = ErrorInfo("ModelNotFound", "it is not there", "push it")
NO_ROOM = ErrorInfo("Unavailable", "no host has room", "add one")


@pytest.mark.parametrize(
    ("is_", "ready"),
    [
        (standing(), ("True", "ScaledToZero")),
        (standing(starting=1), ("False", "Starting")),
        (standing(ready=1), ("True", "Serving")),
        (standing(trouble=MISSING), ("False", "ModelNotFound")),
        (standing(trouble=NO_ROOM), ("False", "NoCapacity")),
        (standing(trouble=ErrorInfo("PoolFull", "")), ("False", "NoCapacity")),
        (standing(ready=1, trouble=MISSING), ("True", "Serving")),
    ],
)
def test_ready_says_why(is_: Standing, ready: tuple[str, str]) -> None:
    assert said(resource(), is_)["Ready"] == ready


def test_fewer_than_wanted_serve_and_the_reason_says_why_there_are_no_more() -> None:
    three = parse_llm_config({**SPEC, "scaling": {"min_instances": 3}})
    assert said(resource(min_instances=3), standing(config=three, ready=1, starting=1))["Ready"] == ("True", "Starting")
    assert said(resource(min_instances=3), standing(config=three, ready=1, trouble=NO_ROOM))["Ready"] == (
        "True",
        "NoCapacity",
    )
    assert said(resource(min_instances=3), standing(config=three))["Ready"] == ("False", "Starting")


def test_a_refusal_and_an_absence_are_shown() -> None:
    refusal = ErrorInfo("Refused", "$.model.uri: no", "another")
    assert said(resource(), None, refusal=refusal)["Deployed"] == ("False", "Refused")
    assert said(resource(), None)["Deployed"] == ("False", "Deploying")
    assert said(resource(), None, away="it does not answer") == {
        "Deployed": ("Unknown", "GatewayAway"),
        "Ready": ("Unknown", "GatewayAway"),
    }


def test_what_a_restarted_gateway_does_not_know_stays_until_something_happens() -> None:
    before = resource()
    known = status(before, standing(trouble=MISSING), "thaw", None, "", NOW)
    after = replace(before, status=known)
    assert said(after, standing())["Ready"] == ("False", "ModelNotFound")
    assert said(after, standing(starting=1))["Ready"] == ("False", "Starting")
    assert said(after, standing(version="0.0.2"))["Ready"] == ("True", "ScaledToZero")


def test_a_condition_keeps_the_time_since_which_it_holds() -> None:
    before = status(resource(), standing(starting=1), "thaw", None, "", NOW)
    later = datetime(2026, 1, 2, 4, 0, 0, tzinfo=UTC)
    same = status(replace(resource(), status=before), standing(trouble=MISSING), "thaw", None, "", later)
    times = {c["type"]: c["lastTransitionTime"] for c in same["conditions"]}
    assert times["Ready"] == "2026-01-02T03:04:05Z"  # not ready before, not ready now
    other = status(replace(resource(), status=before), standing(ready=1), "thaw", None, "", later)
    times = {c["type"]: c["lastTransitionTime"] for c in other["conditions"]}
    assert times == {
        "Ready": "2026-01-02T04:00:00Z",
        "Deployed": "2026-01-02T03:04:05Z",
        "InSync": "2026-01-02T03:04:05Z",
    }


def test_the_last_cold_start_outlives_the_gateway_that_saw_it() -> None:
    is_ = standing(ready=1, starting=1, cold_start=ColdStart(1_767_323_045_000, 2314))
    found = status(resource(), is_, "thaw", None, "", NOW)
    assert found["lastColdStart"] == {"at": "2026-01-02T03:04:05Z", "timeToFirstToken": "2.31s", "mode": "cold"}
    assert (found["instances"], found["readyInstances"], found["version"]) == (2, 1, "0.0.1")
    assert found["selector"] == "thaw.dev/action=chat"
    later = status(replace(resource(), status=found), standing(), "thaw", None, "", NOW)
    assert later["lastColdStart"] == found["lastColdStart"]
    away = status(replace(resource(), status=found), None, "thaw", None, "away", NOW)
    assert away["instances"] == 2  # as it was seen last


def test_a_resource_is_read_from_what_the_cluster_sends() -> None:
    meta = {"name": "chat", "uid": "u", "generation": 4, "deletionTimestamp": "2026-01-01T00:00:00Z"}
    assert seen({"metadata": meta, "spec": SPEC}) == ModelFunction("chat", "u", 4, SPEC, deleting=True)
