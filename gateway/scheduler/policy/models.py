"""Models: the consequences of a host's inspection of one, and how long an inspection is repeated.

Each start of a plain name is preceded by an inspection (looks.py), because the name may mean another version by now.

A store that restarts is away for some time.  An inspection that fails without the developer's fault is therefore
repeated for as long as a start may make no progress, with pauses that grow to LOOK_AGAIN_S.  A request whose time limit
comes first ends with the store's own error and not with that of its limit::

    inspect ──facts──▶ starts
      │ any error of ours, and the facts of an earlier look stand ──▶ starts with those
      │ the developer's error ──▶ another host says so too, or no facts are known ──▶ every waiting request fails
      │ any other error ──▶ requests at their time limit fail ──▶ pause ──▶ inspect again, until THAW_START_DEADLINE_S
"""

from __future__ import annotations

from typing import Final

from gateway.scheduler.decisions import Decision, Flag, TimerKind, Wake
from gateway.scheduler.policy.failing import fail
from gateway.scheduler.policy.looks import due_s, ensure_model, first_due_s
from gateway.scheduler.policy.starts import RETRY_BASE_S, RETRY_CAP_S, rescale, wake
from gateway.scheduler.view.cluster import ClusterView
from gateway.scheduler.view.model import ModelView
from relay.protocol.messages import CommandRefused, ModelInspected
from thaw.errors import DeveloperError, ErrorInfo, StoreUnavailable, from_info
from thaw.ids import GroupId
from thaw.model import ModelFacts

LOOK_AGAIN_S: Final = 5.0
"""The longest pause between two inspections: a store that is back is noticed within this time."""


def inspected(view: ClusterView, event: ModelInspected, now_s: float) -> list[Decision]:
    model = view.model(event.uri)
    if model.asked is None or model.asked[1] != event.command_id:
        return []  # an answer that nobody waits for any more: the model may be another one by now
    if event.facts is None and event.error is None:
        return _confirmed(view, event, model, now_s)
    if event.facts is None:
        error = event.error or StoreUnavailable(f"{event.uri} could not be inspected").info()
        return _failed(view, event.uri, model, error, now_s)
    return _seen(view, model, event.facts, now_s)


def _confirmed(view: ClusterView, event: ModelInspected, model: ModelView, now_s: float) -> list[Decision]:
    """The host named a version without its facts.  If another scheduler had asked, we may not have them."""
    if model.facts is None or model.facts.version != event.unchanged_version:
        return []
    return _seen(view, model, model.facts, now_s)


def _seen(view: ClusterView, model: ModelView, facts: ModelFacts, now_s: float) -> list[Decision]:
    """Take over the facts that a host has just seen.  Actions that waited for them start with them.  For later starts
    the facts are as old as the question, because the host may have looked at once and answered late."""
    model.failed_on = None
    decided = _take(view, model, facts, now_s)
    model.looked_s = min(model.looked_s, model.asked_s)
    return decided


def _take(view: ClusterView, model: ModelView, facts: ModelFacts, now_s: float) -> list[Decision]:
    model.take(facts, now_s)
    model.asked, model.attempts, model.failing_since_s, model.doubted = None, 0, None, False
    return _rescale_users(view, model, now_s)


def refused(view: ClusterView, event: CommandRefused, now_s: float) -> list[Decision]:
    for uri, model in view.models.items():
        if model.asked is not None and model.asked[1] == event.command_id:
            return _failed(view, uri, model, event.error, now_s)
    return []


def overdue(view: ClusterView, uri: str, now_s: float) -> list[Decision]:
    """Handle a model's timer.  An inspection without an answer counts as a failure of the store.  If no inspection is
    open, the pause after a failed one has ended."""
    model = view.model(uri)
    if model.asked is not None and now_s < model.due_s:
        return []  # this timer belongs to an earlier question
    if model.asked is not None:
        error = StoreUnavailable(f"no host could look at {uri} in time", hint="is the model store up?").info()
        return _failed(view, uri, model, error, now_s)
    if not any(view.action(a).waiting or view.action(a).minimum for a in model.actions):
        model.attempts, model.failing_since_s = 0, None  # no action needs the model now
        return []
    if now_s < model.again_s:
        return [Wake(model.again_s, TimerKind.INSPECT, uri)]  # this timer belongs to an earlier question
    return ensure_model(view, uri, now_s)


def _failed(view: ClusterView, uri: str, model: ModelView, error: ErrorInfo, now_s: float) -> list[Decision]:
    if model.asked is not None:
        model.failed_on, model.asked = model.asked[0], None
    ours = not isinstance(from_info(error), DeveloperError)
    decided: list[Decision] = [Flag("look_failed", {"uri": uri, "code": error.code, "error": error.message})]
    if ours and model.fresh and model.facts is not None:
        # a store that is away must not keep models from starting that lie in the hosts' memory
        return [*decided, *_take(view, model, model.facts, now_s)]
    if not ours and model.fresh and model.facts is not None and not model.doubted and _is_another_host(view, model):
        model.doubted = True  # this host alone may be wrong: its credentials, its disk
        return [*decided, *ensure_model(view, uri, now_s)]
    if model.failing_since_s is None:
        model.failing_since_s = now_s
    if ours and now_s - model.failing_since_s < view.settings.start_deadline_s:
        decided += _fail_overdue(view, model, error, now_s)
        model.again_s = _next_look_s(view, model, now_s)
        return [*decided, Wake(model.again_s, TimerKind.INSPECT, uri)]
    model.attempts, model.fresh, model.failing_since_s, model.doubted = 0, False, None, False
    for name in sorted(model.actions):
        action = view.action(name)
        decided += fail(view, name, tuple(action.waiting), error, GroupId(""))
        if ours and action.minimum:
            decided += wake(action, name, now_s + RETRY_CAP_S, now_s)
    return decided


def _is_another_host(view: ClusterView, model: ModelView) -> bool:
    return any(host.host_id != model.failed_on for host in view.live_hosts())


def _fail_overdue(view: ClusterView, model: ModelView, error: ErrorInfo, now_s: float) -> list[Decision]:
    """Fail the requests that cannot wait for another inspection."""
    decided: list[Decision] = []
    for name in sorted(model.actions):
        due = tuple(d.demand.activation_id for d in view.waiting(name) if due_s(view, d) <= now_s)
        decided += fail(view, name, due, error, GroupId(""))
    return decided


def _next_look_s(view: ClusterView, model: ModelView, now_s: float) -> float:
    """Return when to inspect again: after a pause, and in time for the request that is due first."""
    pause_s = min(LOOK_AGAIN_S, RETRY_BASE_S * 2.0 ** min(model.attempts, 16))
    return min(now_s + pause_s, max(now_s + RETRY_BASE_S, first_due_s(view, model)))


def _rescale_users(view: ClusterView, model: ModelView, now_s: float) -> list[Decision]:
    return [d for name in sorted(model.actions) for d in rescale(view, name, now_s)]
