"""A ModelFunction as a value, and the status that the operator gives it.  Pure: JSON in, JSON out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from thaw.kubernetes.crd import GROUP
from thaw.standing import Standing

MARK: Final = f"{GROUP}/modelfunction"
"""The annotation of an action that a resource made."""

ACTION: Final = f"{GROUP}/action"
TRUE, FALSE, UNKNOWN = "True", "False", "Unknown"


@dataclass(frozen=True, slots=True)
class ModelFunction:
    """``generation`` counts the changes of ``spec``.  ``status`` is what the cluster holds."""

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
    """Which resource an action was made from, and by which of its generations."""

    namespace: str
    uid: str
    generation: int

    def plain(self) -> dict[str, Any]:
        return {"namespace": self.namespace, "uid": self.uid, "generation": self.generation}


def mark_of(standing: Standing) -> Mark | None:
    """None for an action that no resource made, or whose mark somebody has written over."""
    match standing.annotations.get(MARK):
        case {"namespace": str(namespace), "uid": str(uid), "generation": int(generation)}:
            return Mark(namespace, uid, generation)
    return None


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
        said = {"type": each.type, "status": each.status, "reason": each.reason, "message": each.message}
        found.append({**said, "lastTransitionTime": since or now, "observedGeneration": generation})
    return found


def reason_before(resource: ModelFunction, type_: str) -> Condition | None:
    """What the status says of ``type_`` now."""
    for each in resource.status.get("conditions") or ():
        if each.get("type") == type_:
            return Condition(type_, each.get("status", ""), each.get("reason", ""), each.get("message", ""))
    return None
