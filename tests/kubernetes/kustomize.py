"""Builds a folder as ``kubectl kustomize`` does, with the features that deploy/kubernetes uses. Where kubectl is
installed, a test compares the result with kubectl's own.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from tests.kubernetes.schema import problems

Manifest = dict[str, Any]
_BY_NAME = ("containers", "env", "volumes", "volumeMounts", "ports")


def build(folder: Path) -> list[Manifest]:
    """All manifests of a kustomization, patched."""
    plain = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return _build(folder, plain, [])


def _build(folder: Path, plain: Manifest, so_far: list[Manifest]) -> list[Manifest]:
    made = list(so_far)
    for name in plain.get("resources", []):
        path = folder / name
        made += build(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    for name in plain.get("components", []):
        component = folder / name
        made = _build(component, yaml.safe_load((component / "kustomization.yaml").read_text()), made)
    made += [_config_map(folder, one) for one in plain.get("configMapGenerator", [])]
    for patch in plain.get("patches", []):
        text = patch["patch"] if "patch" in patch else (folder / patch["path"]).read_text()
        made = _patched(made, yaml.safe_load(text))
    for one in plain.get("replicas", []):
        for found in made:
            if found["kind"] in ("Deployment", "StatefulSet") and found["metadata"]["name"] == one["name"]:
                found["spec"]["replicas"] = one["count"]
    if "namespace" in plain:
        for one in made:
            _put_into(plain["namespace"], one)
    return made


def _put_into(namespace: str, one: Manifest) -> None:
    if one["kind"] not in ("Namespace", "CustomResourceDefinition"):
        one["metadata"]["namespace"] = namespace
    for subject in one.get("subjects", []):
        subject["namespace"] = namespace


def _patched(made: list[Manifest], patch: Manifest) -> list[Manifest]:
    """Fails for a patch of nothing, as kubectl does."""
    key = (patch["kind"], patch["metadata"]["name"])
    (found,) = [m for m in made if (m["kind"], m["metadata"]["name"]) == key]
    others = [m for m in made if m is not found]
    return others if patch.get("$patch") == "delete" else [*others, _merged(found, patch)]


def _merged(old: Any, new: Any, name: str = "") -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {key: _merged(old.get(key), value, key) for key, value in new.items()}
    if isinstance(old, list) and isinstance(new, list) and name in _BY_NAME:
        named = {one["name"]: one for one in old}
        changed = [_merged(named.pop(one["name"], None), one) for one in new]  # kubectl puts them first
        return [*changed, *named.values()]
    return new


def _config_map(folder: Path, asked: Manifest) -> Manifest:
    data = {name: (folder / name).read_text() for name in asked["files"]}
    metadata = {"name": asked["name"], "labels": asked["options"]["labels"], "namespace": asked["namespace"]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


# what tests of manifests ask for -------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
NO_RIGHTS = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def overlay(directory: Path, resources: list[str], components: list[str]) -> Path:
    """Write an overlay as a user does."""
    (directory / "deploy").symlink_to(KUBERNETES)
    plain = {"resources": resources, "components": [f"deploy/components/{name}" for name in components]}
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(plain))
    return directory


def named(made: list[Manifest], kind: str, name: str = "") -> Manifest:
    (found,) = [m for m in made if m["kind"] == kind and name in ("", m["metadata"]["name"])]
    return found


def variables(settings: type[Any]) -> set[str]:
    """Return the names of the variables that a component reads."""
    return {f.metadata["variable"] for f in fields(settings)}


def invalid(made: list[Manifest], *unknown: str) -> list[str]:
    """Describe what the API's description does not allow.  It says nothing of the kinds in ``unknown``."""
    return [p for one in made if one["kind"] not in unknown for p in problems(one, f"V1{one['kind']}", one["kind"])]


def as_kubectl_makes_it(folder: Path, made: list[Manifest]) -> bool:
    command = ["kubectl", "kustomize", "--load-restrictor=LoadRestrictionsNone", str(folder)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    one, other = (sorted(json.dumps(m, sort_keys=True) for m in some) for some in (yaml.safe_load_all(said), made))
    return one == other
