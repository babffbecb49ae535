"""What the operator does about one ModelFunction, and what it then says of it.  Pure: no clock, no socket.

The state server is the truth, and the resource its face:

- A resource's change is carried out once: the action carries the resource's generation.  What ``thaw`` changes in the
  action later stays, is shown, and is written over by the resource's next change.
- An action whose resource is gone is removed.  The action's mark says so, so no finalizer has to.
- Only the scheduler starts and ends instances.  A resource says how many there shall be at least.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from thaw import wire
from thaw.action import KIND_LLM
from thaw.config import parse_llm_config
from thaw.errors import ConfigError, ErrorInfo
from thaw.kubernetes.resource import (
    ACTION,
    FALSE,
    MARK,
    TRUE,
    UNKNOWN,
    Condition,
    Mark,
    ModelFunction,
    mark_of,
    reason_before,
    with_times,
)
from thaw.standing import Standing

NO_CAPACITY: Final = "NoCapacity"
NAME_TAKEN: Final = "NameTaken"
_NO_CAPACITY: Final = frozenset({"Unavailable", "PoolFull"})
_PASSING: Final = frozenset({"Starting", "NotDeployed", "GatewayAway"})
"""Reasons that are seen anew each time.  Others are remembered here while a gateway that was restarted knows none."""

_LABEL_CHARACTERS: Final = 63
_SCALING: Final = ("min_instances", "max_instances")


@dataclass(frozen=True, slots=True)
class Put:
    """Write the action.  ``creates``: it must not exist."""

    body: Mapping[str, Any]
    creates: bool


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete the action."""


Step = Put | Remove | None


def step(resource: ModelFunction | None, standing: Standing | None, namespace: str) -> Step:
    """``namespace``: the cluster's, in which the resource is or was."""
    mark = None if standing is None else mark_of(standing)
    is_own = mark is not None and mark.namespace == namespace
    if resource is None or resource.deleting:
        return Remove() if is_own else None
    wanted = Mark(namespace, resource.uid, resource.generation)
    annotations = [{"key": MARK, "value": wanted.plain()}]
    if standing is None:
        return Put({"config": resource.spec, "exec": {"kind": KIND_LLM}, "annotations": annotations}, creates=True)
    if not is_own or mark == wanted:
        return None
    if (scaling := _only_scaling(resource, standing)) is not None:
        return Put({"scaling": scaling, "annotations": annotations}, creates=False)
    return Put({"config": resource.spec, "exec": {"kind": KIND_LLM}, "annotations": annotations}, creates=False)


def _only_scaling(resource: ModelFunction, standing: Standing) -> Mapping[str, int] | None:
    """The bounds of the number of instances if the resource differs from the action in nothing else: then what runs
    goes on."""
    try:
        wanted = wire.to_plain(parse_llm_config(resource.spec))
    except ConfigError:
        return None
    is_ = wire.to_plain(standing.config)
    bounds = {name: wanted["scaling"][name] for name in _SCALING}
    is_["scaling"] |= bounds
    return bounds if is_ == wanted else None


def status(
    resource: ModelFunction,
    standing: Standing | None,
    namespace: str,
    refusal: ErrorInfo | None,
    away: str,
    now: datetime,
) -> Mapping[str, Any]:
    """``refusal``: what the check at deploy said of this generation.  ``away``: why the gateway does not answer."""
    own = standing if standing is not None and _is_of(standing, resource, namespace) else None
    if away:
        found: dict[str, Any] = {k: v for k, v in resource.status.items() if k != "conditions"}
    elif own is None:
        found = {"instances": 0, "readyInstances": 0}
    else:
        found = {"version": own.version, "instances": own.ready + own.starting, "readyInstances": own.ready}
        if started := _last_cold_start(resource, own):
            found["lastColdStart"] = started
    found |= {"observedGeneration": resource.generation, "selector": f"{ACTION}={resource.name[:_LABEL_CHARACTERS]}"}
    conditions = (
        _deployed(resource, standing, own, namespace, refusal, away),
        _ready(resource, own, away),
        _in_sync(resource, own),
    )
    before = resource.status.get("conditions") or ()
    stamp = _stamp(now)
    return {**found, "conditions": with_times([c for c in conditions if c], before, resource.generation, stamp)}


def _is_of(standing: Standing, resource: ModelFunction, namespace: str) -> bool:
    mark = mark_of(standing)
    return mark is not None and (mark.namespace, mark.uid) == (namespace, resource.uid)


def _deployed(
    resource: ModelFunction,
    standing: Standing | None,
    own: Standing | None,
    namespace: str,
    refusal: ErrorInfo | None,
    away: str,
) -> Condition:
    if refusal is not None:
        return Condition("Deployed", FALSE, refusal.code, _sentences(refusal))
    if own is not None and mark_of(own) == Mark(namespace, resource.uid, resource.generation):
        return Condition("Deployed", TRUE, "Deployed")
    if away:
        return Condition("Deployed", UNKNOWN, "GatewayAway", away)
    mark = None if standing is None else mark_of(standing)
    if standing is not None and (mark is None or mark.namespace != namespace):
        text = (
            f"This resource did not make the action {resource.name}.  Delete that: thaw action delete {resource.name}"
        )
        return Condition("Deployed", FALSE, NAME_TAKEN, text)
    return Condition("Deployed", FALSE, "Deploying")


def _ready(resource: ModelFunction, own: Standing | None, away: str) -> Condition:
    if away:
        return Condition("Ready", UNKNOWN, "GatewayAway", away)
    if own is None:
        return Condition("Ready", FALSE, "NotDeployed", "See the condition Deployed.")
    trouble = _trouble(resource, own)
    least = own.config.scaling.min_instances
    if own.ready >= max(1, least):
        return Condition("Ready", TRUE, "Serving")
    if trouble is not None:
        return Condition("Ready", TRUE if own.ready else FALSE, trouble.reason, trouble.message)
    if own.ready == own.starting == least == 0:
        return Condition("Ready", TRUE, "ScaledToZero", "The next request starts it.")
    text = f"{own.ready} of {max(1, least)} serve, {own.starting} start."
    return Condition("Ready", TRUE if own.ready else FALSE, "Starting", text)


def _trouble(resource: ModelFunction, own: Standing) -> Condition | None:
    """Why instances are missing.  A gateway forgets it when it ends; then what the status says stands until something
    happens."""
    if own.trouble is not None:
        code = own.trouble.code
        return Condition("Ready", FALSE, NO_CAPACITY if code in _NO_CAPACITY else code, _sentences(own.trouble))
    said = reason_before(resource, "Ready")
    if said is None or own.ready or own.starting or resource.status.get("version") != own.version:
        return None
    return said if said.status == FALSE and said.reason not in _PASSING | {NO_CAPACITY} else None


def _in_sync(resource: ModelFunction, own: Standing | None) -> Condition | None:
    """None while nothing of this resource is deployed, or an older generation of it."""
    mark = None if own is None else mark_of(own)
    if own is None or mark is None or mark.generation != resource.generation:
        return None
    try:
        is_same = parse_llm_config(resource.spec) == own.config
    except ConfigError:
        is_same = False
    if is_same:
        return Condition("InSync", TRUE, "InSync")
    text = "The action was changed by other means, and runs as changed.  The resource's next change is written over it."
    return Condition("InSync", FALSE, "ChangedElsewhere", text)


def _last_cold_start(resource: ModelFunction, own: Standing) -> Mapping[str, Any] | None:
    started = own.cold_start
    if started is None:
        return resource.status.get("lastColdStart")
    at = datetime.fromtimestamp(started.at_wall_ms / 1000, UTC)
    return {"at": _stamp(at), "timeToFirstToken": f"{started.ttft_ms / 1000:.2f}s", "mode": started.start_mode}


def _stamp(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def _sentences(error: ErrorInfo) -> str:
    return f"{error.message}  {error.hint}".strip()
