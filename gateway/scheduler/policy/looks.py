"""The decision to ask a host about a model, and the moment by which a waiting request needs the answer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from gateway.scheduler.decisions import Decision, InspectModelOn, TimerKind, Wake
from gateway.scheduler.view.cluster import ClusterView
from gateway.scheduler.view.entries import DemandView
from gateway.scheduler.view.model import ModelView
from thaw.ids import ActionName, CommandId

INSPECT_DEADLINE_S, LOOK_DEADLINE_S = 30.0, 5.0
"""An inspection reads a model's index in a few small requests.  A host that has not answered by then will not answer.
A look whether known facts still hold is one request, and a start can go on without its answer."""

LOOKS_AT_ONCE: Final = 16
"""The most models that one event has looked at for actions that wait in a line.  A thousand may wait for the place or
the memory that one start has left, and few of them can have it; the others' looks would be too old for their turns."""

_TO_SAY_IT_S: Final = 2.0
"""An error must reach the gateway this long before the request's time limit."""


def ensure_model(view: ClusterView, uri: str, now_s: float) -> list[Decision]:
    """Ask a host for the model's facts unless they are current or already asked for.  In the pause after a failed
    inspection a host is asked only if a request is due before the pause ends; otherwise a timer asks later.  Nobody
    looks at a model that none of its actions may run."""
    model = view.model(uri)
    if model.actions and all(_is_refused(view, name) for name in model.actions):
        return []
    if model.is_current(now_s) or model.asked is not None:
        return []
    if now_s < model.again_s <= first_due_s(view, model):
        return []
    host = view.look_order.best(model.facts, model.failed_on)
    if host is None:
        return []  # there is no host yet, and its arrival is an event
    command_id = CommandId(view.new_id())
    is_look = model.fresh and model.facts is not None
    model.asked, model.asked_s = (host.host_id, command_id), now_s
    model.due_s = now_s + (LOOK_DEADLINE_S if is_look else INSPECT_DEADLINE_S)
    model.attempts += 1
    known = (model.facts.uri, model.facts.version) if model.facts is not None else ("", "")
    namespaces = tuple(sorted({name.partition("/")[0] for name in model.actions}))
    return [
        InspectModelOn(host.host_id, uri, command_id, *known, namespaces),
        Wake(model.due_s, TimerKind.INSPECT, uri),
    ]


def begins_a_look(decided: Iterable[Decision]) -> bool:
    return any(isinstance(d, InspectModelOn) for d in decided)


def _is_refused(view: ClusterView, name: ActionName) -> bool:
    facts = view.action(name).facts
    return facts is not None and facts.refused is not None


def first_due_s(view: ClusterView, model: ModelView) -> float:
    """Return when the first of the requests that wait for the model must be told an error, to hear it before its time
    limit."""
    firsts = (next(view.waiting(name), None) for name in model.actions)
    return min((due_s(view, first) for first in firsts if first is not None), default=math.inf)


def due_s(view: ClusterView, demand: DemandView) -> float:
    """Return a moment shortly before the request's time limit."""
    facts = view.action(demand.demand.action).facts
    return math.inf if facts is None else demand.queued_s + facts.timeout_s - _TO_SAY_IT_S
