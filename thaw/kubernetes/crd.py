"""The definition of ModelFunction, made from the config's JSON Schema.  ``python -m thaw.kubernetes.crd`` prints it.

Kubernetes takes a subset of JSON Schema in which each value has a type and an object that names its properties refuses
no others: an unknown one is dropped, or refused by ``kubectl`` and by clusters that validate strictly.  A package that
adds transports or schemes of model URIs is in the schema of the process that prints it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, Final

from thaw.config import ScalingConfig, schema

GROUP: Final = "thaw.dev"
VERSION: Final = "v1"
KIND: Final = "ModelFunction"
PLURAL: Final = "modelfunctions"
_KEPT: Final = ("type", "description", "pattern", "minimum", "maximum", "enum", "required")
_TEXT: Final = {"type": "string"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_CONDITION: Final = {
    "type": "object",
    "required": ["type", "status"],
    "properties": {
        **dict.fromkeys(("type", "status", "reason", "message"), _TEXT),
        "lastTransitionTime": {"type": "string", "format": "date-time"},
        "observedGeneration": _COUNT,
    },
}
_STATUS: Final = {
    "type": "object",
    "properties": {
        "observedGeneration": _COUNT,
        "version": {**_TEXT, "description": "of the action"},
        "instances": {**_COUNT, "description": "that serve or start; a group of stages is one"},
        "readyInstances": _COUNT,
        "selector": {**_TEXT, "description": "what /scale tells autoscalers"},
        "lastColdStart": {
            "type": "object",
            "properties": {
                "at": {"type": "string", "format": "date-time"},
                "timeToFirstToken": {**_TEXT, "description": "the wait for the start included"},
                "mode": _TEXT,
            },
        },
        "conditions": {
            "type": "array",
            "items": _CONDITION,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
    },
}
_READY: Final = '.status.conditions[?(@.type=="Ready")]'
_COLUMNS: Final = (
    ("Ready", "string", f"{_READY}.status"),
    ("Reason", "string", f"{_READY}.reason"),
    ("Instances", "integer", ".status.instances"),
    ("Last cold start", "date", ".status.lastColdStart.at"),
    ("First token", "string", ".status.lastColdStart.timeToFirstToken"),
    ("Age", "date", ".metadata.creationTimestamp"),
)


def structural(node: Mapping[str, Any]) -> dict[str, Any]:
    """A part of the config's schema as Kubernetes takes it."""
    found = {name: node[name] for name in _KEPT if name in node}
    if "const" in node:
        found["enum"] = [node["const"]]
    if "enum" in found:
        found.setdefault("type", "string" if isinstance(found["enum"][0], str) else "integer")
    if "properties" in node:
        found["properties"] = {name: structural(each) for name, each in node["properties"].items()}
    elif found["type"] == "object":
        found["x-kubernetes-preserve-unknown-fields"] = True  # the gateway knows which names there are
    return found


def spec_schema() -> dict[str, Any]:
    """The config.  ``/scale`` needs a number of replicas to be there, so it has a default.  The cluster refuses an
    autoscaler more of them than there may be."""
    found = structural(schema())
    scaling = found["properties"]["scaling"]
    scaling["default"] = {}
    scaling["properties"]["min_instances"]["default"] = 0
    most = f"(has(self.max_instances) ? self.max_instances : {ScalingConfig().max_instances})"
    text = "min_instances, the replicas, must not be more than max_instances"
    scaling["x-kubernetes-validations"] = [{"rule": f"self.min_instances <= {most}", "message": text}]
    return found


def definition() -> dict[str, Any]:
    replicas = {
        "specReplicasPath": ".spec.scaling.min_instances",
        "statusReplicasPath": ".status.instances",
        "labelSelectorPath": ".status.selector",
    }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {
            "openAPIV3Schema": {
                "type": "object",
                "required": ["spec"],
                "properties": {"spec": spec_schema(), "status": _STATUS},
            }
        },
        "subresources": {"status": {}, "scale": replicas},
        "additionalPrinterColumns": [{"name": n, "type": t, "jsonPath": path} for n, t, path in _COLUMNS],
    }
    names = {"kind": KIND, "plural": PLURAL, "singular": "modelfunction", "shortNames": ["mf"]}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(definition(), indent=2) + "\n")
