"""The manifests in deploy/kubernetes follow the API's description, fit together, and give only the rights in use.

The overlays and components, and the folder of the operator, are as they are described.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from fetchd.settings import FetchdSettings
from gateway.scheduler.settings import SchedulerSettings
from gateway.settings import GatewaySettings
from invoker.drivers.kubernetes.place import check_same_path
from invoker.drivers.kubernetes.spec import APP, APP_LABEL
from invoker.settings import InvokerSettings
from tests.kubernetes.kustomize import (
    KUBERNETES,
    NO_RIGHTS,
    ROOT,
    Manifest,
    as_kubectl_makes_it,
    build,
    invalid,
    named,
    overlay,
    variables,
)
from thaw.kubernetes.settings import OperatorSettings

BASE = build(KUBERNETES / "base")
GPU = build(KUBERNETES / "overlays/gpu")
OPERATOR = build(KUBERNETES / "operator")
OF_PROMETHEUS = ("ServiceMonitor", "PodMonitor")
SETTINGS = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "invoker": InvokerSettings,
    "fetchd": FetchdSettings,
}
OWN: Manifest = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "own", "namespace": "monitoring"},
    "data": {"key": "value"},
}
WORKLOADS = [m for m in BASE if m["kind"] in ("Deployment", "StatefulSet", "DaemonSet")]
containers = pytest.mark.parametrize(
    ("workload", "container"),
    [pytest.param(w, c, id=c["name"]) for w in WORKLOADS for c in w["spec"]["template"]["spec"]["containers"]],
)


@pytest.fixture
def monitored(tmp_path: Path) -> Path:
    """An overlay with the base, something of another namespace, and every component."""
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(OWN))
    return overlay(tmp_path, ["deploy/base", "own.yaml"], ["monitors", "dashboard", "single-node", "gpu"])


def pod_of(made: list[Manifest], kind: str, name: str) -> dict[str, Any]:
    return dict(named(made, kind, name)["spec"]["template"]["spec"])


@pytest.mark.parametrize("folder", ["base", "operator"])
def test_every_file_is_listed(folder: str) -> None:
    listed = set(yaml.safe_load((KUBERNETES / folder / "kustomization.yaml").read_text())["resources"])
    assert listed == {p.name for p in (KUBERNETES / folder).glob("*.yaml")} - {"kustomization.yaml"}


@pytest.mark.parametrize("made", [*BASE, *OPERATOR], ids=lambda m: f"{m['kind']}-{m['metadata']['name']}")
def test_a_manifest_is_what_the_api_describes(made: Manifest) -> None:
    assert invalid([made]) == []


@containers
def test_a_component_is_told_settings_that_it_has(workload: Manifest, container: dict[str, Any]) -> None:
    given = {e["name"] for e in container.get("env", []) if e["name"].startswith("THAW_")}
    settings = SETTINGS.get(container["name"])
    assert given - (variables(settings) if settings else set()) == set()


def test_what_all_components_are_told_is_a_setting_of_one_of_them() -> None:
    assert set(named(BASE, "ConfigMap", "thaw")["data"]) <= set().union(*map(variables, SETTINGS.values()))


@containers
def test_a_component_is_hardened_and_bounded(workload: Manifest, container: dict[str, Any]) -> None:
    context, pod = container["securityContext"], workload["spec"]["template"]["spec"]
    added = {"add": ["DAC_OVERRIDE"]} if container["name"] == "invoker" else {}
    expected = {**NO_RIGHTS, "capabilities": {"drop": ["ALL"], **added}}
    assert {name: context[name] for name in expected} == expected
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert "memory" in container["resources"]["limits"]
    assert pod.get("automountServiceAccountToken", True) is (workload["metadata"]["name"] == "node")
    assert not re.search(r":latest$|^[^:]+$", container["image"])


def test_selectors_find_the_pods_that_they_mean() -> None:
    labels = {w["metadata"]["name"]: w["spec"]["template"]["metadata"]["labels"] for w in WORKLOADS}
    for workload in WORKLOADS:
        assert workload["spec"]["selector"]["matchLabels"] == labels[workload["metadata"]["name"]]
    for service in (m for m in BASE if m["kind"] == "Service"):
        assert service["spec"]["selector"] == labels[service["metadata"]["name"]]
    assert named(BASE, "PodDisruptionBudget", "gateway")["spec"]["selector"]["matchLabels"] == labels["gateway"]


def test_a_cluster_that_restricts_pods_lets_a_nodes_directories_into_this_namespace() -> None:
    assert named(BASE, "Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"


def test_gateways_outlive_an_absence_of_the_state_server() -> None:
    (gateway,) = pod_of(BASE, "Deployment", "gateway")["containers"]
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/health"
    assert gateway["livenessProbe"]["httpGet"]["path"] == "/live"


def test_functions_have_no_network_at_all() -> None:
    policy = named(BASE, "NetworkPolicy", "functions")["spec"]
    assert policy == {"podSelector": {"matchLabels": {APP_LABEL: APP}}, "policyTypes": ["Ingress", "Egress"]}


def test_an_invokers_sockets_have_the_same_path_on_the_node() -> None:
    pod = pod_of(BASE, "DaemonSet", "node")
    there = {v["name"]: v["hostPath"]["path"] for v in pod["volumes"] if "hostPath" in v}
    (invoker,) = [c for c in pod["containers"] if c["name"] == "invoker"]
    paths = {m["mountPath"]: there[m["name"]] for m in invoker["volumeMounts"] if m["name"] in there}
    check_same_path("/run/thaw", paths)
    check_same_path("/var/log/pods", paths)


PODS = {("pods", verb) for verb in ("get", "list", "watch", "create", "patch", "delete")}
RESOURCES = {("modelfunctions", "list"), ("modelfunctions", "watch"), ("modelfunctions/status", "patch")}


@pytest.mark.parametrize(
    ("made", "rights"),
    [(BASE, {*PODS, ("pods/resize", "patch"), ("events", "list")}), (OPERATOR, {*RESOURCES, ("namespaces", "get")})],
    ids=["invoker", "operator"],
)
def test_an_invoker_and_an_operator_have_the_rights_in_use(made: list[Manifest], rights: set[tuple[str, str]]) -> None:
    rules = named(made, "Role")["rules"]
    assert {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]} == rights
    assert not [m for m in made if m["kind"].startswith("ClusterRole")]


def test_an_operator_reads_its_own_namespace_alone() -> None:
    rules = named(OPERATOR, "Role")["rules"]
    assert [rule["apiGroups"] for rule in rules] == [["thaw.dev"], ["thaw.dev"], [""]]
    assert rules[-1]["resourceNames"] == [named(OPERATOR, "Deployment")["metadata"]["namespace"]]


def test_there_is_one_operator_and_it_is_hardened_and_told_settings_that_it_has() -> None:
    spec, pod = named(OPERATOR, "Deployment")["spec"], pod_of(OPERATOR, "Deployment", "operator")
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    (container,) = pod["containers"]
    assert pod["serviceAccountName"] == named(OPERATOR, "ServiceAccount")["metadata"]["name"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == NO_RIGHTS
    assert {e["name"] for e in container["env"]} == variables(OperatorSettings) - {"KUBECONFIG"}
    selected = named(OPERATOR, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"]
    assert spec["selector"]["matchLabels"] == selected == spec["template"]["metadata"]["labels"]


# overlays and components ---------------------------------------------------------------------------------------------


def test_one_node_gets_one_of_everything_and_no_budget_that_keeps_it_from_being_emptied() -> None:
    made = build(KUBERNETES / "overlays/single-node")
    assert invalid(made) == []
    replicas = {m["metadata"]["name"]: m["spec"]["replicas"] for m in made if "replicas" in m.get("spec", {})}
    assert replicas == dict.fromkeys(("gateway", "scheduler", "state", "relay"), 1)
    assert [m for m in made if m["kind"] == "PodDisruptionBudget"] == []


def test_a_trial_has_a_model_store_and_an_operator_with_the_first_key() -> None:
    made = build(KUBERNETES / "overlays/trial")
    assert invalid(made, "CustomResourceDefinition") == []
    (port,) = named(made, "Service", "store")["spec"]["ports"]
    placed = [m for m in made if m["kind"] not in ("Namespace", "CustomResourceDefinition")]
    assert {m["metadata"].get("namespace") for m in placed} == {"thaw"}
    assert named(made, "ConfigMap", "thaw")["data"]["THAW_S3_ENDPOINT"] == f"http://store:{port['port']}"
    (container,) = pod_of(made, "Deployment", "operator")["containers"]
    key = {one["name"]: one for one in container["env"]}["THAW_API_KEY"]
    assert key["valueFrom"]["secretKeyRef"] == {"name": "thaw", "key": "first-key"}


def test_gpus_are_told_to_invokers_on_nodes_that_have_some() -> None:
    assert invalid(GPU) == []
    config = named(GPU, "ConfigMap", "thaw")["data"]
    assert (config["THAW_DEVICE"], config["THAW_MODELS"]) == ("cuda:0", "s3://models")
    assert "THAW_DEVICE" in variables(InvokerSettings)
    pod = pod_of(GPU, "DaemonSet", "node")
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    fetchd, invoker = pod["containers"]
    assert (fetchd["name"], invoker["name"]) == ("fetchd", "invoker")
    least = int(fetchd["resources"]["requests"]["memory"].removesuffix("Gi")) << 10
    assert int(config["THAW_FETCHD_POOL_MB"]) < least
    assert fetchd["resources"]["requests"]["cpu"] == "250m", "the rest is the base's"


def test_a_node_with_gpus_has_the_models_image_before_it_joins() -> None:
    """Its invoker keeps no stem cell of a model on a GPU, so nothing else pulls the image before the first start."""
    (pull,) = pod_of(GPU, "DaemonSet", "node")["initContainers"]
    assert pull["image"] == named(GPU, "ConfigMap", "thaw")["data"]["THAW_IMAGE_LLM"]
    assert "nvidia.com/gpu" not in pull["resources"]["limits"]


def test_an_overlay_may_have_every_component_and_what_is_of_another_namespace(monitored: Path) -> None:
    made = build(monitored)
    assert invalid(made, *OF_PROMETHEUS) == []
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
    templates = [m["spec"]["template"] for m in made if "template" in m.get("spec", {})]
    pods = {t["metadata"]["labels"]["app.kubernetes.io/name"]: t["spec"] for t in templates}
    monitors = [m for m in made if m["kind"] in OF_PROMETHEUS]
    assert {m["metadata"]["name"] for m in monitors} == {"gateway", "scheduler", "node"}
    for monitor in monitors:
        (endpoint,) = monitor["spec"].get("endpoints") or monitor["spec"]["podMetricsEndpoints"]
        pod = pods[monitor["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"]]
        (env,) = [c["env"] for c in pod["containers"] if endpoint["port"] in {p["name"] for p in c.get("ports", [])}]
        token = endpoint["authorization"]["credentials"]
        (told,) = [e for e in env if e["name"] == "THAW_METRICS_TOKEN"]
        assert told["valueFrom"]["secretKeyRef"] == token == {"name": "thaw-metrics", "key": "token"}
    service = named(made, "Service", "gateway")
    label = service["metadata"]["labels"]["app.kubernetes.io/name"]
    assert label == "thaw-gateway", "a ServiceMonitor selects Services"
    assert service["spec"]["ports"][0]["name"] == "http"


def test_the_dashboard_asks_for_metrics_that_there_are(monitored: Path) -> None:
    config = named(build(monitored), "ConfigMap", "thaw-dashboard")
    assert config["metadata"]["labels"] == {"grafana_dashboard": "1"}
    rows = re.findall(r"^\| `(thaw_\w+)` \| \w+ \| ([^|]*) \|", (ROOT / "docs/metrics.md").read_text(), re.M)
    known = {name: set(re.findall(r"\w+", labels)) for name, labels in rows}
    for panel in json.loads(config["data"]["thaw.json"])["panels"]:
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
    assert as_kubectl_makes_it(where, build(where))
