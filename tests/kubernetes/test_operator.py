"""The operator between an API server in the test's process and a real gateway.

The second part has failures between the three, and conflicts with other writers.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import LLM_CONFIG, OPERATOR_KEY, GatewayProcess, gateway, invoker, start_gateway
from tests.gateway.fake_invoker import FakeInvoker
from tests.kubernetes.api_server import Refusal
from tests.kubernetes.custom_resources import CustomResources
from tests.kubernetes.operating import (
    ACTION,
    SLOW,
    Between,
    action,
    apart,
    between,
    cluster,
    operating,
    operator,
    scale,
    wait_models,
)
from thaw.cli.platform_api.client import ApiError
from thaw.errors import ModelNotFound
from thaw.instance import InstanceState
from thaw.kubernetes.decide import Put, Remove, Scale
from thaw.kubernetes.operator import Operator, _is_final
from thaw.kubernetes.refusals import Refusals

__all__ = ["apart", "between", "cluster", "gateway", "invoker", "operator", "start_gateway"]

NO_NEWS = 200, {"mark": "m", "actions": []}
CODE = {"exec": {"kind": "python:3.11", "code": "def main(args):\n    return args\n"}}


def test_a_resource_deploys_and_shows_how_the_model_stands(
    cluster: CustomResources, gateway: GatewayProcess, invoker: FakeInvoker, operator: Operator
) -> None:
    cluster.deploy("chat")
    assert action(gateway)["config"]["model"]["uri"] == LLM_CONFIG["model"]["uri"]
    ready = invoker.ready("guest/chat")
    cluster.wait_status("chat", instances=1, readyInstances=1, version="0.0.1", observedGeneration=1)
    cluster.wait_condition("chat", "Ready", "True", "Serving")
    invoker.gone(ready)
    cluster.wait_status("chat", instances=0)
    starting = replace(ready, state=InstanceState.STARTING, instance_id="i1")  # type: ignore[arg-type]
    invoker.registry.put_instance(starting)
    cluster.wait_condition("chat", "Ready", "False", "Starting")
    invoker.gone(starting, ModelNotFound("s3://models/tiny is not there", hint="push it"))
    said = cluster.wait_condition("chat", "Ready", "False", "ModelNotFound")
    assert said["message"] == "s3://models/tiny is not there  push it"


def test_an_autoscaler_sets_the_least_number_of_instances_and_what_runs_goes_on(
    cluster: CustomResources, gateway: GatewayProcess, invoker: FakeInvoker, operator: Operator
) -> None:
    cluster.deploy("chat")
    assert scale(cluster)["spec"] == {"replicas": 0}
    invoker.ready("guest/chat")
    cluster.wait_status("chat", instances=1)
    scale(cluster, 3)
    cluster.wait_status("chat", observedGeneration=2)
    cluster.wait_condition("chat", "InSync", "True", "InSync")
    found = action(gateway)
    assert found["config"]["scaling"]["min_instances"] == 3
    assert found["version"] == "0.0.1"
    assert gateway.chat().status_code == 200
    assert scale(cluster)["status"] == {"replicas": 1, "selector": "thaw.dev/action=chat"}
    scale(cluster, 0)
    cluster.wait_condition("chat", "Ready", "True", "Serving")  # nothing is ended for it
    assert cluster.show("chat")["status"]["instances"] == 1


def test_what_the_check_at_deploy_refuses_is_said_and_mended_by_the_next_change(
    cluster: CustomResources, gateway: GatewayProcess, operator: Operator
) -> None:
    with pytest.raises(Refusal, match="unknown field"):
        cluster.apply("chat", {**LLM_CONFIG, "scalling": {}})
    cluster.apply("chat", {**LLM_CONFIG, "engine": {"args": {"block_sise": 16}}})
    said = cluster.wait_condition("chat", "Deployed", "False", "Refused")
    assert "$.engine.args" in said["message"]
    assert cluster.condition("chat", "Ready")["reason"] == "NotDeployed"
    cluster.deploy("chat")


def test_what_others_change_is_shown_and_written_over_by_the_resources_next_change(
    cluster: CustomResources, gateway: GatewayProcess, operator: Operator
) -> None:
    cluster.deploy("chat")
    changed = {**LLM_CONFIG, "slo": {"ttft_ms": 1000}}
    gateway.call("PUT", ACTION, params={"overwrite": "true"}, json={"config": changed})
    cluster.wait_condition("chat", "InSync", "False", "ChangedElsewhere")
    assert action(gateway)["config"]["slo"]["ttft_ms"] == 1000
    cluster.apply("chat", SLOW)
    cluster.wait_condition("chat", "InSync", "True", "InSync")
    assert action(gateway)["config"]["slo"] == {"ttft_ms": 7500, "tpot_ms": 50}
    gateway.call("DELETE", ACTION)  # a resource that is there is a model that is there
    cluster.wait_status("chat", version="0.0.4")


def test_an_action_that_somebody_else_made_is_neither_changed_nor_removed(
    cluster: CustomResources, gateway: GatewayProcess, operator: Operator
) -> None:
    gateway.put_llm()
    gateway.put_python("code")
    cluster.apply("chat", {**LLM_CONFIG, "slo": {"ttft_ms": 1}})
    cluster.apply("code", LLM_CONFIG)
    assert "thaw action delete chat" in cluster.wait_condition("chat", "Deployed", "False", "NameTaken")["message"]
    cluster.wait_condition("code", "Deployed", "False", "NameTaken")
    cluster.vanish("chat")
    cluster.vanish("code")
    cluster.deploy("last")
    assert action(gateway)["version"] == "0.0.1"
    assert action(gateway, "code") != {}


def test_a_resource_is_gone_at_once_and_its_model_when_the_gateway_is_back(
    cluster: CustomResources, gateway: GatewayProcess, start_gateway: Callable[..., GatewayProcess], operator: Operator
) -> None:
    cluster.deploy("chat", "other")
    assert "finalizers" not in cluster.show("chat")["metadata"]
    gateway.end()
    cluster.wait_condition("chat", "Ready", "Unknown", "GatewayAway")
    cluster.vanish("chat")
    cluster.vanish("other")
    back = start_gateway(THAW_GATEWAY_BIND=f"127.0.0.1:{gateway.port}")
    back.url = gateway.url
    wait_models(back)
    assert action(back) == {}


def test_another_operator_takes_over_deploys_nothing_again_and_removes_what_was_deleted_while_none_ran(
    cluster: CustomResources, gateway: GatewayProcess, tmp_path: Path
) -> None:
    with operating(cluster, gateway.url, tmp_path):
        cluster.deploy("chat", "gone")
    cluster.vanish("gone")
    with operating(cluster, gateway.url, tmp_path):
        cluster.deploy("other")
        wait_models(gateway, "chat", "other")
    assert action(gateway)["version"] == "0.0.1"


def test_an_absent_cluster_loses_nothing(cluster: CustomResources, gateway: GatewayProcess, operator: Operator) -> None:
    cluster.deploy("chat", "other")
    cluster.go_away()
    gateway.call("PUT", ACTION, params={"overwrite": "true"}, json={"config": {**LLM_CONFIG, "slo": {"ttft_ms": 9}}})
    cluster.vanish("other")
    cluster.vanish("chat")
    cluster.apply("chat", SLOW)
    cluster.forget()
    cluster.come_back()
    wait_models(gateway, "chat")
    cluster.wait_condition("chat", "InSync", "True", "InSync")
    assert action(gateway)["config"]["slo"] == {"ttft_ms": 7500, "tpot_ms": 50}


def test_a_status_is_written_only_when_it_changes(
    cluster: CustomResources, gateway: GatewayProcess, invoker: FakeInvoker, operator: Operator
) -> None:
    cluster.deploy("chat", "other")
    before = len(cluster.writes)
    record = invoker.ready("guest/chat")
    cluster.wait_status("chat", instances=1)
    invoker.gone(record)
    cluster.wait_status("chat", instances=0)
    assert [r.path.split("/")[-2] for r in cluster.writes[before:]] == ["chat", "chat"]


def test_news_from_before_a_write_deploys_nothing_again(
    cluster: CustomResources, invoker: FakeInvoker, between: Between, apart: Operator
) -> None:
    cluster.deploy("chat")
    between.may_go.clear()
    invoker.ready("guest/chat")  # the news of this tells of the first generation
    assert between.held.wait(30)
    cluster.apply("chat", SLOW)
    cluster.wait_status("chat", version="0.0.2")
    while between.asked.acquire(blocking=False):
        pass
    between.may_go.set()
    assert between.asked.acquire(timeout=30)  # the held news has been taken in
    cluster.deploy("other")
    assert action(between.gateway)["version"] == "0.0.2"


# failures and other writers --------------------------------------------------------------------------------------------


def update(gateway: GatewayProcess, body: dict[str, Any]) -> None:
    reply = gateway.call("PUT", ACTION, params={"overwrite": "true"}, json=body)
    assert reply.status_code == 200, reply.text


def test_the_operator_of_another_cluster_leaves_alone_what_is_not_its_own(
    cluster: CustomResources, gateway: GatewayProcess, operator: Operator, tmp_path: Path
) -> None:
    """The other operator has the same key, and its cluster's namespace has the same name."""
    cluster.deploy("chat")
    (tmp_path / "other").mkdir()
    with closing(CustomResources()) as staging, operating(staging, gateway.url, tmp_path / "other"):
        staging.deploy("other")
        staging.apply("chat", {**LLM_CONFIG, "slo": {"ttft_ms": 1}})
        staging.wait_condition("chat", "Deployed", "False", "NameTaken")
    assert action(gateway)["version"] == "0.0.1"


@contextmanager
def noise(gateway: GatewayProcess, invoker: FakeInvoker) -> Iterator[None]:
    """Let something happen in the namespace all the time."""
    over = threading.Event()

    def make() -> None:
        while not over.wait(0.1):
            record = invoker.ready("guest/busy", instance="b", group="b" * 32)
            if not over.wait(0.1):
                invoker.gone(record)

    gateway.put_llm("busy")
    thread = threading.Thread(target=make)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_what_was_refused_is_asked_for_again_whatever_else_happens(
    cluster: CustomResources, gateway: GatewayProcess, invoker: FakeInvoker, tmp_path: Path
) -> None:
    with noise(gateway, invoker), operating(cluster, gateway.url, tmp_path, refused_s=1.5):
        cluster.apply("chat", {**LLM_CONFIG, "model": {"uri": "s3://elsewhere/tiny"}})
        said = cluster.wait_condition("chat", "Deployed", "False", "Refused")
        assert "may not run s3://elsewhere/tiny" in said["message"]
        user, _, password = OPERATOR_KEY.partition(":")
        path, body = "/api/v1/thaw/namespaces/guest/models", {"prefixes": ["s3://elsewhere", "s3://models"]}
        assert gateway.call("PUT", path, json=body, auth=(user, password)).status_code == 200
        cluster.wait_condition("chat", "Deployed", "True", "Deployed")


def test_a_refusal_stands_for_its_time_and_as_long_as_its_resource() -> None:
    now = 0.0
    known = Refusals[str, int](60.0, lambda: now)
    assert known.left_s() is None
    known.note("a", 1)
    now = 30.0
    known.note("b", 2)
    known.note("c", 3)
    known.forget({"a", "b"})
    assert (known.get("a"), known.get("b"), known.get("c"), known.left_s()) == (1, 2, None, 30.0)
    now = 60.0
    known.forget({"a", "b"})
    assert (known.get("a"), known.get("b"), known.left_s()) == (None, 2, 30.0)


def test_a_status_that_the_cluster_refuses_keeps_no_other_from_being_written(
    cluster: CustomResources, gateway: GatewayProcess, invoker: FakeInvoker, tmp_path: Path
) -> None:
    minutes = (datetime(2026, 1, 2, tzinfo=UTC) + timedelta(minutes=n) for n in count())
    tried = cluster.refuse_next(Refusal(422, "Invalid", "spec.model: Required value"), "PATCH", path="/a/status")
    cluster.apply("a", LLM_CONFIG)
    with operating(cluster, gateway.url, tmp_path, now=minutes.__next__):
        cluster.deploy("chat")
        record = invoker.ready("guest/chat")
        cluster.wait_status("chat", instances=1)
        invoker.gone(record)
        cluster.wait_status("chat", instances=0)
    assert len(tried) <= 2, "deploying, and deployed: the same one is not tried again"


def test_a_gateway_that_has_too_much_to_do_is_not_away(
    cluster: CustomResources, gateway: GatewayProcess, invoker: FakeInvoker, between: Between, apart: Operator
) -> None:
    cluster.deploy("chat")
    between.instead = lambda method, path: (429, {"error": "Too many requests in the last minute"})
    n_before = len(between.calls)
    record = invoker.ready("guest/chat")  # this ends the request that is held
    while len(between.calls) < n_before + 3:
        between.calls_come()
    assert cluster.condition("chat", "Ready")["status"] == "True"
    between.instead = None
    invoker.gone(record)
    invoker.ready("guest/chat", instance="i1", group="b" * 32)
    cluster.wait_condition("chat", "Ready", "True", "Serving")


@pytest.mark.parametrize(
    "change", [None, {"slo": {"ttft_ms": 1}}, {"scaling": {"min_instances": 1}}], ids=["deleted", "changed", "scaled"]
)
def test_an_action_that_took_the_place_of_ours_unseen_is_left_alone(
    cluster: CustomResources, gateway: GatewayProcess, between: Between, apart: Operator, change: dict[str, Any] | None
) -> None:
    """The gateway is too busy to send news, so the operator's knowledge is old."""
    cluster.deploy("chat")
    between.throttled = True
    gateway.put_llm("other")  # this ends the question that is held
    between.next_question()
    assert gateway.call("DELETE", ACTION).status_code == 200
    gateway.put_llm()
    if change is None:
        cluster.vanish("chat")
    else:
        cluster.apply("chat", {**LLM_CONFIG, **change})
        cluster.wait_condition("chat", "Deployed", "False", "NameTaken")
    cluster.deploy("last")
    found = action(gateway)
    assert (found["version"], found["config"]["scaling"]["min_instances"]) == ("0.0.2", 0)


def test_an_operator_whose_watch_tells_nothing_undoes_nothing_that_another_one_did(
    cluster: CustomResources, invoker: FakeInvoker, between: Between, apart: Operator, operator: Operator
) -> None:
    cluster.deploy("changed", "chat", "gone")
    between.next_question()
    assert apart._watch is not None
    apart._watch.stop()  # as a stream that died without a word
    cluster.apply("changed", {**LLM_CONFIG, "slo": {"ttft_ms": 1}})
    cluster.vanish("gone")
    cluster.deploy("new")
    cluster.wait_status("changed", version="0.0.2")
    wait_models(between.gateway, "changed", "chat", "new")
    operator.stop()
    invoker.ready("guest/chat")
    cluster.wait_status("chat", instances=1)  # the last thing that it does in a pass
    assert {method for method, _ in between.calls if method != "GET"} <= {"PUT"}
    for name, version in ("changed", "0.0.2"), ("new", "0.0.1"):
        assert action(between.gateway, name)["version"] == version
    assert action(between.gateway, "gone") == {}


def test_an_operator_that_comes_second_takes_what_the_first_one_made_for_its_own(
    cluster: CustomResources, gateway: GatewayProcess, between: Between, tmp_path: Path
) -> None:
    between.second = True
    with operating(cluster, between.url, tmp_path):
        cluster.deploy("chat")
    assert "NameTaken" not in str([r.body for r in cluster.writes])
    assert cluster.condition("chat", "Deployed")["status"] == "True"
    assert action(gateway)["version"] == "0.0.1"


def test_a_list_that_is_none_is_asked_for_again(
    cluster: CustomResources, gateway: GatewayProcess, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def n_lists() -> int:
        return sum(request.path == cluster.collection for request in cluster.requests)

    cluster.deploy("chat")
    with monkeypatch.context() as wrong:
        wrong.setattr(cluster, "_list", lambda query: {"metadata": {"resourceVersion": "1"}})
        n_before = n_lists()
        cluster.apply("other", LLM_CONFIG)
        cluster.wait_until(lambda: n_lists() > n_before + 2, 60)
    cluster.wait_condition("other", "Deployed", "True", "Deployed")


def test_an_operator_that_may_not_read_its_namespace_says_what_to_do(
    cluster: CustomResources, gateway: GatewayProcess, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = 'namespaces "thaw" is forbidden: User "system:serviceaccount:thaw:operator" cannot get resource'
    passes = cluster.refuse_next(Refusal(403, "Forbidden", text), "GET", path="/api/v1/namespaces/thaw")
    with operating(cluster, gateway.url, tmp_path):
        cluster.wait_until(lambda: len(passes) > 1, 60)
    failed = [json.loads(line) for line in capfd.readouterr().err.splitlines() if "pass_failed" in line]
    assert failed[0]["hint"] == "give the operator's service account this permission"


def test_a_key_that_is_refused_is_told_apart_from_a_gateway_that_is_away(
    cluster: CustomResources, gateway: GatewayProcess, between: Between, apart: Operator
) -> None:
    cluster.deploy("chat")
    between.instead = lambda method, path: (401, {"error": "The supplied authentication is invalid"})
    gateway.put_llm("other")
    said = cluster.wait_condition("chat", "Ready", "Unknown", "KeyRefused")
    assert "THAW_API_KEY" in said["message"]
    assert "thaw property" not in said["message"], "which is for whoever types commands"
    between.instead = lambda method, path: (503, {"error": "the state server is away"})
    said = cluster.wait_condition("chat", "Ready", "Unknown", "GatewayAway")
    assert said["message"] == "the state server is away"
    between.instead = lambda method, path: (200, {"what": "is this?"})
    cluster.wait_condition("chat", "Ready", "Unknown", "GatewayNotUnderstood")
    between.instead = None
    cluster.wait_condition("chat", "Ready", "True", "ScaledToZero")


def test_a_condition_has_the_gateway_s_hint_and_none_for_whoever_types_commands(
    cluster: CustomResources, gateway: GatewayProcess, between: Between, apart: Operator
) -> None:
    refusal = {"error": "This is forbidden."}
    between.instead = lambda method, path: (403, refusal) if method == "PUT" else NO_NEWS
    cluster.apply("chat", LLM_CONFIG)
    assert cluster.wait_condition("chat", "Deployed", "False", "Refused")["message"] == "This is forbidden."
    refusal["hint"] = "ask an operator"
    cluster.apply("other", LLM_CONFIG)
    said = cluster.wait_condition("other", "Deployed", "False", "Refused")["message"]
    assert said == "This is forbidden.  ask an operator"


def test_a_gateway_whose_every_answer_is_new_is_not_asked_without_pause(
    cluster: CustomResources, between: Between, tmp_path: Path
) -> None:
    marks = count()
    between.instead = lambda method, path: (200, {"mark": str(next(marks)), "actions": []})
    began = time.monotonic()
    with operating(cluster, between.url, tmp_path):
        threading.Event().wait(1.0)
    assert len(between.calls) < 10 * (time.monotonic() - began)


def test_a_write_that_fails_is_the_last_of_its_pass(cluster: CustomResources, between: Between, tmp_path: Path) -> None:
    between.instead = lambda method, path: None if method == "PUT" else NO_NEWS
    for name in ("a", "b", "c"):
        cluster.apply(name, LLM_CONFIG)
    with operating(cluster, between.url, tmp_path):
        while len(puts := [path for method, path in between.calls if method == "PUT"]) < 3:
            between.calls_come()
    assert set(puts) == {"actions/a"}


def test_an_autoscaler_undoes_nothing_that_others_changed(
    cluster: CustomResources, gateway: GatewayProcess, invoker: FakeInvoker, operator: Operator
) -> None:
    cluster.deploy("chat")
    update(gateway, {"config": {**LLM_CONFIG, "slo": {"ttft_ms": 1000}}})
    cluster.wait_condition("chat", "InSync", "False", "ChangedElsewhere")
    invoker.ready("guest/chat", version="0.0.2")
    cluster.wait_status("chat", instances=1)
    scale(cluster, 3)
    cluster.wait_status("chat", observedGeneration=2)
    cluster.wait_condition("chat", "Ready", "True", "NoCapacity")  # 1 of 3
    found = action(gateway)
    assert (found["version"], found["config"]["slo"]["ttft_ms"]) == ("0.0.2", 1000)
    assert found["config"]["scaling"]["min_instances"] == 3
    assert cluster.condition("chat", "InSync")["status"] == "False"


def test_more_replicas_than_there_may_be_are_refused_with_a_sentence(
    cluster: CustomResources, gateway: GatewayProcess, operator: Operator
) -> None:
    """This is also the case in an older cluster, whose definition had no such rule."""
    cluster.deploy("chat")
    scale(cluster, 20)
    said = cluster.wait_condition("chat", "Deployed", "False", "Refused")
    assert "max_instances" in said["message"]
    assert action(gateway)["config"]["scaling"]["min_instances"] == 0


def test_a_model_that_became_code_is_shown_written_over_and_removed_like_any_other(
    cluster: CustomResources, gateway: GatewayProcess, operator: Operator
) -> None:
    cluster.deploy("chat")
    update(gateway, CODE)
    cluster.wait_condition("chat", "InSync", "False", "ChangedElsewhere")
    cluster.wait_condition("chat", "Ready", "False", "NotAModel")
    cluster.apply("chat", SLOW)
    cluster.wait_condition("chat", "InSync", "True", "InSync")
    update(gateway, CODE)
    cluster.wait_condition("chat", "Ready", "False", "NotAModel")
    cluster.vanish("chat")
    cluster.deploy("other", "last")
    assert action(gateway) == {}


@pytest.mark.parametrize(
    ("step", "status", "is_final"),
    [
        (Scale({}), 404, False),  # deleted meanwhile: the next list shows it
        (Scale({}), 409, False),
        (Scale({}), 400, True),
        (Put({}, creates=True), 409, True),
        (Put({}, creates=False), 409, False),
        (Put({}, creates=True), 403, True),
        (Put({}, creates=True), 503, False),
        (Remove(), 404, False),
    ],
)
def test_what_a_repeat_may_change_is_repeated(step: Put | Scale | Remove, status: int, is_final: bool) -> None:
    assert _is_final(step, ApiError(status, "no")) is is_final
