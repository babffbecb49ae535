"""The overlay ``trial``, changed for a bare cluster that lacks some services.  A cluster that lacks none gets it
unchanged.

A cluster of a test may have no name server (the pods then get addresses of the Services in /etc/hosts), no storage
class (the state server's data then lasts as long as its pod), and be older than rules in definitions (1.25).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

from tests.kubernetes_real.kubectl import NAMESPACE, found, kubectl, names

OVERLAY = Path(__file__).parents[2] / "deploy/kubernetes/overlays/trial"
CRD = "modelfunctions.thaw.dev"
_RULES_SINCE = 25
_SERVICES = ("state", "relay", "store", "gateway")
_THAT_ASK = ("Deployment/gateway", "Deployment/scheduler", "Deployment/operator", "DaemonSet/node")


def overlay(directory: Path) -> Path:
    """A kustomization in ``directory``; the namespace is there already."""
    patches = [
        *([] if names("storageclass") else [_patch("StatefulSet/state", _without_storage())]),
        *([] if _minor_version() >= _RULES_SINCE else [_patch(f"CustomResourceDefinition/{CRD}", _without_rules())]),
        *([] if _has_dns() else [_patch(workload, [_addresses()]) for workload in _THAT_ASK]),
    ]
    plain = {"resources": [os.path.relpath(OVERLAY, directory.resolve())], "patches": patches}
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(plain))
    return directory


def _patch(workload: str, operations: list[dict[str, Any]]) -> dict[str, Any]:
    kind, _, name = workload.partition("/")
    return {"target": {"kind": kind, "name": name}, "patch": json.dumps(operations)}


def _without_storage() -> list[dict[str, Any]]:
    volumes = [{"name": "data", "emptyDir": {}}]
    return [
        {"op": "remove", "path": "/spec/volumeClaimTemplates"},
        {"op": "add", "path": "/spec/template/spec/volumes", "value": volumes},
    ]


def _minor_version() -> int:
    said = json.loads(kubectl("version", "-o", "json"))["serverVersion"]["minor"]
    return int(said.rstrip("+"))


def _without_rules() -> list[dict[str, Any]]:
    """The one rule is that ``min_instances`` is no more than ``max_instances``, which the gateway says then."""
    scaling = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/scaling"
    return [{"op": "remove", "path": f"{scaling}/x-kubernetes-validations"}]


def _has_dns() -> bool:
    return bool({"kube-dns", "coredns"} & names("service", "-n", "kube-system"))


def _addresses() -> dict[str, Any]:
    """The Services are made first, because their addresses are not known before."""
    made = [m for m in yaml.safe_load_all(kubectl("kustomize", str(OVERLAY))) if m["kind"] == "Service"]
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(made))
    aliases = []
    for name in _SERVICES:
        (service,) = found("service", name, "-n", NAMESPACE)
        aliases.append({"ip": service["spec"]["clusterIP"], "hostnames": [name]})
    return {"op": "add", "path": "/spec/template/spec/hostAliases", "value": aliases}
