"""Failures between the operator, the cluster and the gateway, and conflicts with other writers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import LLM_CONFIG, OPERATOR_KEY, GatewayProcess, gateway, invoker, start_gateway
from tests.gateway.fake_invoker import FakeInvoker
from tests.kubernetes.api_server import Refusal, Request
from tests.kubernetes.custom_resources import CustomResources
from tests.kubernetes.operating import ACTION, Between, action, cluster, operating, operator, scale, wait_models
from thaw.cli.platform_api.client import ApiError
from thaw.kubernetes.decide import Put, Remove, Scale
from thaw.kubernetes.operator import Operator, _is_final
from thaw.kubernetes.refusals import Refusals

__all__ = ["cluster", "gateway", "invoker", "operator", "start_gateway"]

CODE = {"exec": {"kind": "python:3.11", "code": "def main(args):\n    return args\n"}}


def update(gateway: GatewayProcess, body: dict[str, Any]) -> None:
    reply = gateway.call("PUT", ACTION, params={"overwrite": "true"}, json=body)
    assert reply.status_code == 200, reply.text


def test_a_copy_of_an_action_is_nobodys(cluster: CustomResources, gateway: GatewayProcess, operator: Operator) -> None:
    cluster.apply("chat", LLM_CONFIG)
    cluster.wait_condition("chat", "Deployed", "True", "Deployed")
    body = {"config": LLM_CONFIG, "annotations": action(gateway)["annotations"]}
    copy = "/api/v1/namespaces/_/actions/copy"
    assert gateway.call("PUT", copy, json=body).status_code == 200
    cluster.apply("other", LLM_CONFIG)
    cluster.wait_condition("other", "Deployed", "True", "Deployed")
    cluster.apply("last", LLM_CONFIG)
    cluster.wait_condition("last", "Deployed", "True", "Deployed")
    assert gateway.call("GET", copy).status_code == 200


def test_the_operator_of_another_cluster_leaves_alone_what_is_not_its_own(
    cluster: CustomResources, gateway: GatewayProcess, operator: Operator, tmp_path: Path
) -> None:
    """The other operator has the same key, and its cluster's namespace has the same name."""
    cluster.apply("chat", LLM_CONFIG)
    cluster.wait_condition("chat", "Deployed", "True", "Deployed")
    (tmp_path / "other").mkdir()
    with closing(CustomResources()) as staging, operating(staging, gateway.url, tmp_path / "other"):
        staging.apply("other", LLM_CONFIG)
        staging.wait_condition("other", "Deployed", "True", "Deployed")
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
    minutes = count()

    def later() -> datetime:
        return datetime(2026, 1, 2, tzinfo=UTC) + timedelta(minutes=next(minutes))

    def refuse(request: Request) -> None:
        if request.method == "PATCH" and request.path.endswith("/a/status"):
            raise Refusal(422, "Invalid", "spec.model: Required value")

    cluster.refuse = refuse  # type: ignore[method-assign]
    for name in ("a", "chat"):
        cluster.apply(name, LLM_CONFIG)
    with operating(cluster, gateway.url, tmp_path, now=later):
        cluster.wait_condition("chat", "Ready", "True", "ScaledToZero")
        record = invoker.ready("guest/chat")
        cluster.wait_status("chat", instances=1)
        invoker.gone(record)
        cluster.wait_status("chat", instances=0)
    tried = [r for r in cluster.requests if r.path.endswith("/a/status")]
    assert len(tried) <= 2, "deploying, and deployed: the same one is not tried again"


def test_a_gateway_that_has_too_much_to_do_is_not_away(
    cluster: CustomResources, gateway: GatewayProcess, invoker: FakeInvoker, tmp_path: Path
) -> None:
    with closing(Between(gateway)) as between, operating(cluster, between.url, tmp_path):
        cluster.apply("chat", LLM_CONFIG)
        cluster.wait_condition("chat", "Ready", "True", "ScaledToZero")
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
    cluster: CustomResources, gateway: GatewayProcess, tmp_path: Path, change: dict[str, Any] | None
) -> None:
    """The gateway is too busy to send news, so the operator's knowledge is old."""
    with closing(Between(gateway)) as between, operating(cluster, between.url, tmp_path):
        cluster.apply("chat", LLM_CONFIG)
        cluster.wait_condition("chat", "Ready", "True", "ScaledToZero")
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
        cluster.apply("last", LLM_CONFIG)
        cluster.wait_condition("last", "Deployed", "True", "Deployed")
        found = action(gateway)
        assert (found["version"], found["config"]["scaling"]["min_instances"]) == ("0.0.2", 0)


def test_an_operator_whose_watch_tells_nothing_undoes_nothing_that_another_one_did(
    cluster: CustomResources, gateway: GatewayProcess, invoker: FakeInvoker, tmp_path: Path
) -> None:
    with closing(Between(gateway)) as between, operating(cluster, between.url, tmp_path) as two:
        with operating(cluster, gateway.url, tmp_path):
            for name in ("changed", "chat", "gone"):
                cluster.apply(name, LLM_CONFIG)
                cluster.wait_condition(name, "Ready", "True", "ScaledToZero")
            between.next_question()
            assert two._watch is not None
            two._watch.stop()  # as a stream that died without a word
            cluster.apply("new", LLM_CONFIG)
            cluster.apply("changed", {**LLM_CONFIG, "slo": {"ttft_ms": 1}})
            cluster.vanish("gone")
            cluster.wait_condition("new", "Ready", "True", "ScaledToZero")
            cluster.wait_status("changed", version="0.0.2")
            wait_models(gateway, "changed", "chat", "new")
        invoker.ready("guest/chat")
        cluster.wait_status("chat", instances=1)  # the last thing that it does in a pass
        assert {method for method, _ in between.calls if method != "GET"} <= {"PUT"}
        for name, version in ("changed", "0.0.2"), ("new", "0.0.1"):
            assert gateway.call("GET", ACTION.replace("chat", name)).json()["version"] == version
        assert gateway.call("GET", ACTION.replace("chat", "gone")).status_code == 404


def test_an_operator_that_comes_second_takes_what_the_first_one_made_for_its_own(
    cluster: CustomResources, gateway: GatewayProcess, tmp_path: Path
) -> None:
    with closing(Between(gateway)) as between:
        between.second = True
        with operating(cluster, between.url, tmp_path):
            cluster.apply("chat", LLM_CONFIG)
            cluster.wait_condition("chat", "Ready", "True", "ScaledToZero")
    assert "NameTaken" not in str([r.body for r in cluster.writes])
    assert cluster.condition("chat", "Deployed")["status"] == "True"
    assert action(gateway)["version"] == "0.0.1"


def test_a_list_that_is_none_is_asked_for_again(
    cluster: CustomResources, gateway: GatewayProcess, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, asked = cluster._list, threading.Semaphore(0)

    def without_items(query: dict[str, str]) -> dict[str, Any]:
        asked.release()
        return {"metadata": {"resourceVersion": "1"}}

    cluster.apply("chat", LLM_CONFIG)
    cluster.wait_condition("chat", "Deployed", "True", "Deployed")
    monkeypatch.setattr(cluster, "_list", without_items)
    cluster.apply("other", LLM_CONFIG)
    for _ in range(2):
        assert asked.acquire(timeout=30)
    monkeypatch.setattr(cluster, "_list", listed)
    cluster.wait_condition("other", "Deployed", "True", "Deployed")


def test_an_operator_that_may_not_read_its_namespace_says_what_to_do(
    cluster: CustomResources, gateway: GatewayProcess, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    passes = threading.Semaphore(0)

    def refuse(request: Request) -> None:
        if request.path == "/api/v1/namespaces/thaw":
            passes.release()
            text = 'namespaces "thaw" is forbidden: User "system:serviceaccount:thaw:operator" cannot get resource'
            raise Refusal(403, "Forbidden", text)

    cluster.refuse = refuse  # type: ignore[method-assign]
    with operating(cluster, gateway.url, tmp_path):
        for _ in range(2):
            assert passes.acquire(timeout=30)
    failed = [json.loads(line) for line in capfd.readouterr().err.splitlines() if "pass_failed" in line]
    assert failed[0]["hint"] == "give the operator's service account this permission"


def test_a_key_that_is_refused_is_told_apart_from_a_gateway_that_is_away(
    cluster: CustomResources, gateway: GatewayProcess, tmp_path: Path
) -> None:
    with closing(Between(gateway)) as between, operating(cluster, between.url, tmp_path):
        cluster.apply("chat", LLM_CONFIG)
        cluster.wait_condition("chat", "Ready", "True", "ScaledToZero")
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
    cluster: CustomResources, gateway: GatewayProcess, tmp_path: Path
) -> None:
    hints: dict[str, Any] = {}

    def refuse(method: str, path: str) -> tuple[int, dict[str, Any]]:
        if method == "PUT":
            return 403, {"error": "This is forbidden.", **hints}
        return 200, {"mark": "m", "actions": []}

    with closing(Between(gateway)) as between, operating(cluster, between.url, tmp_path):
        between.instead = refuse
        cluster.apply("chat", LLM_CONFIG)
        assert cluster.wait_condition("chat", "Deployed", "False", "Refused")["message"] == "This is forbidden."
        hints["hint"] = "ask an operator"
        cluster.apply("other", LLM_CONFIG)
        said = cluster.wait_condition("other", "Deployed", "False", "Refused")["message"]
        assert said == "This is forbidden.  ask an operator"


def test_a_gateway_whose_every_answer_is_new_is_not_asked_without_pause(
    cluster: CustomResources, gateway: GatewayProcess, tmp_path: Path
) -> None:
    marks = count()
    with closing(Between(gateway)) as between:
        between.instead = lambda method, path: (200, {"mark": str(next(marks)), "actions": []})
        began = time.monotonic()
        with operating(cluster, between.url, tmp_path):
            threading.Event().wait(1.0)
        assert len(between.calls) < 10 * (time.monotonic() - began)


def test_a_write_that_reaches_no_gateway_is_the_last_of_its_pass(
    cluster: CustomResources, gateway: GatewayProcess, tmp_path: Path
) -> None:
    def cut(method: str, path: str) -> tuple[int, dict[str, Any]] | None:
        return None if method == "PUT" else (200, {"mark": "m", "actions": []})

    with closing(Between(gateway)) as between:
        between.instead = cut
        for name in ("a", "b", "c"):
            cluster.apply(name, LLM_CONFIG)
        with operating(cluster, between.url, tmp_path):
            while len(puts := [path for method, path in between.calls if method == "PUT"]) < 3:
                between.calls_come()
        assert set(puts) == {"actions/a"}
        between.instead = None


def test_an_autoscaler_undoes_nothing_that_others_changed(
    cluster: CustomResources, gateway: GatewayProcess, invoker: FakeInvoker, operator: Operator
) -> None:
    cluster.apply("chat", LLM_CONFIG)
    cluster.wait_condition("chat", "InSync", "True", "InSync")
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
    cluster.apply("chat", LLM_CONFIG)
    cluster.wait_condition("chat", "Deployed", "True", "Deployed")
    scale(cluster, 20)
    said = cluster.wait_condition("chat", "Deployed", "False", "Refused")
    assert "max_instances" in said["message"]
    assert action(gateway)["config"]["scaling"]["min_instances"] == 0


def test_a_model_that_became_code_is_shown_written_over_and_removed_like_any_other(
    cluster: CustomResources, gateway: GatewayProcess, operator: Operator
) -> None:
    cluster.apply("chat", LLM_CONFIG)
    cluster.wait_condition("chat", "InSync", "True", "InSync")
    update(gateway, CODE)
    cluster.wait_condition("chat", "InSync", "False", "ChangedElsewhere")
    cluster.wait_condition("chat", "Ready", "False", "NotAModel")
    cluster.apply("chat", {**LLM_CONFIG, "slo": {"tpot_ms": 50}})
    cluster.wait_condition("chat", "InSync", "True", "InSync")
    update(gateway, CODE)
    cluster.wait_condition("chat", "Ready", "False", "NotAModel")
    cluster.vanish("chat")
    cluster.apply("other", LLM_CONFIG)
    cluster.wait_condition("other", "Deployed", "True", "Deployed")
    cluster.apply("last", LLM_CONFIG)
    cluster.wait_condition("last", "Deployed", "True", "Deployed")
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
