"""A ModelFunction as a value, and the status that the operator gives it.  Pure: JSON in, JSON out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from thaw.kubernetes.crd import GROUP
from thaw.standing import RESOURCE_MARK, Standing

ACTION: Final = f"{GROUP}/action"
BOUNDS: Final = ("min_instances", "max_instances", "keep_alive_s")
"""The fields of ``scaling`` that change without a new version."""

TRUE, FALSE, UNKNOWN = "True", "False", "Unknown"


@dataclass(frozen=True, slots=True)
class ModelFunction:
    """``generation`` counts the changes of ``spec``.  ``status`` is the one that the cluster holds."""

    name: str
    uid: str
    generation: int
    spec: Mapping[str, Any]
    status: Mapping[str, Any] = field(default_factory=dict)
    deleting: bool = False


def seen(plain: Mapping[str, Any]) -> ModelFunction:
    meta = plain["metadata"]
    return ModelFunction(
        str(meta["name"]),
        str(meta["uid"]),
        int(meta.get("generation", 0)),
        plain.get("spec") or {},
        plain.get("status") or {},
        "deletionTimestamp" in meta,
    )


@dataclass(frozen=True, slots=True)
class Mark:
    """Which resource an action was made from, and by which of its generations.  ``within``: the UID of the cluster's
    namespace, which no other cluster has.  ``name``: the resource's; a copy of the action has it, too, under a name of
    its own.  ``spec`` stands for all of the config but the bounds of the number of instances."""

    within: str
    name: str
    uid: str
    generation: int
    spec: str

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def mark_of(standing: Standing) -> Mark | None:
    """Return None for an action that no resource made, or whose mark somebody has overwritten."""
    match standing.annotations.get(RESOURCE_MARK):
        case {"within": str(within), "name": str(name), "uid": str(uid), "generation": int(generation), **more}:
            return Mark(within, name, uid, generation, str(more.get("spec", "")))
    return None


def mark_for(resource: ModelFunction, within: str) -> Mark:
    scaling = {k: v for k, v in (resource.spec.get("scaling") or {}).items() if k not in BOUNDS}
    rest = json.dumps({**resource.spec, "scaling": scaling}, sort_keys=True)
    digest = hashlib.sha256(rest.encode()).hexdigest()[:16]
    return Mark(within, resource.name, resource.uid, resource.generation, digest)


@dataclass(frozen=True, slots=True)
class Condition:
    """``reason`` is one word, ``message`` a sentence with what to do next."""

    type: str
    status: str
    reason: str
    message: str = ""


def with_times(
    conditions: Sequence[Condition], before: Sequence[Mapping[str, Any]], generation: int, now: str
) -> list[dict[str, Any]]:
    """The conditions' JSON.  ``now`` is when those began whose status is another than ``before``."""
    known = {str(c.get("type")): c for c in before}
    found = []
    for each in conditions:
        old = known.get(each.type, {})
        since = old.get("lastTransitionTime") if old.get("status") == each.status else None
        said = {"type": each.type, "status": each.status, "reason": each.reason}
        if each.message:  # servers of 1.20 that newer Go has built take an empty text for null, and refuse the status
            said["message"] = each.message
        found.append({**said, "lastTransitionTime": since or now, "observedGeneration": generation})
    return found


def without_times(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status without the times of its conditions."""
    conditions = [{k: v for k, v in c.items() if k != "lastTransitionTime"} for c in status.get("conditions") or ()]
    return {**status, "conditions": conditions}
