"""The operator between an API server in the test's process and a real gateway."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gateway.conftest import LLM_CONFIG, GatewayProcess, gateway, invoker, start_gateway
from tests.gateway.fake_invoker import FakeInvoker
from tests.kubernetes.api_server import Refusal
from tests.kubernetes.custom_resources import CustomResources
from tests.kubernetes.operating import ACTION, Between, action, cluster, operating, operator, scale, wait_models
from thaw.errors import ModelNotFound
from thaw.instance import InstanceState
from thaw.kubernetes.operator import Operator

__all__ = ["cluster", "gateway", "invoker", "operator", "start_gateway"]


def test_a_resource_deploys_and_shows_how_the_model_stands(
    cluster: CustomResources, gateway: GatewayProcess, invoker: FakeInvoker, operator: Operator
) -> None:
    cluster.apply("chat", LLM_CONFIG)
    cluster.wait_condition("chat", "Ready", "True", "ScaledToZero")
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
    cluster.apply("chat", LLM_CONFIG)
    cluster.wait_condition("chat", "Ready", "True", "ScaledToZero")
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
    cluster.apply("chat", LLM_CONFIG)
    cluster.wait_condition("chat", "Deployed", "True", "Deployed")


def test_what_others_change_is_shown_and_written_over_by_the_resources_next_change(
    cluster: CustomResources, gateway: GatewayProcess, operator: Operator
) -> None:
    cluster.apply("chat", LLM_CONFIG)
    cluster.wait_condition("chat", "InSync", "True", "InSync")
    changed = {**LLM_CONFIG, "slo": {"ttft_ms": 1000}}
    gateway.call("PUT", ACTION, params={"overwrite": "true"}, json={"config": changed})
    cluster.wait_condition("chat", "InSync", "False", "ChangedElsewhere")
    assert action(gateway)["config"]["slo"]["ttft_ms"] == 1000
    cluster.apply("chat", {**LLM_CONFIG, "slo": {"tpot_ms": 50}})
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
    cluster.apply("last", LLM_CONFIG)
    cluster.wait_condition("last", "Deployed", "True", "Deployed")
    assert action(gateway)["version"] == "0.0.1"
    assert gateway.call("GET", "/api/v1/namespaces/_/actions/code").status_code == 200


def test_a_resource_is_gone_at_once_and_its_model_when_the_gateway_is_back(
    cluster: CustomResources,
    gateway: GatewayProcess,
    start_gateway: Callable[..., GatewayProcess],
    operator: Operator,
) -> None:
    cluster.apply("chat", LLM_CONFIG)
    cluster.apply("other", LLM_CONFIG)
    cluster.wait_condition("chat", "Deployed", "True", "Deployed")
    cluster.wait_condition("other", "Deployed", "True", "Deployed")
    assert "finalizers" not in cluster.show("chat")["metadata"]
    gateway.end()
    cluster.wait_condition("chat", "Ready", "Unknown", "GatewayAway")
    cluster.vanish("chat")
    cluster.vanish("other")
    back = start_gateway(THAW_GATEWAY_BIND=f"127.0.0.1:{gateway.port}")
    back.url = gateway.url
    wait_models(back)
    assert action(back) == {}


def test_what_was_deleted_while_no_operator_ran_is_removed_by_the_next_one(
    cluster: CustomResources, gateway: GatewayProcess, tmp_path: Path
) -> None:
    cluster.apply("chat", LLM_CONFIG)
    with operating(cluster, gateway.url, tmp_path):
        cluster.wait_condition("chat", "Deployed", "True", "Deployed")
    cluster.vanish("chat")
    with operating(cluster, gateway.url, tmp_path):
        wait_models(gateway)


def test_another_operator_takes_over_and_deploys_nothing_again(
    cluster: CustomResources, gateway: GatewayProcess, tmp_path: Path
) -> None:
    cluster.apply("chat", LLM_CONFIG)
    with operating(cluster, gateway.url, tmp_path):
        cluster.wait_condition("chat", "Deployed", "True", "Deployed")
    with operating(cluster, gateway.url, tmp_path):
        cluster.apply("other", LLM_CONFIG)
        cluster.wait_condition("other", "Deployed", "True", "Deployed")
    assert action(gateway)["version"] == "0.0.1"


def test_nothing_is_lost_while_the_cluster_is_away(
    cluster: CustomResources, gateway: GatewayProcess, operator: Operator
) -> None:
    cluster.apply("chat", LLM_CONFIG)
    cluster.apply("other", LLM_CONFIG)
    cluster.wait_condition("chat", "Deployed", "True", "Deployed")
    cluster.wait_condition("other", "Deployed", "True", "Deployed")
    cluster.go_away()
    gateway.call("PUT", ACTION, params={"overwrite": "true"}, json={"config": {**LLM_CONFIG, "slo": {"ttft_ms": 9}}})
    cluster.vanish("other")
    cluster.vanish("chat")
    cluster.apply("chat", {**LLM_CONFIG, "slo": {"tpot_ms": 50}})
    cluster.forget()
    cluster.come_back()
    wait_models(gateway, "chat")
    cluster.wait_condition("chat", "InSync", "True", "InSync")
    assert action(gateway)["config"]["slo"] == {"ttft_ms": 7500, "tpot_ms": 50}


def test_a_status_is_written_only_when_it_changes(
    cluster: CustomResources, gateway: GatewayProcess, invoker: FakeInvoker, operator: Operator
) -> None:
    cluster.apply("chat", LLM_CONFIG)
    cluster.apply("other", LLM_CONFIG)
    cluster.wait_condition("chat", "Ready", "True", "ScaledToZero")
    cluster.wait_condition("other", "InSync", "True", "InSync")
    before = len(cluster.writes)
    record = invoker.ready("guest/chat")
    cluster.wait_status("chat", instances=1)
    invoker.gone(record)
    cluster.wait_status("chat", instances=0)
    assert [r.path.split("/")[-2] for r in cluster.writes[before:]] == ["chat", "chat"]


def test_news_from_before_a_write_deploys_nothing_again(
    cluster: CustomResources, gateway: GatewayProcess, invoker: FakeInvoker, tmp_path: Path
) -> None:
    between = Between(gateway)
    with closing(between), operating(cluster, between.url, tmp_path):
        cluster.apply("chat", LLM_CONFIG)
        cluster.wait_condition("chat", "Deployed", "True", "Deployed")
        between.may_go.clear()
        invoker.ready("guest/chat")  # the news of this tells of the first generation
        assert between.held.wait(30)
        cluster.apply("chat", {**LLM_CONFIG, "slo": {"tpot_ms": 50}})
        cluster.wait_status("chat", version="0.0.2")
        while between.asked.acquire(blocking=False):
            pass
        between.may_go.set()
        assert between.asked.acquire(timeout=30)  # the held news has been taken in
        cluster.apply("other", LLM_CONFIG)
        cluster.wait_condition("other", "Deployed", "True", "Deployed")
        assert action(gateway)["version"] == "0.0.2"
