"""The operator's action on a resource and the status that it writes, as functions of the present state."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from thaw.config import parse_llm_config
from thaw.errors import ErrorInfo
from thaw.kubernetes.decide import Put, Remove, Scale, status, step
from thaw.kubernetes.resource import ModelFunction, mark_for, seen
from thaw.standing import RESOURCE_MARK, ColdStart, Standing

SPEC: dict[str, Any] = {"kind": "llm:vllm", "model": {"uri": "s3://models/tiny"}, "scaling": {"min_instances": 0}}
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
HERE, ELSEWHERE = "uid of a namespace", "uid of a namespace of the same name in another cluster"


def resource(generation: int = 1, uid: str = "u", **scaling: Any) -> ModelFunction:
    return ModelFunction("chat", uid, generation, {**SPEC, "scaling": {**SPEC["scaling"], **scaling}})


def standing(generation: int = 1, uid: str = "u", within: str = HERE, **fields: Any) -> Standing:
    """Return the standing of the action that the resource made."""
    mark = mark_for(resource(generation, uid), within).plain()
    return replace(Standing("chat", "0.0.1", parse_llm_config(SPEC), {RESOURCE_MARK: mark}), **fields)


def shown(of: ModelFunction, is_: Standing | None, **more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"refusal": None, "away": None, "now": NOW, **more}
    return dict(status(of, is_, HERE, given["refusal"], given["away"], given["now"]))


def said(of: ModelFunction, is_: Standing | None, **more: Any) -> dict[str, tuple[str, str]]:
    return {c["type"]: (c["status"], c["reason"]) for c in shown(of, is_, **more)["conditions"]}


def test_a_resource_is_deployed_and_marked() -> None:
    found = step(resource(), None, HERE)
    assert isinstance(found, Put)
    assert found.creates
    assert found.body["config"] == SPEC
    assert found.body["annotations"] == [{"key": RESOURCE_MARK, "value": mark_for(resource(), HERE).plain()}]


def test_what_was_carried_out_is_not_repeated_whatever_others_changed() -> None:
    other = parse_llm_config({**SPEC, "slo": {"ttft_ms": 1}})
    assert step(resource(), standing(config=other, version="0.0.7"), HERE) is None
    assert said(resource(), standing(config=other))["InSync"] == ("False", "ChangedElsewhere")
    assert said(resource(), standing())["InSync"] == ("True", "InSync")


def test_a_change_of_the_resource_is_written_over_what_others_changed() -> None:
    other = parse_llm_config({**SPEC, "slo": {"ttft_ms": 1}})
    changed = replace(resource(2), spec={**SPEC, "slo": {"ttft_ms": 9}})
    found = step(changed, standing(config=other), HERE)
    assert isinstance(found, Put)
    assert not found.creates
    assert found.body["config"] == changed.spec


@pytest.mark.parametrize("others", [{}, {"slo": {"ttft_ms": 1}}], ids=["as deployed", "changed by others"])
def test_a_change_of_nothing_but_the_number_of_instances_writes_that_alone(others: dict[str, Any]) -> None:
    """So running instances go on, and an autoscaler undoes no other change."""
    is_ = standing(config=parse_llm_config({**SPEC, **others}))
    wanted = resource(2, min_instances=3, keep_alive_s=60)
    found = step(wanted, is_, HERE)
    mark = {"key": RESOURCE_MARK, "value": mark_for(wanted, HERE).plain()}
    assert found == Scale({"min_instances": 3, "max_instances": 8, "keep_alive_s": 60, "annotations": [mark]})


def test_functions_that_share_instances_are_written_whole() -> None:
    shared = parse_llm_config({**SPEC, "model": {"base": "s3://models/tiny", "adapter": "s3://models/a"}})
    assert isinstance(step(resource(2, min_instances=3), standing(config=shared), HERE), Put)


def test_an_action_whose_resource_is_gone_is_removed_and_no_other() -> None:
    assert step(None, standing(), HERE) == Remove()
    assert step(replace(resource(), deleting=True), standing(), HERE) == Remove()
    copied = standing(name="copy")  # annotations travel with copies
    others = (standing(within=ELSEWHERE), standing(annotations={}), standing(annotations={RESOURCE_MARK: "x"}), copied)
    assert [step(None, other, HERE) for other in others] == [None] * 4
    assert step(replace(resource(), deleting=True), None, HERE) is None


def test_a_resource_that_was_made_anew_takes_over_the_action_of_the_one_before() -> None:
    assert isinstance(step(resource(1, uid="new"), standing(uid="old"), HERE), Put)


@pytest.mark.parametrize("others", [standing(annotations={}), standing(within=ELSEWHERE)])
def test_an_action_of_others_is_left_alone(others: Standing) -> None:
    assert step(resource(), others, HERE) is None
    assert said(resource(), others) == {"Deployed": ("False", "NameTaken"), "Ready": ("False", "NotDeployed")}


MISSING = ErrorInfo("ModelNotFound", "it is not there", "push it")
NO_ROOM = ErrorInfo("NoCapacity", "no host has room", "add one")
THREE = parse_llm_config({**SPEC, "scaling": {"min_instances": 3}})


@pytest.mark.parametrize(
    ("wanted", "is_", "ready"),
    [
        (0, standing(), ("True", "ScaledToZero")),
        (0, standing(starting=1), ("False", "Starting")),
        (0, standing(ready=1), ("True", "Serving")),
        (0, standing(trouble=MISSING), ("False", "ModelNotFound")),
        (0, standing(trouble=NO_ROOM), ("False", "NoCapacity")),
        (0, standing(trouble=ErrorInfo("PoolFull", "")), ("False", "NoCapacity")),
        (0, standing(trouble=ErrorInfo("Unavailable", "the API server is away")), ("False", "Unavailable")),
        (0, standing(ready=1, trouble=MISSING), ("True", "Serving")),
        (0, standing(config=None, ready=1), ("False", "NotAModel")),
        (3, standing(config=THREE, ready=1, starting=1), ("True", "Starting")),  # fewer than wanted serve
        (3, standing(config=THREE, ready=1, trouble=NO_ROOM), ("True", "NoCapacity")),
        (3, standing(config=THREE), ("False", "Starting")),
    ],
)
def test_ready_says_why_and_why_no_more_serve(wanted: int, is_: Standing, ready: tuple[str, str]) -> None:
    assert said(resource(min_instances=wanted), is_)["Ready"] == ready


def test_a_refusal_and_an_absence_are_shown() -> None:
    refusal, away = ErrorInfo("Refused", "$.model.uri: no", "another"), ErrorInfo("GatewayAway", "it does not answer")
    assert said(resource(), None, refusal=refusal)["Deployed"] == ("False", "Refused")
    assert said(resource(), None)["Deployed"] == ("False", "Deploying")
    assert said(resource(), None, away=away) == dict.fromkeys(("Deployed", "Ready"), ("Unknown", "GatewayAway"))


def test_what_became_of_the_action_is_shown_whatever_it_is() -> None:
    assert said(resource(), standing(config=None))["InSync"] == ("False", "ChangedElsewhere")
    changed = replace(resource(2), spec={**SPEC, "slo": {"ttft_ms": 9}})
    assert isinstance(step(changed, standing(config=None), HERE), Put)
    scaled = resource(2, min_instances=3)
    assert isinstance(step(scaled, standing(config=None), HERE), Put), "the scaling of code is not the model's"
    assert step(None, standing(config=None), HERE) == Remove()


def test_a_condition_keeps_the_time_since_which_it_holds() -> None:
    before = shown(resource(), standing(starting=1))
    later = datetime(2026, 1, 2, 4, 0, 0, tzinfo=UTC)

    def times(is_: Standing) -> dict[str, str]:
        found = shown(replace(resource(), status=before), is_, now=later)
        return {c["type"]: c["lastTransitionTime"] for c in found["conditions"]}

    since = dict.fromkeys(("Ready", "Deployed", "InSync"), "2026-01-02T03:04:05Z")
    assert times(standing(trouble=MISSING)) == since  # not ready before, not ready now
    assert times(standing(ready=1)) == {**since, "Ready": "2026-01-02T04:00:00Z"}


def test_the_status_has_what_columns_and_autoscalers_read() -> None:
    is_ = standing(ready=1, starting=1, cold_start=ColdStart(1_767_323_045_000, 2314))
    found = shown(resource(), is_)
    assert found["lastColdStart"] == {"at": "2026-01-02T03:04:05Z", "timeToFirstToken": "2.31s", "mode": "cold"}
    assert (found["instances"], found["readyInstances"], found["version"]) == (2, 1, "0.0.1")
    assert found["selector"] == "thaw.dev/action=chat"
    away = shown(replace(resource(), status=found), None, away=ErrorInfo("GatewayAway", "away"))
    assert away["instances"] == 2  # as it was seen last
    long = replace(resource(), name="a" * 62 + ".b")
    assert shown(long, None)["selector"] == "thaw.dev/action=" + "a" * 62, "a label's value"


def test_a_resource_is_read_from_what_the_cluster_sends() -> None:
    meta = {"name": "chat", "uid": "u", "generation": 4, "deletionTimestamp": "2026-01-01T00:00:00Z"}
    assert seen({"metadata": meta, "spec": SPEC}) == ModelFunction("chat", "u", 4, SPEC, deleting=True)
