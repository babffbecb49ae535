"""The operator between an API server in the test's process and a real gateway."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.gateway.conftest import KEY, LLM_CONFIG, GatewayProcess, gateway, invoker, start_gateway
from tests.gateway.fake_invoker import FakeInvoker
from tests.kubernetes.api_server import MERGE, Refusal
from tests.kubernetes.custom_resources import CustomResources
from thaw.errors import ModelNotFound
from thaw.instance import InstanceState
from thaw.kubernetes.operator import Operator
from thaw.kubernetes.settings import OperatorSettings
from thaw.logs import Log

__all__ = ["gateway", "invoker", "start_gateway"]

ACTION = "/api/v1/namespaces/_/actions/chat"


@pytest.fixture
def cluster() -> Iterator[CustomResources]:
    made = CustomResources()
    yield made
    made.close()
    assert made.problems == []


@contextmanager
def operating(cluster: CustomResources, url: str, directory: Path) -> Iterator[Operator]:
    settings = OperatorSettings(url, KEY, "thaw", cluster.kubeconfig(directory))
    operator = Operator(settings, Log("test"))
    operator.start()
    try:
        yield operator
    finally:
        operator.stop()


@pytest.fixture
def operator(cluster: CustomResources, gateway: GatewayProcess, tmp_path: Path) -> Iterator[Operator]:
    with operating(cluster, gateway.url, tmp_path) as made:
        yield made


def action(gateway: GatewayProcess) -> dict[str, Any]:
    reply = gateway.call("GET", ACTION)
    assert reply.status_code in (200, 404), reply.text
    return dict(reply.json()) if reply.ok else {}


def wait_models(gateway: GatewayProcess, *names: str) -> None:
    """Wait until these models are deployed and no others, as the gateway tells it."""
    found: dict[str, Any] = {"mark": "", "actions": [{"name": ""}]}
    while [each["name"] for each in found["actions"]] != list(names):
        query = {"known": found["mark"], "wait_s": 20}
        now = gateway.call("GET", "/api/v1/namespaces/_/standings", params=query).json()
        assert now["mark"] != found["mark"], now
        found = now


def scale(cluster: CustomResources, replicas: int | None = None) -> dict[str, Any]:
    """As an autoscaler reads and writes it."""
    url = f"http://127.0.0.1:{cluster.port}{cluster.collection}/chat/scale"
    headers = {"Authorization": f"Bearer {cluster.token}", "Content-Type": MERGE}
    if replicas is None:
        return dict(requests.get(url, headers=headers, timeout=10).json())
    body = {"spec": {"replicas": replicas}}
    return dict(requests.patch(url, json=body, headers=headers, timeout=10).json())


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


class Between:
    """Passes requests on to the gateway, and can hold back the answers to those who wait for news."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self.may_go = threading.Event()
        self.may_go.set()
        self.held = threading.Event()
        self.asked = threading.Semaphore(0)  # released for each question for news
        between = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if "wait_s=25" in self.path:
                    between.asked.release()
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = {name: self.headers[name] for name in ("Authorization", "Content-Type") if self.headers[name]}
                url = gateway.url + self.path
                reply = requests.request(self.command, url, data=body, headers=headers, timeout=60)
                if "wait_s=25" in self.path and not between.may_go.is_set():
                    between.held.set()
                    between.may_go.wait(30)
                self.send_response(reply.status_code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(reply.content)))
                self.end_headers()
                self.wfile.write(reply.content)

            do_PUT = do_DELETE = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                """Tests say what they need themselves."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.may_go.set()
        self._server.shutdown()
        self._server.server_close()


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
