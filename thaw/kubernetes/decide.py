"""The operator's step for one ModelFunction, and the status that follows.  Pure: no clock, no socket.

The state server has the true state, and the resource shows it:

- A resource's change is carried out once: the action carries the resource's generation.  A later change of the action
  by ``thaw`` stays and is shown, until the resource's next change overwrites it.  If only the number of instances
  changes, only that is written.
- An action whose resource is gone is removed.  The action's mark says so, so no finalizer has to.
- Only the scheduler starts and ends instances.  A resource says how many there shall be at least.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from thaw.action import KIND_LLM
from thaw.config import parse_llm_config
from thaw.errors import ConfigError, ErrorInfo, PoolFull
from thaw.kubernetes.resource import (
    ACTION,
    BOUNDS,
    FALSE,
    TRUE,
    UNKNOWN,
    Condition,
    Mark,
    ModelFunction,
    mark_for,
    mark_of,
    with_times,
)
from thaw.standing import NO_CAPACITY, RESOURCE_MARK, ColdStart, Standing

NAME_TAKEN: Final = "NameTaken"
_LABEL_CHARACTERS: Final = 63


@dataclass(frozen=True, slots=True)
class Put:
    """Write the action.  ``creates``: it must not exist."""

    body: Mapping[str, Any]
    creates: bool


@dataclass(frozen=True, slots=True)
class Scale:
    """Write nothing but how many instances there may be."""

    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete the action."""


Step = Put | Scale | Remove


def step(resource: ModelFunction | None, standing: Standing | None, within: str) -> Step | None:
    """``within``: the UID of the cluster's namespace, in which the resource is or was."""
    mark = None if standing is None else _own_mark(standing, within)
    if resource is None or resource.deleting:
        return None if mark is None else Remove()
    wanted = mark_for(resource, within)
    annotations = [{"key": RESOURCE_MARK, "value": wanted.plain()}]
    put = {"config": resource.spec, "exec": {"kind": KIND_LLM}, "annotations": annotations}
    if standing is None:
        return Put(put, creates=True)
    if mark is None or mark == wanted:
        return None
    is_model = standing.config is not None  # otherwise only the scaling would change, and its code stay
    bounds = _bounds(resource) if is_model and (mark.uid, mark.spec) == (wanted.uid, wanted.spec) else None
    if bounds is not None and not _shares_instances(standing):
        return Scale({**bounds, "annotations": annotations})
    return Put(put, creates=False)


def _own_mark(standing: Standing, within: str) -> Mark | None:
    """None for an action that another cluster's resource made, or that is a copy of one of ours."""
    mark = mark_of(standing)
    return mark if mark is not None and (mark.within, mark.name) == (within, standing.name) else None


def _bounds(resource: ModelFunction) -> Mapping[str, Any] | None:
    try:
        scaling = parse_llm_config(resource.spec).scaling
    except ConfigError:
        return None  # the gateway says why
    return {name: getattr(scaling, name) for name in BOUNDS}


def _shares_instances(standing: Standing) -> bool:
    """Functions with adapters share instances while their settings are the same, so other bounds are other instances
    (docs/decisions/0043-adapters-share-instances.md)."""
    return standing.config is not None and bool(standing.config.model.adapter)


def status(
    resource: ModelFunction,
    standing: Standing | None,
    within: str,
    refusal: ErrorInfo | None,
    away: ErrorInfo | None,
    now: datetime,
) -> Mapping[str, Any]:
    """``refusal``: the error of the check at deploy for this generation.  ``away``: why the gateway does not answer."""
    mark = None if standing is None else _own_mark(standing, within)
    own = standing if mark is not None and mark.uid == resource.uid else None
    if away is not None:
        found: dict[str, Any] = {k: v for k, v in resource.status.items() if k != "conditions"}
    elif own is None:
        found = {"instances": 0, "readyInstances": 0}
    else:
        found = {"version": own.version, "instances": own.ready + own.starting, "readyInstances": own.ready}
        if own.cold_start is not None:
            found["lastColdStart"] = _last_cold_start(own.cold_start)
    found |= {"observedGeneration": resource.generation, "selector": f"{ACTION}={_label(resource.name)}"}
    conditions = (
        _deployed(resource, standing, mark, within, refusal, away),
        _ready(own, away),
        _in_sync(resource, own, mark),
    )
    before = resource.status.get("conditions") or ()
    stamp = _stamp(now)
    return {**found, "conditions": with_times([c for c in conditions if c], before, resource.generation, stamp)}


def _deployed(
    resource: ModelFunction,
    standing: Standing | None,
    mark: Mark | None,
    within: str,
    refusal: ErrorInfo | None,
    away: ErrorInfo | None,
) -> Condition:
    if refusal is not None:
        return Condition("Deployed", FALSE, refusal.code, _sentences(refusal))
    if mark == mark_for(resource, within):
        return Condition("Deployed", TRUE, "Deployed")
    if away is not None:
        return Condition("Deployed", UNKNOWN, away.code, _sentences(away))
    if standing is not None and mark is None:
        return Condition("Deployed", FALSE, NAME_TAKEN, _sentences(name_taken(resource.name)))
    return Condition("Deployed", FALSE, "Deploying")


def name_taken(name: str) -> ErrorInfo:
    return ErrorInfo(
        NAME_TAKEN, f"This resource did not make the action {name}.", f"Delete that: thaw action delete {name}"
    )


def _ready(own: Standing | None, away: ErrorInfo | None) -> Condition:
    if away is not None:
        return Condition("Ready", UNKNOWN, away.code, _sentences(away))
    if own is None:
        return Condition("Ready", FALSE, "NotDeployed", "See the condition Deployed.")
    if own.config is None:
        text = "The action was made something else than a model.  The resource's next change makes it one again."
        return Condition("Ready", FALSE, "NotAModel", text)
    least = own.config.scaling.min_instances
    if own.ready >= max(1, least):
        return Condition("Ready", TRUE, "Serving")
    if own.trouble is not None:
        code = NO_CAPACITY if own.trouble.code == PoolFull.__name__ else own.trouble.code
        return Condition("Ready", TRUE if own.ready else FALSE, code, _sentences(own.trouble))
    if own.ready == own.starting == least == 0:
        return Condition("Ready", TRUE, "ScaledToZero", "The next request starts it.")
    text = f"{own.ready} of {max(1, least)} serve, {own.starting} start."
    return Condition("Ready", TRUE if own.ready else FALSE, "Starting", text)


def _in_sync(resource: ModelFunction, own: Standing | None, mark: Mark | None) -> Condition | None:
    """None while nothing of this resource is deployed, or an older generation of it."""
    if own is None or mark is None or mark.generation != resource.generation:
        return None
    try:
        is_same = parse_llm_config(resource.spec) == own.config
    except ConfigError:
        is_same = False
    if is_same:
        return Condition("InSync", TRUE, "InSync")
    text = (
        "The action was changed by other means, and runs as changed.  The resource's next change is written over it; "
        "one of its number of instances leaves the rest."
    )
    return Condition("InSync", FALSE, "ChangedElsewhere", text)


def _last_cold_start(started: ColdStart) -> Mapping[str, Any]:
    at = datetime.fromtimestamp(started.at_wall_ms / 1000, UTC)
    return {"at": _stamp(at), "timeToFirstToken": f"{started.ttft_ms / 1000:.2f}s", "mode": started.start_mode}


def _label(name: str) -> str:
    """Return a label's value, which is shorter than a name may be, and ends with a letter or a digit."""
    return name[:_LABEL_CHARACTERS].rstrip("-.")


def _stamp(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def _sentences(error: ErrorInfo) -> str:
    return f"{error.message}  {error.hint}".strip()
