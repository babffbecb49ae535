"""The operator's manifests follow the API's description, and give it no more rights than it uses."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kubernetes.schema import problems
from thaw.kubernetes.settings import OperatorSettings

HERE = Path(__file__).parents[2] / "deploy/kubernetes/operator"


def manifests() -> list[dict[str, Any]]:
    listed = yaml.safe_load((HERE / "kustomization.yaml").read_text())["resources"]
    return [made for name in listed for made in yaml.safe_load_all((HERE / name).read_text())]


def namespace() -> str:
    return str(yaml.safe_load((HERE / "kustomization.yaml").read_text())["namespace"])


def one(kind: str) -> dict[str, Any]:
    (found,) = [m for m in manifests() if m["kind"] == kind]
    return found


@pytest.mark.parametrize("made", manifests(), ids=lambda m: m["kind"])
def test_a_manifest_is_what_the_api_describes(made: dict[str, Any]) -> None:
    assert problems(made, f"V1{made['kind']}", made["kind"]) == []


def test_it_may_do_what_it_does_and_no_more() -> None:
    allowed = {(r, verb) for rule in one("Role")["rules"] for r in rule["resources"] for verb in rule["verbs"]}
    assert allowed == {
        *{("modelfunctions", "list"), ("modelfunctions", "watch"), ("modelfunctions/status", "patch")},
        ("namespaces", "get"),
    }
    assert [rule["apiGroups"] for rule in one("Role")["rules"]] == [["thaw.dev"], ["thaw.dev"], [""]]
    assert one("Role")["rules"][-1]["resourceNames"] == [namespace()], "its own"
    assert not [m for m in manifests() if m["kind"].startswith("ClusterRole")]


def test_there_is_one_and_it_is_hardened_and_told_settings_that_it_has() -> None:
    spec = one("Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["serviceAccountName"] == one("ServiceAccount")["metadata"]["name"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    given = {e["name"] for e in container["env"]}
    assert given == {f.metadata["variable"] for f in fields(OperatorSettings)} - {"KUBECONFIG"}
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == one("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels
