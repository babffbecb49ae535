"""The overlays and components of deploy/kubernetes: their results are valid, complete, and as described."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from invoker.settings import InvokerSettings
from tests.kubernetes.kustomize import Manifest, build
from tests.kubernetes.schema import problems

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
MODELS = {"PodDisruptionBudget": "V1PodDisruptionBudget", "NetworkPolicy": "V1NetworkPolicy"}
OF_THE_OPERATOR = ("ServiceMonitor", "PodMonitor")
OWN: Manifest = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "own", "namespace": "monitoring"},
    "data": {"key": "value"},
}
WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet")


@pytest.fixture
def monitored(tmp_path: Path) -> Path:
    """An overlay as a user writes it: the base, something of another namespace, and every component."""
    (tmp_path / "deploy").symlink_to(KUBERNETES)
    components = [f"deploy/components/{name}" for name in ("monitors", "dashboard", "single-node", "gpu")]
    plain = {"resources": ["deploy/base", "own.yaml"], "components": components}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(plain))
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(OWN))
    return tmp_path


def named(made: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [m for m in made if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return found


def check(made: list[Manifest]) -> None:
    assert [
        problem
        for one in made
        if one["kind"] not in OF_THE_OPERATOR
        for problem in problems(one, MODELS.get(one["kind"], f"V1{one['kind']}"), one["kind"])
    ] == []


def test_one_node_gets_one_of_everything_and_no_budget_that_keeps_it_from_being_emptied() -> None:
    made = build(KUBERNETES / "overlays/single-node")
    check(made)
    assert {m["metadata"]["name"]: m["spec"]["replicas"] for m in made if "replicas" in m.get("spec", {})} == {
        "gateway": 1,
        "scheduler": 1,
        "state": 1,
        "relay": 1,
    }
    assert [m for m in made if m["kind"] == "PodDisruptionBudget"] == []


def test_a_trial_has_a_model_store_and_an_operator_with_the_first_key() -> None:
    made = build(KUBERNETES / "overlays/trial")
    check([one for one in made if one["kind"] != "CustomResourceDefinition"])
    (port,) = named(made, "Service", "store")["spec"]["ports"]
    placed = [m for m in made if m["kind"] not in ("Namespace", "CustomResourceDefinition")]
    assert {m["metadata"].get("namespace") for m in placed} == {"thaw"}
    assert named(made, "ConfigMap", "thaw")["data"]["THAW_S3_ENDPOINT"] == f"http://store:{port['port']}"
    (container,) = named(made, "Deployment", "operator")["spec"]["template"]["spec"]["containers"]
    key = {one["name"]: one for one in container["env"]}["THAW_API_KEY"]
    assert key["valueFrom"]["secretKeyRef"] == {"name": "thaw", "key": "first-key"}


def test_gpus_are_told_to_invokers_on_nodes_that_have_some() -> None:
    made = build(KUBERNETES / "overlays/gpu")
    check(made)
    config = named(made, "ConfigMap", "thaw")["data"]
    assert (config["THAW_DEVICE"], config["THAW_MODELS"]) == ("cuda:0", "s3://models")
    assert "THAW_DEVICE" in {f.metadata["variable"] for f in fields(InvokerSettings)}
    pod = named(made, "DaemonSet", "node")["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    fetchd, invoker = pod["containers"]
    assert (fetchd["name"], invoker["name"]) == ("fetchd", "invoker")
    least = int(fetchd["resources"]["requests"]["memory"].removesuffix("Gi")) << 10
    assert int(config["THAW_FETCHD_POOL_MB"]) < least
    assert fetchd["resources"]["requests"]["cpu"] == "250m", "the rest is the base's"


def test_a_node_with_gpus_has_the_models_image_before_it_joins() -> None:
    """Its invoker keeps no stem cell of a model on a GPU, so nothing else pulls the image before the first start."""
    made = build(KUBERNETES / "overlays/gpu")
    pod = named(made, "DaemonSet", "node")["spec"]["template"]["spec"]
    (pull,) = pod["initContainers"]
    assert pull["image"] == named(made, "ConfigMap", "thaw")["data"]["THAW_IMAGE_LLM"]
    assert "nvidia.com/gpu" not in pull["resources"]["limits"]


def test_an_overlay_may_have_every_component_and_what_is_of_another_namespace(monitored: Path) -> None:
    made = build(monitored)
    check(made)
    assert named(made, "ConfigMap", "own") == OWN
    assert {m["metadata"].get("namespace") for m in made if m["kind"] != "Namespace" and m != OWN} == {"thaw"}
    assert named(made, "Deployment", "gateway")["spec"]["replicas"] == 1
    assert named(made, "ConfigMap", "thaw")["data"]["THAW_DEVICE"] == "cuda:0"


def test_only_prometheus_in_its_own_namespace_reaches_a_nodes_metrics(monitored: Path) -> None:
    (rule,) = named(build(monitored), "NetworkPolicy", "node-metrics")["spec"]["ingress"]
    (source,) = rule["from"]
    assert source["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}
    assert source["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "prometheus"}


def test_prometheus_finds_every_process_by_its_label_and_port_and_shares_a_token(monitored: Path) -> None:
    made = build(monitored)
    check(made)
    pods = {
        m["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"]: m["spec"]["template"]["spec"]
        for m in made
        if m["kind"] in WORKLOADS
    }
    monitors = [m for m in made if m["kind"] in OF_THE_OPERATOR]
    assert {m["metadata"]["name"] for m in monitors} == {"gateway", "scheduler", "node"}
    for monitor in monitors:
        (endpoint,) = monitor["spec"].get("endpoints") or monitor["spec"]["podMetricsEndpoints"]
        label = monitor["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"]
        (container,) = [
            c for c in pods[label]["containers"] if endpoint["port"] in {p["name"] for p in c.get("ports", [])}
        ]
        token = endpoint["authorization"]["credentials"]
        (told,) = [e for e in container["env"] if e["name"] == "THAW_METRICS_TOKEN"]
        assert told["valueFrom"]["secretKeyRef"] == token == {"name": "thaw-metrics", "key": "token"}
    service = named(made, "Service", "gateway")
    assert service["metadata"]["labels"]["app.kubernetes.io/name"] == "thaw-gateway", (
        "a ServiceMonitor selects Services"
    )
    assert service["spec"]["ports"][0]["name"] == "http"


def test_the_dashboard_asks_for_metrics_that_there_are(monitored: Path) -> None:
    config = named(build(monitored), "ConfigMap", "thaw-dashboard")
    assert config["metadata"]["labels"] == {"grafana_dashboard": "1"}
    dashboard = json.loads(config["data"]["thaw.json"])
    page = (ROOT / "docs/metrics.md").read_text()
    known: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^\| `(thaw_\w+)` \| \w+ \| ([^|]*) \|", page, re.M):
        known[name] = set(re.findall(r"\w+", labels))
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            (name,) = re.findall(r"thaw_\w+", target["expr"])
            name = name.removesuffix("_bucket")
            assert name in known, target["expr"]
            asked = {label for by in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in re.findall(r"\w+", by)}
            assert asked - {"le"} <= known[name], target["expr"]
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= asked


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl to compare with")
@pytest.mark.parametrize("folder", ["base", "overlays/single-node", "overlays/gpu", "overlays/trial", "monitored"])
def test_kubectl_makes_the_same_of_them(folder: str, monitored: Path) -> None:
    where = monitored if folder == "monitored" else KUBERNETES / folder
    command = ["kubectl", "kustomize", "--load-restrictor=LoadRestrictionsNone", str(where)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def plain(made: list[Any]) -> list[str]:
        return sorted(json.dumps(one, sort_keys=True) for one in made)

    assert plain(list(yaml.safe_load_all(said))) == plain(build(where))
