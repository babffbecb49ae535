"""The manifests in deploy/kubernetes follow the API's description, fit together, and give only the rights in use."""

from __future__ import annotations

import re
from dataclasses import fields
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
from tests.kubernetes.schema import problems

BASE = Path(__file__).parents[2] / "deploy/kubernetes/base"
MODELS = {"PodDisruptionBudget": "V1PodDisruptionBudget", "NetworkPolicy": "V1NetworkPolicy"}
WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet")
SETTINGS = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "invoker": InvokerSettings,
    "fetchd": FetchdSettings,
}


def manifests() -> list[dict[str, Any]]:
    listed = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    return [made for name in listed for made in yaml.safe_load_all((BASE / name).read_text())]


def workloads() -> list[dict[str, Any]]:
    return [m for m in manifests() if m["kind"] in WORKLOADS]


def containers() -> list[Any]:
    found = [(w, c) for w in workloads() for c in w["spec"]["template"]["spec"]["containers"]]
    return [pytest.param(workload, container, id=container["name"]) for workload, container in found]


def named(kind: str, name: str) -> dict[str, Any]:
    (found,) = [m for m in manifests() if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return found


def test_every_file_is_listed() -> None:
    listed = set(yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"])
    assert listed == {p.name for p in BASE.glob("*.yaml")} - {"kustomization.yaml"}


@pytest.mark.parametrize("made", manifests(), ids=lambda m: f"{m['kind']}-{m['metadata']['name']}")
def test_a_manifest_is_what_the_api_describes(made: dict[str, Any]) -> None:
    assert problems(made, MODELS.get(made["kind"], f"V1{made['kind']}"), made["kind"]) == []


@pytest.mark.parametrize(("workload", "container"), containers())
def test_a_component_is_told_settings_that_it_has(workload: dict[str, Any], container: dict[str, Any]) -> None:
    settings = SETTINGS.get(container["name"])
    given = {e["name"] for e in container.get("env", []) if e["name"].startswith("THAW_")}
    if settings is None:
        assert given == set()
        return
    known = {f.metadata["variable"] for f in fields(settings)}
    assert given - known == set()


def test_what_all_components_are_told_is_a_setting_of_one_of_them() -> None:
    known = {f.metadata["variable"] for settings in SETTINGS.values() for f in fields(settings)}
    assert set(named("ConfigMap", "thaw")["data"]) - known == set()


@pytest.mark.parametrize(("workload", "container"), containers())
def test_a_component_is_hardened_and_bounded(workload: dict[str, Any], container: dict[str, Any]) -> None:
    context, pod = container["securityContext"], workload["spec"]["template"]["spec"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"]["drop"] == ["ALL"]
    assert context["capabilities"].get("add", []) == (["DAC_OVERRIDE"] if container["name"] == "invoker" else [])
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert "memory" in container["resources"]["limits"]
    assert pod.get("automountServiceAccountToken", True) is (workload["metadata"]["name"] == "node")
    assert not re.search(r":latest$|^[^:]+$", container["image"])


def test_selectors_find_the_pods_that_they_mean() -> None:
    labels = {w["metadata"]["name"]: w["spec"]["template"]["metadata"]["labels"] for w in workloads()}
    for workload in workloads():
        assert workload["spec"]["selector"]["matchLabels"] == labels[workload["metadata"]["name"]]
    for service in (m for m in manifests() if m["kind"] == "Service"):
        assert service["spec"]["selector"] == labels[service["metadata"]["name"]]
    assert named("PodDisruptionBudget", "gateway")["spec"]["selector"]["matchLabels"] == labels["gateway"]


def test_a_cluster_that_restricts_pods_lets_a_nodes_directories_into_this_namespace() -> None:
    assert named("Namespace", "thaw")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"


def test_gateways_outlive_an_absence_of_the_state_server() -> None:
    (gateway,) = named("Deployment", "gateway")["spec"]["template"]["spec"]["containers"]
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/health"
    assert gateway["livenessProbe"]["httpGet"]["path"] == "/live"


def test_functions_have_no_network_at_all() -> None:
    policy = named("NetworkPolicy", "functions")["spec"]
    assert policy["podSelector"] == {"matchLabels": {APP_LABEL: APP}}
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert "ingress" not in policy
    assert "egress" not in policy


def test_an_invokers_sockets_have_the_same_path_on_the_node() -> None:
    pod = named("DaemonSet", "node")["spec"]["template"]["spec"]
    there = {v["name"]: v["hostPath"]["path"] for v in pod["volumes"] if "hostPath" in v}
    (invoker,) = [c for c in pod["containers"] if c["name"] == "invoker"]
    paths = {m["mountPath"]: there[m["name"]] for m in invoker["volumeMounts"] if m["name"] in there}
    check_same_path("/run/thaw", paths)
    check_same_path("/var/log/pods", paths)


def test_an_invoker_may_do_what_the_driver_asks_for_and_no_more() -> None:
    rules = named("Role", "node")["rules"]
    allowed = {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}
    verbs = ("get", "list", "watch", "create", "patch", "delete")
    assert allowed == {("pods", verb) for verb in verbs} | {("pods/resize", "patch"), ("events", "list")}
    assert not [m for m in manifests() if m["kind"].startswith("ClusterRole")]
